"""Reads scored groups, and validates every array before its use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Rollout, ScoredRollout
from protocol.rollout_view import RowView, cancelled_lengths, checked_array, decode_rollout, require
from protocol.turns import TurnPlace, turns_of

ROUNDING = 1e-4
"""Allowed difference between a sample's reward and the sum of its turn rewards, relative to their sizes."""


@dataclass(frozen=True, slots=True)
class RowTurns:
    """Turns of a row, in token order."""

    numbers: NDArray[np.int64]
    """[k]: index of each turn among all turns of the sample, from 0."""
    bounds: NDArray[np.int64]
    """[k, 2]: start and end of each turn in the row's own tokens."""
    returns: NDArray[np.float64]
    """[k]: sum of the rewards of the turn and of the sample's later turns."""


def turns_of_rows(scored: ScoredRollout, rows: int) -> list[RowTurns | None]:
    """Return the turns of each row, [R]; None for each row if turns are not scored.

    Raises:
        ProtocolError: turns contradict the rollout, or their rewards have the wrong count, are not finite, or
            do not sum to the samples' rewards. The message names group and field.
    """
    turns, group = turns_of(scored.rollout), scored.rollout.group
    if scored.turn_rewards is None:
        return [None] * rows
    if turns is None:
        require(False, group, "turn_rewards", "are given, but each sample is one turn")
        return []
    rewards = _checked_rewards(scored, turns)
    found: list[list[tuple[TurnPlace, int, float]]] = [[] for _ in range(rows)]
    for sample_turns, given in zip(turns, rewards, strict=True):
        returns = np.cumsum(given[::-1])[::-1]
        for number, (turn, value) in enumerate(zip(sample_turns, returns.tolist(), strict=True)):
            found[turn.row].append((turn, number, value))
    return [_row_turns(sorted(row, key=lambda item: (item[0].first, item[1]))) for row in found]


def differing_turns(scored: ScoredRollout, slack: float) -> bool:
    """Return whether the returns of one turn index differ between samples by more than `slack`."""
    found: dict[int, list[float]] = {}
    for row in turns_of_rows(scored, len(scored.rollout.lengths.numpy())):
        if row is not None:
            for number, value in zip(row.numbers.tolist(), row.returns.tolist(), strict=True):
                found.setdefault(number, []).append(value)
    return any(max(values) - min(values) > slack for values in found.values())


def _checked_rewards(
    scored: ScoredRollout, turns: Sequence[Sequence[TurnPlace]]
) -> list[NDArray[np.float64]]:
    """Return the reward of each turn, [n][K_i]."""
    group, ends = scored.rollout.group, np.cumsum([len(sample_turns) for sample_turns in turns])
    assert scored.turn_rewards is not None
    flat = checked_array(group, "turn_rewards", scored.turn_rewards, "float32", (int(ends[-1]),))
    require(bool(np.isfinite(flat).all()), group, "turn_rewards", "is not finite")
    rewards = np.split(flat.astype(np.float64), ends[:-1])
    for sample, (given, reward) in enumerate(zip(rewards, scored.rewards.numpy().tolist(), strict=True)):
        size = 1 + float(np.abs(given).sum())
        require(
            abs(float(given.sum()) - reward) <= ROUNDING * size,
            group,
            "turn_rewards",
            f"of sample {sample} add up to {given.sum():g}, not to its reward {reward:g}",
        )
    return rewards


def _row_turns(turns: Sequence[tuple[TurnPlace, int, float]]) -> RowTurns:
    bounds = [(turn.first, turn.end) for turn, _, _ in turns]
    return RowTurns(
        np.array([number for _, number, _ in turns], dtype=np.int64),
        np.array(bounds, dtype=np.int64).reshape(-1, 2),
        np.array([value for _, _, value in turns], dtype=np.float64),
    )


