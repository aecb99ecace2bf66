"""Plans a step from its scored groups, and builds the batch of any subset of the samples.

The plan validates every array, counts tokens, computes scores and the digest. For each sample, the plan keeps
a few numbers and views of the record. `StepPlan.part` builds the arrays of one replica, so a process holds
all arrays only if it trains on all samples. Tokens over the staleness bound are masked or refused. A second
check compares all unmasked tokens with the bound.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from protocol.errors import BoundViolation, ProtocolError
from protocol.messages import ScoredRollout, StepReport
from trainer.algorithms.base import Algorithm
from trainer.batch import Batch, BatchDigest, StepTotals
from trainer.config import AlgorithmConfig
from trainer.data.batch_stats import StepTally, TrainedCounts, rewards_of
from trainer.data.mini_batches import MiniBatches
from trainer.data.prefix_tree import RowFamily, families_by_sample, find_families
from trainer.data.samples import BatchSample, samples_of
from trainer.data.turn_advantages import TurnAdvantages, digested, turn_advantages
from trainer.functional.advantages import overlong_punishment

DTYPES = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "sampled_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "versions": np.int32,
    "advantages": np.float32,
}
"""Per-token arrays that come from the records, and their dtypes."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Numbers of a step, without the token arrays.

    Shapes: N rows of the step. Each row is a sample or a branch of a sample. All branches of a sample have
    its reward, advantage, weight and mini-batch.
    """

    step: int
    """The version that the step starts from."""
    temperature: float
    decoupled: bool
    """As in `Batch`."""
    samples: Sequence[BatchSample]
    """[N]: views of the records."""
    totals: StepTotals
    lengths: torch.Tensor
    """int64 [N]: tokens of prompt and response."""
    group_index: torch.Tensor
    """int64 [N]: index of the row's group within the step."""
    rewards: torch.Tensor
    """float32 [N]: input of the advantages; with `algorithm.truncated` = shape, after the length penalty."""
    advantages: torch.Tensor
    """float32 [N]."""
    weights: torch.Tensor
    """float32 [N]: loss weight within the sample's mini-batch."""
    measured: torch.Tensor
    """bool [N]."""
    trained_counts: TrainedCounts
    """Argument of `Ledger.commit`: an entry for every group, possibly empty."""
    stats: StepReport
    """Report of the step, with the fields that follow from the batch."""
    digest: str
    """`BatchDigest` of the whole step."""
    mini_batches: MiniBatches
    experts_shape: tuple[int, int] | None = None
    """(L, K): layers and experts per token, if any sample has recorded experts."""
    turns: TurnAdvantages | None = None
    """Advantages of turns, which replace the samples' advantages; None if turns are not scored."""

    def shared_tokens(self, families: Iterable[RowFamily]) -> torch.Tensor:
        """Return how many tokens of each row are computed together with another row, int64 [N]."""
        shared = torch.zeros_like(self.lengths)
        for family in families:
            shared[list(family.rows)] = torch.tensor(family.shared)
        return shared

    def families(self, *, shared: bool) -> list[RowFamily]:
        """Return families: rows of one mini-batch that should be trained on the same replica.

        Args:
            shared: whether a group's rows with a common prefix form a family, which computes the prefix once.
                Otherwise a family is the rows of one sample, and no tokens are shared.
        """
        if not shared:
            return families_by_sample((self.lengths - 1).tolist(), self.mini_batches.rows.tolist())
        inputs = [np.concatenate([row.prompt, row.tokens])[:-1] for row in self.samples]
        groups = zip(self.mini_batches.by_row.tolist(), self.group_index.tolist(), strict=True)
        return find_families(inputs, list(groups))

    def part(self, samples: Sequence[int]) -> Batch:
        """Build the batch of some rows of the step, on the CPU.

        Args:
            samples: indices of the rows, in any order. If empty, the batch has no tokens.

        Raises:
            BoundViolation: a token over the bound would carry gradient.
        """
        rows = torch.tensor(samples, dtype=torch.int64)
        offsets = torch.nn.functional.pad(self.lengths[rows].cumsum(0), (1, 0))
        places = offsets.tolist()
        arrays = {name: np.empty(places[-1], dtype=dtype) for name, dtype in DTYPES.items()}
        if self.experts_shape is not None:
            arrays["experts"] = np.full((places[-1], *self.experts_shape), -1, dtype=np.int16)
        if self.turns is not None and self.turns.for_critic:
            arrays["turn_rewards"] = np.empty(places[-1], dtype=np.float32)
        advantages = self.advantages.numpy()
        for index, first, end in zip(samples, places, places[1:], strict=False):
            token_arrays = self.samples[index].token_arrays(self.step)
            check_bound(self.samples[index], token_arrays["loss_mask"], self.step)
            token_advantages: Any = advantages[index]
            if self.turns is not None:
                token_advantages = self.turns.token_advantages(index, self.samples[index])
                if self.turns.for_critic:
                    token_arrays["turn_rewards"] = self.turns.token_rewards(index, self.samples[index])
            token_arrays["advantages"] = np.where(token_arrays["loss_mask"], token_advantages, np.float32(0))
            for name, values in token_arrays.items():
                arrays[name][first:end] = values
        by_token: dict[str, Any] = {name: torch.from_numpy(values) for name, values in arrays.items()}
        return Batch(
            step=self.step,
            totals=self.totals,
            offsets=offsets,
            group_index=self.group_index[rows],
            rewards=self.rewards[rows],
            weights=self.weights[rows],
            measured=self.measured[rows],
            mini_batch=self.mini_batches.by_row[rows],
            rows=self.mini_batches.rows[rows],
            shares=_shares(self.lengths, self.mini_batches.rows)[rows],
            temperature=self.temperature,
            decoupled=self.decoupled,
            **by_token,
        )


