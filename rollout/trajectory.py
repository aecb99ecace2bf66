"""Samples to a `Rollout` message and back. Pure.

Shapes: n samples a group, T tokens of all samples together, T_i tokens of sample i.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineError, ProtocolError, SettingsError
from protocol.messages import Rollout
from protocol.tensors import Array
from rollout.environments.base import Sample
from rollout.prompts.base import Prompt

FINISH_REASONS = ("stop", "length", "environment")
MAX_LOGPROB = 1e-3
"""A log-probability above 0 by more than rounding is a bug of the engine."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample of a rollout; the arrays are views of the message."""

    tokens: NDArray[np.int32]
    """[T_i]."""
    logprobs: NDArray[np.float32]
    """[T_i] nats."""
    loss_mask: NDArray[np.bool_]
    """[T_i]: True where sampled."""
    versions: NDArray[np.int32]
    """[T_i]: version of each token."""
    finish_reason: str
    response: str
    environment_reward: float | None


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
    """The message for a generated group.

    Raises:
        EngineError: naming group and sample, if a sample contradicts itself.
        SettingsError: if only some samples have a reward, or the metadata does not fit MessagePack.
    """
    if not samples or len(samples) != len(responses):
        raise ValueError(f"group {group}: {len(samples)} samples and {len(responses)} responses")
    for i, sample in enumerate(samples):
        if problem := _problem(sample):
            raise EngineError(f"group {group} sample {i}: {problem}")
    rewards = [s.reward for s in samples if s.reward is not None]
    if rewards and len(rewards) != len(samples):
        raise SettingsError(
            f"group {group}: the environment rewarded {len(rewards)} of {len(samples)} samples; all or none"
        )
    return Rollout(
        group=group,
        token=token,
        engine=engine,
        prompt_tokens=Array.of(prompt_tokens, "int32"),
        lengths=Array.of([len(s.tokens) for s in samples], "int32"),
        tokens=Array.of([t for s in samples for t in s.tokens], "int32"),
        logprobs=Array.of([x for s in samples for x in s.logprobs], "float32"),
        loss_mask=Array.of([m for s in samples for m in s.loss_mask], "uint8"),
        spans=Array.of(
            [(i, end, version) for i, s in enumerate(samples) for end, version in s.spans], "int32"
        ),
        finish_reasons=tuple(s.finish_reason for s in samples),
        responses=tuple(responses),
        prompt_text=prompt.text,
        metadata=pack_metadata(prompt),
        generate_s=generate_s,
        environment_rewards=Array.of(rewards, "float32") if rewards else None,
    )


def pack_metadata(prompt: Prompt) -> msgspec.Raw:
    """A prompt's metadata as it travels.

    Raises:
        SettingsError: naming the prompt, if it holds what MessagePack cannot.
    """
    try:
        return msgspec.Raw(msgspec.msgpack.encode(dict(prompt.metadata)))
    except (TypeError, OverflowError, ValueError) as error:
        raise SettingsError(
            f"prompt {prompt.index}: the metadata does not fit MessagePack: {error}"
        ) from None


def split(rollout: Rollout) -> tuple[SampleView, ...]:
    """The samples of a rollout.

    Raises:
        ProtocolError: if its arrays do not belong together.
    """
    n = len(rollout.finish_reasons)
    lengths, tokens = _array(rollout.lengths, (n,)), rollout.tokens.numpy()
    total = int(lengths.sum())
    if n == 0 or lengths.min() < 1 or tokens.shape != (total,) or len(rollout.responses) != n:
        raise ProtocolError(
            f"group {rollout.group}: {n} samples of lengths {lengths.tolist()}, {tokens.size} tokens, {len(rollout.responses)} responses"
        )
    logprobs, loss_mask = _array(rollout.logprobs, (total,)), _array(rollout.loss_mask, (total,))
    versions = _versions(rollout, lengths)
    rewards = _array(rollout.environment_rewards, (n,)) if rollout.environment_rewards is not None else None
    ends = np.cumsum(lengths).tolist()
    return tuple(
        SampleView(
            tokens=tokens[start:end],
            logprobs=logprobs[start:end],
            loss_mask=loss_mask[start:end].astype(bool),
            versions=versions[start:end],
            finish_reason=rollout.finish_reasons[i],
            response=rollout.responses[i],
            environment_reward=None if rewards is None else float(rewards[i]),
        )
        for i, (start, end) in enumerate(pairwise([0, *ends]))
    )


def _problem(sample: Sample) -> str:
    """What is wrong with a sample, or nothing."""
    count = len(sample.tokens)
    ends = [end for end, _ in sample.spans]
    checks: dict[str, bool] = {
        "no tokens": count > 0,
        f"{count} tokens, but {len(sample.logprobs)} logprobs": count == len(sample.logprobs),
        f"{count} tokens, but {len(sample.loss_mask)} in the mask": count == len(sample.loss_mask),
        "a negative token": min(sample.tokens, default=0) >= 0,
        "a mask that is not 0 or 1": set(sample.loss_mask) <= {0, 1},
        "no sampled token": any(sample.loss_mask),
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
        f"reward {sample.reward}": sample.reward is None or math.isfinite(sample.reward),
    }
    return next((problem for problem, holds in checks.items() if not holds), "")


def _array(array: Array, shape: tuple[int, ...]) -> NDArray[Any]:
    found = array.numpy()
    if found.shape != shape:
        raise ProtocolError(f"expected an array of shape {list(shape)}, got {list(found.shape)}")
    return found


def _versions(rollout: Rollout, lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32 [T]: the spans written out."""
    spans = rollout.spans.numpy()
    parts: list[NDArray[np.int32]] = []
    sample, done = 0, 0
    for owner, end, version in spans.reshape(-1, 3).tolist() if spans.size % 3 == 0 else []:
        if sample < len(lengths) and done == lengths[sample]:
            sample, done = sample + 1, 0
        if owner != sample or sample >= len(lengths) or not done < end <= lengths[sample]:
            raise ProtocolError(
                f"group {rollout.group}: span ({owner}, {end}, {version}) does not follow {done} tokens of sample {sample}"
            )
        parts.append(np.full(end - done, version, np.int32))
        done = end
    if sample != len(lengths) - 1 or done != lengths[-1]:
        raise ProtocolError(f"group {rollout.group}: the spans end at token {done} of sample {sample}")
    return np.concatenate(parts)
