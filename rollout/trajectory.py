"""Assembles the samples of a group into a `Rollout` message; `protocol.rollout_view` is the inverse."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice, pairwise

import msgspec
import numpy as np

from protocol.errors import EngineError, SettingsError
from protocol.messages import UNKNOWN_EXPERT, Rollout
from protocol.tensors import Array
from protocol.turns import turns_of
from rollout.prompts.base import Prompt
from rollout.sample import Branch, Sample

FINISH_REASONS = ("stop", "length", "environment")
MAX_LOGPROB = 1e-3
"""Rounding tolerance, nats. A larger log-probability indicates a bug in the engine."""


def assemble(
    prompt: Prompt,
    prompt_tokens: Sequence[int],
    samples: Sequence[Sample],
    responses: Sequence[str],
    *,
    group: int,
    token: str,
    engine: str,
    generate_s: float,
) -> Rollout:
    """Return the message of a generated group of n samples.

    `responses` contains the text of each sample. The keyword arguments are fields of `Rollout`.

    Raises:
        EngineError: a sample is inconsistent; the message names group and sample.
        SettingsError: only some samples have a reward, or MessagePack cannot encode the metadata.
    """
    if not samples or len(samples) != len(responses):
        raise ValueError(f"group {group}: {len(samples)} samples and {len(responses)} responses")
    _check(group, samples, len(prompt_tokens))
    prompt_experts, experts = _experts(group, len(prompt_tokens), samples)
    shared = common_prompt(prompt_tokens, samples)
    rows, branches = _rows(prompt_tokens, len(shared), samples)
    return Rollout(
        group=group,
        token=token,
        engine=engine,
        prompt_tokens=Array.of(shared, "int32"),
        lengths=Array.of([len(row.tokens) for row in rows], "int32"),
        tokens=Array.of([t for row in rows for t in row.tokens], "int32"),
        logprobs=Array.of([x for row in rows for x in row.logprobs], "float32"),
        loss_mask=Array.of([m for row in rows for m in row.loss_mask], "uint8"),
        spans=Array.of(
            [(i, end, version) for i, row in enumerate(rows) for end, version in row.spans], "int32"
        ),
        finish_reasons=tuple(s.finish_reason for s in samples),
        responses=tuple(responses),
        prompt_text=prompt.text,
        metadata=pack_metadata(prompt),
        generate_s=generate_s,
        environment_rewards=_rewards(group, samples),
        prompt_experts=prompt_experts,
        experts=experts,
        branches=Array.of(branches, "int32") if len(rows) > len(samples) else None,
        calls=_calls(samples, rows),
        turns=_turns(samples, rows),
        own_prompts=_own_prompts(prompt_tokens, len(shared), samples),
    )


def turn_texts(rollout: Rollout, text_of: Callable[[tuple[int, ...]], str]) -> Rollout:
    """Return the group with the text of each turn, and the text inserted before each turn.

    The group is unchanged if every sample has one turn.

    Args:
        rollout: an assembled group.
        text_of: detokenizes without special tokens.
    """
    turns = turns_of(rollout)
    if turns is None:
        return rollout
    rows = np.split(rollout.tokens.numpy(), np.cumsum(rollout.lengths.numpy())[:-1])
    ends: dict[int, int] = defaultdict(int)
    texts, contexts = [], []
    for turn in (turn for sample_turns in turns for turn in sample_turns):
        row = rows[turn.row].tolist()
        contexts.append(text_of(tuple(row[ends[turn.row] : turn.first])))
        texts.append(text_of(tuple(row[turn.first : turn.end])))
        ends[turn.row] = turn.end
    return msgspec.structs.replace(rollout, turn_texts=tuple(texts), turn_contexts=tuple(contexts))


def _check(group: int, samples: Sequence[Sample], prompt: int) -> None:
    """Raise EngineError if a row of a sample is inconsistent."""
    for i, sample in enumerate(samples):
        for row in (sample, *(_as_sample(branch) for branch in sample.branches)):
            if problem := _problem(row, prompt):
                raise EngineError(f"group {group} sample {i}: {problem}")
        if not sample.is_trained():
            raise EngineError(f"group {group} sample {i}: no sampled token")


def common_prompt(prompt_tokens: Sequence[int], samples: Sequence[Sample]) -> tuple[int, ...]:
    """Return the longest unsampled prefix that all rows of all samples share: the prompt of the message."""
    prompts = [prompt_tokens if s.prompt is None else s.prompt for s in samples]
    different = (i for i, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    shared = [branch.shared for s in samples for branch in s.branches]
    return tuple(prompts[0][: min([*map(len, prompts), *shared, *islice(different, 1)])])


def _rows(
    prompt_tokens: Sequence[int], common: int, samples: Sequence[Sample]
) -> tuple[list[Sample | Branch], list[tuple[int, int, int]]]:
    """Return the message's rows after the first `common` tokens, and (sample, parent, shared) of each."""
    rows: list[Sample | Branch] = []
    places: list[tuple[int, int, int]] = []
    for index, sample in enumerate(samples):
        first = len(rows)
        own = tuple(prompt_tokens if sample.prompt is None else sample.prompt)[common:]
        rows += [_after(own, sample), *sample.branches]
        places.append((index, -1, 0))
        places += [(index, first + branch.parent, branch.shared - common) for branch in sample.branches]
    return rows, places


def _calls(samples: Sequence[Sample], rows: Sequence[Sample | Branch]) -> Array | None:
    """Return the token ranges of recorded calls' answers; None if no call was recorded."""
    calls: list[tuple[int, int, int, int, int]] = []
    remaining = enumerate(rows)
    for sample in samples:
        for index, row in islice(remaining, 1 + len(sample.branches)):
            if sample.recorded is not None:
                calls += [(sample.recorded[0], n, index, first, end) for n, first, end in row.calls]
        if sample.recorded is not None:
            calls += [(sample.recorded[0], number, -1, 0, 0) for number in sample.recorded[1]]
    return Array.of(calls, "int32") if calls else None