def plan_step(
    groups: Iterable[tuple[ScoredRollout, int]],
    *,
    step: int,
    algorithm: Algorithm,
    temperature: float = 1.0,
    mask_late: bool = True,
    decoupled: bool = False,
    mismatch_share: float = 1.0,
    mini_batches: int = 1,
    seed: int = 0,
    max_tokens: int = 0,
) -> StepPlan:
    """Validate the groups of a step and plan its batch.

    Args:
        groups: scored groups, each with the bound of its lease; consumed lazily.
        step, temperature, decoupled: fields of the plan.
        mask_late: whether to mask sampled tokens over the bound; otherwise such a token is an error.
        mismatch_share: share of the groups whose trainer-engine mismatch is measured, 0 to 1.
        seed: with `step`, the seed of the random assignment of samples to mini-batches.
        max_tokens: token limit of one generation, the default of `algorithm.overlong_length`.

    Raises:
        ProtocolError: a record is malformed or has tokens of a later version; the message names the field.
        BoundViolation: a token exceeds the bound and `mask_late` is off, or the mask missed the token.
        SettingsError: turns are scored, and the algorithm applies a penalty to whole samples.
    """
    tally, digest = StepTally(step, max_tokens), BatchDigest()
    if not (samples := list(_counted(groups, tally, digest, mask_late, algorithm.config))):
        raise ProtocolError(f"step {step}: the batch has no samples")
    divided, counts = MiniBatches.of(tally, mini_batches, seed), tally.trained_counts()
    scores = _scores(tally.first_rows(samples), tally, algorithm, divided, max_tokens)
    by_sample = _by_row(samples, tally, scores)
    turns = turn_advantages(samples, tally.sample_of_row, scores["rewards"], algorithm)
    return StepPlan(
        step=step,
        temperature=temperature,
        decoupled=decoupled,
        samples=samples,
        totals=tally.totals(),
        measured=_measured(counts, mismatch_share)[by_sample["group_index"]],
        trained_counts=counts,
        stats=tally.stats(tally.first_rows(samples), algorithm.config.truncated, scores["rewards"]),
        digest=digest.finish({"step": step, "temperature": temperature}, by_sample | digested(turns)),
        mini_batches=divided,
        experts_shape=_experts_shape(samples),
        turns=turns,
        **by_sample,
    )


def _counted(
    groups: Iterable[tuple[ScoredRollout, int]],
    tally: StepTally,
    digest: BatchDigest,
    mask_late: bool,
    config: AlgorithmConfig,
) -> Iterator[BatchSample]:
    """Yield the rows of the groups after counting, digesting and checking the bound of trained tokens."""
    checked = "loss_mask" if mask_late else "sampled_mask"
    mask = config.truncated == "mask"
    for index, (scored, max_staleness) in enumerate(groups):
        tally.open_group(scored)
        for sample in samples_of(scored, index, max_staleness, tally.step, mask_truncated=mask):
            arrays = sample.token_arrays(tally.step)
            check_bound(sample, arrays[checked], tally.step)
            tally.add(sample, arrays)
            digest.add(arrays)
            yield sample


