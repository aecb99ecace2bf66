"""Decodes a `Rollout` into its rows, and checks its arrays against each other.

Shapes: P prompt tokens, n samples per group, R rows, T tokens of all rows, T_i own tokens of row i, C_i
tokens of earlier rows that precede row i. Without branches, each row is a sample and no row has a parent. A
row may be empty (T_i = 0).
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import ProtocolError
from protocol.messages import Rollout
from protocol.tensors import Array

MAX_GROUPS = 10**12
"""Exclusive limit of group numbers, which have twelve digits in the ledger."""
MAX_LOGPROB = 1e-4
"""Largest valid log-probability, nats. Rounding alone makes x - logsumexp(x) in float32 positive: 3e-5 at a
logit of 512."""
MAX_FOLLOWED = 2**28
"""Limit on the sum of `shared` tokens over the rows of a message; a reader copies these tokens for each row.
"""


@dataclass(frozen=True, slots=True)
class RowView:
    """One row of a rollout: a sample or a branch. `tokens` and `logprobs` are views of the message."""

    sample: int
    """Index of the row's sample."""
    context: NDArray[np.int32]
    """[C_i]: tokens of earlier rows of the sample that precede this row; the row does not train them."""
    tokens: NDArray[np.int32]
    """[T_i], at least 0."""
    logprobs: NDArray[np.float32]
    """[T_i] nats, finite."""
    sampled: NDArray[np.bool_]
    """[T_i]: True where the model sampled the token, False where the environment inserted it."""
    versions: NDArray[np.int32]
    """[T_i]: weight version of each token, at least 0."""
    finish_reason: str
    """Reason why the sample ended. This field, the response and the reward describe the whole sample."""
    response: str
    environment_reward: float | None
    own_prompt: int = 0
    """Number of tokens at the start of `tokens` that continue the sample's prompt; 0 in later rows of the
    sample."""
    experts: NDArray[np.uint16] | None = None
    """[T_i, L, K], as `Rollout.experts`."""
    context_experts: NDArray[np.uint16] | None = None
    """[C_i, L, K]."""


@dataclass(frozen=True, slots=True)
class RolloutView:
    """A checked rollout."""

    group: int
    prompt: NDArray[np.int32]
    """[P]: common prompt of all samples."""
    rows: tuple[RowView, ...]
    """[R], R > 0; the rows of a sample are contiguous."""
    samples: int
    """n, at least 1."""
    prompt_experts: NDArray[np.uint16] | None = None
    """[P, L, K], as `Rollout.prompt_experts`."""

    def token_counts(self) -> dict[int, int]:
        """Return version -> number of sampled tokens, the argument of `Ledger.accept`."""
        versions = np.concatenate([row.versions[row.sampled] for row in self.rows])
        return {int(v): int(n) for v, n in zip(*np.unique(versions, return_counts=True), strict=True)}


def decode_rollout(rollout: Rollout) -> RolloutView:
    """Check a rollout and split it into its rows.

    Raises:
        ProtocolError: an array has a wrong dtype or shape, contradicts another array, or holds a value out of
            range. The message names group and field.
    """
    group = rollout.group
    require(0 <= group < MAX_GROUPS, group, "group", f"is not between 0 and {MAX_GROUPS}")
    lengths = checked_array(group, "lengths", rollout.lengths, "int32", (None,))
    require(len(lengths) > 0, group, "lengths", "is empty")
    require(bool((lengths >= 0).all()), group, "lengths", "has a negative length")
    total = int(lengths.sum(dtype=np.int64))
    branches = _branches(rollout, len(lengths))
    n = branches[-1][0] + 1
    tokens = checked_array(group, "tokens", rollout.tokens, "int32", (total,))
    prompt = checked_array(group, "prompt_tokens", rollout.prompt_tokens, "int32", (None,))
    logprobs = checked_array(group, "logprobs", rollout.logprobs, "float32", (total,))
    mask = checked_array(group, "loss_mask", rollout.loss_mask, "uint8", (total,))
    require(bool((mask <= 1).all()), group, "loss_mask", "has a value other than 0 and 1")
    versions = _versions(rollout, lengths)
    starts = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    _check_first_tokens(group, len(prompt), starts, branches, mask)
    require(bool((prompt >= 0).all()), group, "prompt_tokens", "has a negative token")
    require(bool((tokens >= 0).all()), group, "tokens", "has a negative token")
    check_logprobs(group, logprobs, lambda token: branches[bisect_right(starts, token) - 1][0])
    for field, values in (("finish_reasons", rollout.finish_reasons), ("responses", rollout.responses)):
        require(len(values) == n, group, field, f"has {len(values)} entries for {n} samples")
    rewards, own_prompts = _environment_rewards(rollout, n), _own_prompts(rollout, branches, starts)
    prompt_experts, experts = _experts(rollout, len(prompt), total)
    contexts = _contexts(group, starts, branches, tokens)
    ctx_experts = [None] * len(branches) if experts is None else _contexts(group, starts, branches, experts)
    rows = tuple(
        RowView(
            sample=sample,
            context=contexts[i],
            tokens=tokens[start:end],
            logprobs=logprobs[start:end],
            sampled=mask[start:end].astype(bool),
            versions=versions[start:end],
            finish_reason=rollout.finish_reasons[sample],
            response=rollout.responses[sample],
            environment_reward=rewards[sample],
            own_prompt=own_prompts[i],
            experts=None if experts is None else experts[start:end],
            context_experts=ctx_experts[i],
        )
        for i, ((sample, _, _), (start, end)) in enumerate(zip(branches, pairwise(starts), strict=True))
    )
    return RolloutView(group, prompt, rows, n, prompt_experts)


