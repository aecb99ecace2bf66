"""Checks recorded groups without a model: prompt, mask, ends, rewards, advantages, weights.

A check is a function of a trained group and of the parties that recompute it, listed in `CHECKS`. It reads
the records as received, and shares no arithmetic with the checked code.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.messages import Rollout, ScoredRollout
from protocol.rollout_view import RolloutView, decode_rollout
from reward.workers.group_scoring import FELL_BACK, TIMED_OUT
from services.audit.alarms import Finding, FindingOrigin
from trainer.config import AlgorithmConfig
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand, decode_scored

TOLERANCE = 1e-4
"""Allowed difference of a reward, advantage or weight, relative to the larger of its size and 1."""
ADVANTAGES: dict[str, Callable[[NDArray[np.float64], float], NDArray[np.float64]]] = {
    "grpo": lambda rewards, eps: (rewards - rewards.mean()) / (rewards.std() + eps),
    "dr_grpo": lambda rewards, eps: rewards - rewards.mean(),
    "rloo": lambda rewards, eps: (rewards - rewards.mean()) * len(rewards) / max(1, len(rewards) - 1),
}
"""Algorithm -> advantages of a group's samples, by the paper's formula on their rewards."""


@dataclass(frozen=True, slots=True)
class Expectations:
    """Parties that recompute a record; None disables a check."""

    prompt: Callable[[int], Sequence[int]] | None = None
    """Group -> tokens of its prompt, from source and template."""
    rewards: Callable[[Rollout], Sequence[float | None] | None] | None = None
    """Rollout -> rewards from a second call of the verifiers; None if they could not be computed."""
    text: Callable[[tuple[int, ...]], str] | None = None
    """Tokens of a sample -> text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end a sample; empty if samples may end otherwise."""
    whole_turns: bool = True
    """Whether the model sampled all tokens of a turn, and all of them are trained."""
    are_draws: bool = True
    """Whether all samples are trained; else they are selected by finishing time or reward."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """A recorded group, and the step that trained it."""

    scored: ScoredRollout
    view: RolloutView
    bound: int
    """`max_staleness` of the group's lease."""
    plan: StepPlan
    rows: tuple[int, ...]
    """Indices of the group's rows in the step."""

    @classmethod
    def select(
        cls, plan: StepPlan, command: TrainCommand, is_selected: Callable[[int], bool]
    ) -> list["TrainedGroup"]:
        """Return the groups of a step for which `is_selected` is true; other records are not decoded.

        Raises:
            ProtocolError: a chosen record is not a scored rollout.
        """
        rows: dict[int, list[int]] = {}
        for index, sample in enumerate(plan.samples):
            if is_selected(sample.group):
                rows.setdefault(sample.row, []).append(index)
        scored = {place: decode_scored(command.records[place]) for place in rows}
        return [
            cls(one, decode_rollout(one.rollout), command.bounds[place], plan, tuple(rows[place]))
            for place, one in scored.items()
        ]

    def finding(self, check: str, detail: str, sample: int = -1) -> Finding:
        """Return a finding of this group."""
        return Finding(check, FindingOrigin.from_scored(self.scored, sample), detail)