ZERO = np.float32(0)
"""Log-probability of a token that was not sampled."""
NO_VERSION = np.int32(-1)
"""Version of a token that was not sampled."""
TRUNCATED = "length"
"""Finish reason of a sample that ended at the length limit."""
EQUAL_REWARDS = 1e-6
"""Largest difference of rewards that count as equal: the precision of a float32 reward near 1."""


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One validated row of a batch: a sample or a branch of a sample. Arrays are views of the message.

    Shapes: P context tokens, T_i own tokens, S_i spans.
    """

    group: int
    """Number of the group in the run."""
    row: int
    """Index of the group within the batch."""
    prompt: NDArray[np.int32]
    """[P]: prompt and tokens of earlier rows of the sample."""
    tokens: NDArray[np.int32]
    """[T_i]."""
    logprobs: NDArray[np.float32]
    """[T_i] nats: behaviour log-probabilities."""
    sampled: NDArray[np.bool_]
    """[T_i]: True where the model sampled the token."""
    spans: NDArray[np.int32]
    """[S_i, 2], rows (end, version): `version` sampled the tokens from the previous row's end to `end`."""
    reward: float
    max_staleness: int
    """Staleness bound of the group's lease, versions."""
    experts: tuple[NDArray[np.uint16], NDArray[np.uint16]] | None = None
    """[P, L, K] and [T_i, L, K]: experts chosen by the engine's model, see `Rollout`; None: not recorded."""
    truncated: bool = False
    """Whether the sample ended at the length limit."""
    sample: int = 0
    """Index of the sample within its group."""
    masked: bool = False
    """Whether the sample is untrained because it is truncated and `algorithm.truncated` is mask."""
    turns: RowTurns | None = None
    """Turns of the row, if they are scored."""
    own_prompt: int = 0
    """Number of tokens at the start of `tokens` that belong to the sample's prompt."""

    def __len__(self) -> int:
        """Return the number of tokens of prompt and response."""
        return len(self.prompt) + len(self.tokens)

    def token_arrays(self, step: int) -> dict[str, NDArray[Any]]:
        """Return the per-token arrays of a batch, [P + T_i], by field name of `Batch`.

        The advantages are missing: they depend on the rewards of other samples.
        """
        versions = np.repeat(self.spans[:, 1], np.diff(self.spans[:, 0], prepend=0))
        arrays = {
            "tokens": np.concatenate([self.prompt, self.tokens]),
            "loss_mask": self._behind_prompt(self._trained(step - versions), False),
            "sampled_mask": self._behind_prompt(self.sampled, False),
            "behaviour_logprobs": self._behind_prompt(np.where(self.sampled, self.logprobs, ZERO), ZERO),
            "versions": self._behind_prompt(np.where(self.sampled, versions, NO_VERSION), NO_VERSION),
        }
        if self.experts is not None:
            # int16, because torch computes with it; the value for unknown experts becomes -1
            arrays["experts"] = np.concatenate(self.experts).view(np.int16)
        return arrays

    def _trained(self, lags: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which tokens carry gradient, [T_i]: sampled tokens within the bound, none if masked."""
        return self.sampled & (lags <= self.max_staleness) & (not self.masked)

    def _behind_prompt(self, values: NDArray[Any], filler: Any) -> NDArray[Any]:
        return np.concatenate([np.full(len(self.prompt), filler, dtype=values.dtype), values])


def token_counts(rollout: Rollout) -> dict[int, int]:
    """Return version -> number of sampled tokens of a rollout, the argument of `Ledger.accept`.

    Raises:
        ProtocolError: the rollout's arrays contradict each other. The message names group and field.
    """
    return decode_rollout(rollout).token_counts()


def samples_of(
    scored: ScoredRollout, index: int, max_staleness: int, step: int, *, mask_truncated: bool = False
) -> Iterator[BatchSample]:
    """Validate a scored group and yield its rows. The rows of a sample are consecutive.

    Args:
        scored: group as received.
        index: index of the group within the batch.
        max_staleness: staleness bound of the group's lease.
        step: version that the step starts from.
        mask_truncated: whether to mask samples that ended at the length limit.

    Raises:
        ProtocolError: arrays contradict each other, a reward is not finite, or a token's version is later
            than `step`. The message names group and field.
    """
    view = decode_rollout(scored.rollout)
    group = view.group
    rewards = checked_array(group, "rewards", scored.rewards, "float32", (view.samples,))
    require(bool(np.isfinite(rewards).all()), group, "rewards", "is not finite")
    spans = scored.rollout.spans.numpy()
    newest = int(spans[:, 2].max(initial=step))
    require(newest == step, group, "spans", f"has a version after step {step}")
    turns = turns_of_rows(scored, len(view.rows))
    firsts = np.searchsorted(spans[:, 0], np.arange(len(view.rows) + 1))
    ends = np.cumsum([len(row.tokens) for row in view.rows])
    masks = np.split(scored.rollout.loss_mask.numpy().view(np.bool_), ends[:-1])
    for i, row in enumerate(view.rows):
        yield BatchSample(
            group=group,
            row=index,
            prompt=np.concatenate([view.prompt, row.context]) if len(row.context) else view.prompt,
            tokens=row.tokens,
            logprobs=row.logprobs,
            sampled=masks[i],
            spans=spans[firsts[i] : firsts[i + 1], 1:],
            reward=float(rewards[row.sample]),
            max_staleness=max_staleness,
            experts=_experts(view.prompt_experts, row),
            truncated=row.finish_reason == TRUNCATED,
            sample=row.sample,
            masked=mask_truncated and row.finish_reason == TRUNCATED,
            turns=turns[i],
            own_prompt=row.own_prompt,
        )


def _experts(prompt_experts: NDArray[np.uint16] | None, row: RowView) -> tuple[Any, Any] | None:
    """Return the experts of a row's context and of its own tokens; None if not recorded."""
    if prompt_experts is None or row.experts is None or row.context_experts is None:
        return None
    return np.concatenate([prompt_experts, row.context_experts]), row.experts


def has_signal(scored: ScoredRollout) -> bool:
    """Return whether rewards of a group differ; otherwise every group-relative advantage is 0.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) drops groups with equal rewards. If turns are
    scored, their returns are compared per turn index.
    """
    if scored.turn_rewards is not None:
        return differing_turns(scored, EQUAL_REWARDS)
    rewards = scored.rewards.numpy()
    return bool(rewards.max() - rewards.min() > EQUAL_REWARDS)


def mean_reward(scored: ScoredRollout) -> float:
    """Return the mean reward of a group, rounded as in the event log."""
    return round(float(scored.rewards.numpy().mean()), 6)


def check_scored(message: ScoredRollout, version: int) -> dict[int, int]:
    """Validate a scored rollout for training, and return the number of sampled tokens per version.

    Args:
        message: rollout as received.
        version: committed version, the latest allowed version of a token.

    Raises:
        ProtocolError: arrays contradict each other, or a number is not finite. The message names group and
            field.
    """
    for _ in samples_of(message, 0, 0, version):
        pass
    cancelled_lengths(message.rollout)
    return token_counts(message.rollout)