def cancelled_lengths(rollout: Rollout) -> list[int]:
    """Return the number of tokens of each cancelled sample of the group.

    Raises:
        ProtocolError: the field is malformed or has a negative length; the message names the group.
    """
    if rollout.cancelled is None:
        return []
    lengths = checked_array(rollout.group, "cancelled", rollout.cancelled, "int32", (None,))
    require(bool((lengths >= 0).all()), rollout.group, "cancelled", "has a negative length")
    return list(lengths.tolist())


def sample_lengths(rollout: Rollout) -> list[int]:
    """Return the number of tokens of each sample, without its prompt; tokens shared by rows count once.

    Raises:
        ProtocolError: lengths, branches, responses and prompts contradict each other. The message names group
            and field.
    """
    lengths = checked_array(rollout.group, "lengths", rollout.lengths, "int32", (None,)).tolist()
    branches = _branches(rollout, len(lengths))
    totals = [0] * (branches[-1][0] + 1 if branches else 0)
    problem = f"has {len(rollout.responses)} entries for {len(totals)} samples"
    require(len(totals) == len(rollout.responses), rollout.group, "responses", problem)
    own_prompts = _own_prompts(rollout, branches, [0, *accumulate(lengths)])
    for (sample, _, _), length, own in zip(branches, lengths, own_prompts, strict=True):
        totals[sample] += length - own
    return totals


def samples_of_rows(rollout: Rollout) -> list[int]:
    """Return the sample of each row, [R].

    Raises:
        ProtocolError: a branch follows no row of its sample; the message names the group.
    """
    rows = len(checked_array(rollout.group, "lengths", rollout.lengths, "int32", (None,)))
    return [sample for sample, _, _ in _branches(rollout, rows)]


def checked_array(
    group: int, field: str, array: Array, dtype: str, shape: tuple[int | None, ...]
) -> NDArray[Any]:
    """Return the values of an array of a group's message.

    Args:
        group, field: number of the group and name of the array, for the error message.
        shape: required shape; None allows any length.

    Raises:
        ProtocolError: dtype, shape or byte count is wrong; the message names group and field.
    """
    require(array.dtype == dtype, group, field, f"is {array.dtype}, not {dtype}")
    fits = len(array.shape) == len(shape) and all(
        want in (None, got) for got, want in zip(array.shape, shape, strict=True)
    )
    require(
        fits, group, field, f"has shape {list(array.shape)}, not {['any' if n is None else n for n in shape]}"
    )
    try:
        return array.numpy()
    except ProtocolError as error:
        raise ProtocolError(f"group {group}: {field}: {error}") from error


def check_logprobs(group: int, logprobs: NDArray[Any], sample_at: Callable[[int], int]) -> None:
    """Check that log-probabilities are finite and at most 0, up to rounding.

    Args:
        logprobs: float32 [T], nats.
        sample_at: returns the sample of a token index, for the error message.

    Raises:
        ProtocolError: a value is invalid; the message names group, sample, token and value.
    """
    require(bool(np.isfinite(logprobs).all()), group, "logprobs", "is not finite")
    above = logprobs > MAX_LOGPROB
    if above.any():
        at = int(above.argmax())
        problem = f"of sample {sample_at(at)} has {logprobs[at]:.6g} for token {at}, above 0"
        require(False, group, "logprobs", problem)


def require(condition: bool, group: int, field: str, problem: str) -> None:
    """Raise ProtocolError, with group, field and problem in the message, unless `condition` is True."""
    if not condition:
        raise ProtocolError(f"group {group}: {field} {problem}")


def _experts(
    rollout: Rollout, prompt: int, tokens: int
) -> tuple[NDArray[Any], NDArray[Any]] | tuple[None, None]:
    """Return the experts of the prompt [P, L, K] and of the rows [T, L, K], or (None, None)."""
    group, parts = rollout.group, (rollout.prompt_experts, rollout.experts)
    if parts[0] is None or parts[1] is None:
        require(parts == (None, None), group, "experts", "are set for only one of prompt and samples")
        return None, None
    prompt_experts = checked_array(group, "prompt_experts", parts[0], "uint16", (prompt, None, None))
    layers, chosen = prompt_experts.shape[1:]
    require(layers > 0 and chosen > 0, group, "prompt_experts", "have no layer")
    return prompt_experts, checked_array(group, "experts", parts[1], "uint16", (tokens, layers, chosen))