def _scores(
    samples: Sequence[BatchSample],
    tally: StepTally,
    algorithm: Algorithm,
    divided: MiniBatches,
    max_tokens: int,
) -> dict[str, torch.Tensor]:
    """Return the plan's per-sample tensors by field name. `samples` has the first row of each sample."""
    rewards = _shaped(rewards_of(samples), tally.response_tokens, algorithm.config, max_tokens)
    group_index = torch.tensor([sample.row for sample in samples])
    return {
        "group_index": group_index,
        "rewards": rewards,
        "advantages": algorithm.advantages(rewards, group_index),
        "weights": divided.weights(algorithm, torch.tensor(tally.sampled_tokens)),
    }


def _by_row(
    samples: Sequence[BatchSample], tally: StepTally, scores: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the plan's per-row tensors [N] by field name: lengths, and the scores of each row's sample."""
    rows = torch.tensor(tally.sample_of_row)
    by_row = {name: values[rows] for name, values in scores.items()}
    return {"lengths": torch.tensor([len(row) for row in samples]), **by_row}


def _shares(lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return each row's share of the inputs of its sample, float32 [N]. `rows` [N] has sample indices."""
    inputs = (lengths - 1).clamp_min(1).float()
    return inputs / torch.zeros(int(rows.max()) + 1).index_add_(0, rows, inputs)[rows]


def _shaped(
    rewards: torch.Tensor, lengths: Sequence[int], config: AlgorithmConfig, max_tokens: int
) -> torch.Tensor:
    """Return the rewards, with DAPO's overlong punishment if `algorithm.truncated` is `shape`."""
    if config.truncated != "shape":
        return rewards
    limit = config.overlong_length or max_tokens
    return rewards + config.overlong_penalty * overlong_punishment(
        torch.tensor(lengths), limit, config.overlong_buffer
    )


def _experts_shape(samples: Sequence[BatchSample]) -> tuple[int, int] | None:
    """Return (layers, experts per token) of the recorded experts, None if no sample has recorded experts.

    Raises:
        ProtocolError: two samples have different shapes. The message names the group of the second sample.
    """
    shape = None
    for sample in samples:
        if sample.experts is not None:
            found = sample.experts[0].shape[1:]
            if shape not in (None, found):
                raise ProtocolError(
                    f"group {sample.group}: experts of {found[0]} layers, {found[1]} each, but others of the "
                    f"step have {shape[0]} and {shape[1]}"
                )
            shape = found
    return shape


def check_bound(sample: BatchSample, mask: NDArray[np.bool_], step: int) -> None:
    """Check the lag of every token under `mask` against the bound of its group's lease.

    The check reads the received version spans and deliberately shares no arithmetic with the mask's
    computation.

    Args:
        sample: sample as received.
        mask: bool [P + T_i] over prompt and response tokens.
        step: version that the step starts from.

    Raises:
        BoundViolation: a token exceeds the bound or was not sampled. The message names the first such token.
    """
    response = mask[len(sample.prompt) :]
    if mask[: len(sample.prompt)].any() or (response & ~sample.sampled).any():
        raise BoundViolation(f"group {sample.group}: a token would be trained that was not sampled")
    first = 0
    for end, version in sample.spans.tolist():
        if step - version > sample.max_staleness and response[first:end].any():
            place = first + int(response[first:end].argmax())
            raise BoundViolation(
                f"group {sample.group}: token {place} of version {version} has lag {step - version} in step "
                f"{step}, over the bound of {sample.max_staleness}"
            )
        first = end


def _measured(groups: Iterable[int], share: float) -> torch.Tensor:
    return torch.tensor([is_measured(group, share) for group in groups])


def is_measured(group: int, share: float) -> bool:
    """Return whether to measure a group's mismatch: deterministic, true for about a `share` of the groups."""
    return xxhash.xxh3_64_intdigest(b"%d" % group) < share * 2**64