def _turns(samples: Sequence[Sample], rows: Sequence[Sample | Branch]) -> Array | None:
    """Return the token ranges of all turns in chronological order; None if every sample has one turn."""
    places: list[tuple[int, int, int, int]] = []
    remaining = enumerate(rows)
    for number, sample in enumerate(samples):
        own: list[tuple[int, int, int, int]] = []
        for index, row in islice(remaining, 1 + len(sample.branches)):
            turns = row.turns or ((len(own), 0, len(row.tokens)),)
            own += [(place, index, first, end) for place, first, end in turns]
        places += [(number, index, first, end) for _, index, first, end in sorted(own)]
    return Array.of(places, "int32") if len(places) > len(samples) else None


def _after(own: tuple[int, ...], sample: Sample) -> Sample:
    """Return the sample with the prompt tokens that are missing from the shared prefix prepended."""
    if not own:
        return sample
    return replace(
        sample,
        tokens=own + sample.tokens,
        logprobs=(0.0,) * len(own) + sample.logprobs,
        loss_mask=(0,) * len(own) + sample.loss_mask,
        spans=tuple((end + len(own), version) for end, version in sample.spans),
        calls=tuple((number, first + len(own), end + len(own)) for number, first, end in sample.calls),
        turns=tuple((place, first + len(own), end + len(own)) for place, first, end in sample.turns),
    )


def _own_prompts(prompt_tokens: Sequence[int], common: int, samples: Sequence[Sample]) -> Array | None:
    """Return the number of prompt tokens of each sample beyond the common prefix; None if all are 0."""
    own = [len(prompt_tokens if s.prompt is None else s.prompt) - common for s in samples]
    return Array.of(own, "int32") if any(own) else None


def _rewards(group: int, samples: Sequence[Sample]) -> Array | None:
    """Return the environment's rewards [n]; None if there are none.

    Raises:
        SettingsError: only some samples have a reward.
    """
    rewards = [s.reward for s in samples if s.reward is not None]
    if rewards and len(rewards) != len(samples):
        raise SettingsError(
            f"group {group}: the environment rewarded {len(rewards)} of {len(samples)} samples; all or none"
        )
    return Array.of(rewards, "float32") if rewards else None


def _experts(group: int, prompt: int, samples: Sequence[Sample]) -> tuple[Array, Array] | tuple[None, None]:
    """Return the experts of the prompt and of all samples' tokens; (None, None) if none were recorded.

    The samples share the forward passes of the prompt. Passes missing from one sample are taken from others.

    Raises:
        EngineError: only some samples have experts, or the recorded layers differ.
    """
    recorded = [sample.experts for sample in samples if sample.experts is not None]
    if not recorded:
        return None, None
    same = len({array.shape[1:] for array in recorded}) == 1
    if len(recorded) != len(samples) or not same:
        raise EngineError(
            f"group {group}: the engine recorded experts of {len(recorded)} of {len(samples)} samples"
            f"{'' if same else ', of different layers'}"
        )
    prompt_experts = recorded[0][:prompt].copy()
    for other in recorded[1:]:
        unknown = prompt_experts == UNKNOWN_EXPERT
        prompt_experts[unknown] = other[:prompt][unknown]
    sample_experts = np.concatenate([array[prompt:] for array in recorded])
    return Array.of(prompt_experts, "uint16"), Array.of(sample_experts, "uint16")


def pack_metadata(prompt: Prompt) -> msgspec.Raw:
    """Return a prompt's metadata as MessagePack.

    Raises:
        SettingsError: MessagePack cannot encode the metadata; the message names the prompt.
    """
    try:
        return msgspec.Raw(msgspec.msgpack.encode(dict(prompt.metadata)))
    except (TypeError, OverflowError, ValueError) as error:
        raise SettingsError(
            f"prompt {prompt.index}: the metadata does not fit MessagePack: {error}"
        ) from None


def _as_sample(branch: Branch) -> Sample:
    return Sample(branch.tokens, branch.logprobs, branch.loss_mask, branch.spans, FINISH_REASONS[0])


def _problem(sample: Sample, prompt: int) -> str:
    """Return the first inconsistency in a sample, or an empty string."""
    count = len(sample.tokens)
    ends = [end for end, _ in sample.spans]
    checks: dict[str, bool] = {
        "no tokens": count > 0,
        f"{count} tokens, but {len(sample.logprobs)} logprobs": count == len(sample.logprobs),
        f"{count} tokens, but {len(sample.loss_mask)} in the mask": count == len(sample.loss_mask),
        "a negative token": min(sample.tokens, default=0) >= 0,
        "a mask that is not 0 or 1": set(sample.loss_mask) <= {0, 1},
        "a log-probability that is not a number of at most 0": all(
            math.isfinite(x) and x <= MAX_LOGPROB for x in sample.logprobs
        ),
        "a log-probability at an inserted token": all(
            m or x == 0 for x, m in zip(sample.logprobs, sample.loss_mask, strict=False)
        ),
        f"spans {sample.spans} do not rise to {count}": all(a < b for a, b in pairwise([0, *ends]))
        and ends[-1:] == [count],
        "a version below 0": all(version >= 0 for _, version in sample.spans),
        f"finish reason {sample.finish_reason!r}": sample.finish_reason in FINISH_REASONS,
        "experts of another number of tokens": sample.experts is None
        or len(sample.experts) == prompt + count,
        f"reward {sample.reward}": sample.reward is None or math.isfinite(sample.reward),
    }
    return next((problem for problem, holds in checks.items() if not holds), "")