def prompts(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare the prompt's tokens with source and template."""
    if expectations.prompt is None:
        return
    expected = list(expectations.prompt(group.view.group))
    for row in group.view.rows:
        found = [*group.view.prompt.tolist(), *row.tokens[: row.own_prompt].tolist()]
        if row.own_prompt == 0 and not len(row.context) and found != expected:
            position = next(
                (i for i, pair in enumerate(zip(found, expected, strict=False)) if len({*pair}) > 1), -1
            )
            place = (
                f"token {position} differs" if position >= 0 else f"{len(found)} tokens, not {len(expected)}"
            )
            yield group.finding("prompt", f"the recorded prompt differs from the template's: {place}")
            return


def masks(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare the mask with the recorded turns, and the trained tokens with mask, versions and bound."""
    turns = turns_of(group)
    for number, row in enumerate(group.view.rows):
        expected = np.zeros(len(row.tokens), dtype=bool)
        for first, end in turns.get(number, [(row.own_prompt, len(row.tokens))]):
            expected[first:end] = True
        if wrong := (expectations.whole_turns * (expected != row.sampled)).nonzero()[0].tolist():
            kind = "sampled" if expected[wrong[0]] else "inserted"
            yield group.finding(
                "mask", f"token {wrong[0]} of row {number} was {kind}, and is recorded otherwise", row.sample
            )
        part = group.plan.part([group.rows[number]])
        trained = part.loss_mask.numpy()[-len(row.tokens) :] if len(row.tokens) else np.zeros(0, dtype=bool)
        lags = group.plan.step - row.versions
        masked = expectations.algorithm.truncated == "mask" and row.finish_reason == "length"
        if (trained != (row.sampled & (lags <= group.bound) & (not masked))).any():
            yield group.finding(
                "mask", f"row {number} is not trained on the tokens that were sampled", row.sample
            )
        ids = np.concatenate([group.view.prompt, row.context, row.tokens])
        if not np.array_equal(part.tokens.numpy(), ids):
            yield group.finding(
                "tokens", f"row {number} is not trained on the tokens of its record", row.sample
            )


def ends(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare the finish reason of each sample with its last token."""
    for row in group.view.rows:
        if not expectations.stop_token_ids or not row.sampled.any():
            continue
        last = int(row.tokens[row.sampled.nonzero()[0][-1]])
        if row.finish_reason == "stop" and last not in expectations.stop_token_ids:
            yield group.finding(
                "end", f"recorded as finished, but its last token {last} is not a stop token", row.sample
            )
        if row.finish_reason == "length" and last in expectations.stop_token_ids:
            yield group.finding(
                "end", f"recorded as truncated, but its last token {last} is an end", row.sample
            )


def responses(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare the scored text with the trained tokens, if those are the whole sample."""
    rollout = group.scored.rollout
    if expectations.text is None or rollout.row_texts or len(group.view.rows) > group.view.samples:
        return
    for row in group.view.rows:
        if expectations.text(tuple(row.tokens[row.own_prompt :].tolist())) != row.response:
            yield group.finding("response", "the text that was scored is not the tokens' text", row.sample)


def rewards(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare rewards with a second call of the verifiers."""
    if expectations.rewards is None or (recomputed := expectations.rewards(group.scored.rollout)) is None:
        return
    recorded, times = group.scored.rewards.numpy().tolist(), decided_by_time(group.scored)
    for sample, (found, expected) in enumerate(zip(recorded, recomputed, strict=True)):
        if expected is not None and not times[sample] and _differs(found, expected):
            detail = f"reward {found:g} is recorded, the verifiers give {expected:g}"
            yield group.finding("reward", detail, sample)


def decided_by_time(scored: ScoredRollout) -> list[bool]:
    """Return for each sample whether a late or failed call determined its reward."""
    marks = [scored.components[name].numpy() for name in (TIMED_OUT, FELL_BACK) if name in scored.components]
    return [any(mark[sample] > 0 for mark in marks) for sample in range(len(scored.rewards.numpy()))]


def advantages(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare advantages with the algorithm's formula on the recorded rewards."""
    config, plan = expectations.algorithm, group.plan
    formula = ADVANTAGES.get(config.name)
    if formula is None or plan.turns is not None or config.truncated == "shape":
        return
    expected = formula(group.scored.rewards.numpy().astype(float), config.advantage_eps)
    for row in group.rows:
        sample, found = plan.samples[row].sample, float(plan.advantages[row])
        if _differs(found, expected[sample]):
            detail = f"advantage {found:.5g} is trained, the rewards give {expected[sample]:.5g}"
            yield group.finding("advantage", detail, sample)


def weights(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Compare loss weights with GRPO's: 1 / (samples in the step times tokens in the sample)."""
    plan = group.plan
    if expectations.algorithm.name != "grpo" or plan.mini_batches.order(1) != (0,):
        return
    tokens: dict[int, int] = {}
    for row in group.rows:
        sample = plan.samples[row]
        tokens[sample.sample] = tokens.get(sample.sample, 0) + int(sample.sampled.sum())
    samples = len({(sample.row, sample.sample) for sample in plan.samples})
    for row in group.rows:
        number = plan.samples[row].sample
        found, expected = float(plan.weights[row]), 1 / (samples * max(1, tokens[number]))
        if _differs(found / expected, 1):
            yield group.finding("weight", f"weight {found:.4g} is trained, not {expected:.4g}", number)


CHECKS: tuple[Callable[[TrainedGroup, Expectations], Iterator[Finding]], ...] = (
    prompts,
    masks,
    ends,
    responses,
    rewards,
    advantages,
    weights,
)
"""Checks of a trained group."""


def check_group(group: TrainedGroup, expectations: Expectations) -> Iterator[Finding]:
    """Yield the contradictions to a group's record."""
    for check in CHECKS:
        yield from check(group, expectations)


def turns_of(group: TrainedGroup) -> dict[int, list[tuple[int, int]]]:
    """Return row -> places (first, end) of the recorded turns; empty without turns."""
    turns: dict[int, list[tuple[int, int]]] = {}
    if group.scored.rollout.turns is not None:
        for _, row, first, end in group.scored.rollout.turns.numpy().tolist():
            turns.setdefault(row, []).append((first, end))
    return turns


def _differs(found: float, expected: float) -> bool:
    return not abs(found - expected) <= TOLERANCE * max(1.0, abs(expected))