def _branches(rollout: Rollout, rows: int) -> list[tuple[int, int, int]]:
    """Return (sample, parent, shared) of each row."""
    if rollout.branches is None:
        return [(row, -1, 0) for row in range(rows)]
    group, before = rollout.group, -1
    branches: list[tuple[int, int, int]] = []
    for row, (sample, parent, shared) in enumerate(
        checked_array(group, "branches", rollout.branches, "int32", (rows, 3)).tolist()
    ):
        if sample == before + 1:
            fits = parent == -1 and shared == 0
        else:
            fits = sample == before and 0 <= parent < row and branches[parent][0] == sample and shared >= 0
        require(
            fits, group, "branches", f"row {row} ({sample}, {parent}, {shared}) follows no row of its sample"
        )
        branches.append((sample, parent, shared))
        before = sample
    followed = sum(shared for _, _, shared in branches)
    require(followed <= MAX_FOLLOWED, group, "branches", f"have rows that follow {followed} tokens together")
    return branches


def _environment_rewards(rollout: Rollout, samples: int) -> list[float | None]:
    """Return the environment's reward of each sample."""
    if rollout.environment_rewards is None:
        return [None] * samples
    rewards: list[float | None] = checked_array(
        rollout.group, "environment_rewards", rollout.environment_rewards, "float32", (samples,)
    ).tolist()
    return rewards


def _own_prompts(
    rollout: Rollout, branches: Sequence[tuple[int, int, int]], starts: Sequence[int]
) -> list[int]:
    """Return the number of tokens at the start of each row that continue its sample's prompt, [R]."""
    if rollout.own_prompts is None:
        return [0] * len(branches)
    group, n = rollout.group, branches[-1][0] + 1 if branches else 0
    given = iter(checked_array(group, "own_prompts", rollout.own_prompts, "int32", (n,)).tolist())
    lengths = [next(given) if parent < 0 else 0 for _, parent, _ in branches]
    mask = checked_array(group, "loss_mask", rollout.loss_mask, "uint8", (starts[-1],))
    for own, (sample, _, _), (start, end) in zip(lengths, branches, pairwise(starts), strict=True):
        fits = 0 <= own <= end - start and not mask[start : start + own].any()
        require(
            fits, group, "own_prompts", f"has {own} of the first row of sample {sample}, not all inserted"
        )
    return lengths


def _check_first_tokens(
    group: int,
    prompt: int,
    starts: Sequence[int],
    branches: Sequence[tuple[int, int, int]],
    mask: NDArray[Any],
) -> None:
    """Raise ProtocolError if a row without context begins with a sampled token."""
    for row, (_, _, shared) in enumerate(branches):
        follows = prompt + shared > 0 or (starts[row] < starts[row + 1] and not mask[starts[row]])
        require(follows, group, "prompt_tokens", f"is empty, and row {row} begins with a sampled token")


def _contexts(
    group: int, starts: Sequence[int], branches: Sequence[tuple[int, int, int]], values: NDArray[Any]
) -> list[NDArray[Any]]:
    """Return the part of `values` [T, ...] in each row's context, [C_i, ...]."""
    contexts: list[NDArray[Any]] = []
    full: list[NDArray[Any]] = []
    for row, (_, parent, shared) in enumerate(branches):
        known = full[parent] if parent >= 0 else values[:0]
        problem = f"row {row} follows {shared} of {len(known)} tokens of row {parent}"
        require(shared <= len(known), group, "branches", problem)
        contexts.append(known[:shared])
        own = values[starts[row] : starts[row + 1]]
        full.append(np.concatenate([known[:shared], own]) if shared else own)
    return contexts


def _versions(rollout: Rollout, lengths: NDArray[Any]) -> NDArray[np.int32]:
    """Return the version of each token, int32 [T].

    The spans must cover every row from its first token to its last, in order.
    """
    group = rollout.group
    spans = checked_array(group, "spans", rollout.spans, "int32", (None, 3)).tolist()
    versions = np.empty(int(lengths.sum()), dtype=np.int32)
    sample, end_before, start = (
        0,
        0,
        0,
    )  # current sample, its tokens covered so far, its first token in T
    for row, (index, end, version) in enumerate(spans):
        while sample < len(lengths) and end_before == lengths[sample]:
            start, sample, end_before = start + end_before, sample + 1, 0
        fits = sample < len(lengths) and index == sample and end_before < end <= lengths[sample]
        problem = (
            f"row {row} ({index}, {end}, {version}) does not continue sample {sample} at token {end_before}"
        )
        require(fits, group, "spans", problem)
        require(version >= 0, group, "spans", f"row {row} has version {version}")
        versions[start + end_before : start + end] = version
        end_before = end
    covered = start + end_before
    require(covered == len(versions), group, "spans", f"cover {covered} of {len(versions)} tokens")
    return versions
