"""Collects the evaluation prompts: the held-out prompts of `[prompts]`, and `[[eval.sets]]`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig, PromptSource, source_settings, unseen
from rollout.prompts.named_source import GENERATED, HELD_OUT, HeldOutConfig, check_names
from rollout.prompts.registry import make_source

log = logging.getLogger(__name__)


def held_out_sets(
    source: PromptSource, prompts: PromptConfig, sets: Sequence[HeldOutConfig], limit: int
) -> Mapping[str, Sequence[Prompt]]:
    """Return set name -> evaluation prompts, which are never trained on.

    The held-out prompts of `[prompts]` form the set `held_out`. If it is empty and other sets exist, it is
    omitted.

    Args:
        source: stream of `prompts`.
        prompts: section `[prompts]`.
        sets: the tables `[[eval.sets]]`.
        limit: maximum prompts of a set without its own limit.

    Raises:
        SettingsError: a set cannot be read, or all its prompts are trained on; the message names the set.
    """
    check_names(sets, "eval.sets")
    own = list(source.held_out())[:limit]
    prompts_by_set: dict[str, Sequence[Prompt]] = {HELD_OUT: own} if own or not sets else {}
    trained = frozenset(source.trained_texts()) if sets else frozenset()
    for config in sets:
        try:
            prompts_by_set[config.name] = _read(config, prompts, trained, config.limit or limit)
        except SettingsError as error:
            raise SettingsError(f"eval set {config.name}: {error}") from None
    return prompts_by_set


def _read(
    config: HeldOutConfig, prompts: PromptConfig, trained: frozenset[str], limit: int
) -> Sequence[Prompt]:
    merged = source_settings(prompts, config)
    if merged.source in GENERATED:  # generates questions that are not trained on
        return make_source(replace(merged, held_out=limit, held_out_path=""), config).held_out()
    everything = replace(merged, min_pass_rate=None, max_pass_rate=None, easy_first=False, count=0)
    stream = make_source(replace(everything, held_out=0, held_out_path="", shuffle=False, passes=1), config)
    if stream.size is None:
        raise SettingsError(
            f"{merged.source} has no end (its size is None), so a set of it would never be complete; give "
            "it a size"
        )
    rows = [replace(stream.at(index), index=-1) for index in range(stream.size)]
    unseen_rows = unseen(rows, trained)
    if not unseen_rows:
        raise SettingsError(f"all {len(rows)} prompts are also trained on; give another path or split")
    if len(unseen_rows) < len(rows):
        log.warning(
            "prompts.left_out set=%s trained_or_repeated=%d", config.name, len(rows) - len(unseen_rows)
        )
    return [unseen_rows[place] for place in _chosen(len(unseen_rows), limit)]


def _chosen(count: int, limit: int) -> Sequence[int]:
    """Return up to `limit` of `count` indices: a fixed random choice, ascending; files may be sorted."""
    return sorted(np.random.RandomState(0).permutation(count)[:limit].tolist())
