"""Selects the scored groups to train: by rewards, or by a user's function.

    def keep(*, rewards: list[float], metadata: dict) -> bool

The function receives the `ARGUMENTS` that its signature names. docs/own_code.md describes them.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from protocol.errors import SettingsError
from protocol.messages import ScoredRollout
from protocol.user_code import accepted_parameters, import_attribute, located
from trainer.config import AlgorithmConfig
from trainer.data.samples import has_signal

ARGUMENTS = (
    "rewards",
    "components",
    "prompt",
    "responses",
    "metadata",
    "token_counts",
    "finish_reasons",
    "versions",
)
"""Arguments available to a user's filter, all from one group of n samples."""

Keeps = Callable[[ScoredRollout], bool]


def group_filter(config: AlgorithmConfig) -> Keeps:
    """Return the function that decides whether a group is trained.

    Raises:
        SettingsError: the user's function cannot be loaded, or has other parameters. The message names the
            file.
    """
    if not config.filter_groups:
        return lambda scored: True
    return _own_filter(config.group_filter) if config.group_filter else has_signal


def _own_filter(path: str) -> Keeps:
    setting = "setting algorithm.group_filter"
    function, file = import_attribute(path, setting)
    what = f"{setting}: {path} in {file}"
    names = accepted_parameters(what, function, ARGUMENTS)

    def keeps(scored: ScoredRollout) -> bool:
        """Call the user's function. Raises SettingsError if the call raises or does not return a bool."""
        known = _arguments(scored)
        try:
            found = function(**{name: known[name] for name in names})
        except Exception as error:  # the user's code may raise anything
            group = scored.rollout.group
            raise SettingsError(f"{what} raised for group {group} at {located(error)}") from error
        if not isinstance(found, bool | np.bool_):
            raise SettingsError(f"{what} returned {type(found).__name__} ({str(found)[:40]}), not a bool")
        return bool(found)

    return keeps


def _arguments(scored: ScoredRollout) -> dict[str, Any]:
    """Return the arguments of a user's filter; lists have one entry per sample."""
    rollout = scored.rollout
    rows = rollout.lengths.numpy()
    sample_of_row = np.arange(len(rows)) if rollout.branches is None else rollout.branches.numpy()[:, 0]
    spans = rollout.spans.numpy()
    return {
        "rewards": scored.rewards.numpy().tolist(),
        "components": {name: scores.numpy().tolist() for name, scores in scored.components.items()},
        "prompt": rollout.prompt_text,
        "responses": list(rollout.responses),
        "metadata": msgspec.msgpack.decode(rollout.metadata),
        "token_counts": np.bincount(sample_of_row, rows, len(rollout.responses)).astype(int).tolist(),
        "finish_reasons": list(rollout.finish_reasons),
        "versions": sorted({int(version) for version in spans[:, 2]}),
    }
