"""Defines a training batch, the concatenated samples of one step without padding, and its digest.

Shapes: n samples, t tokens of all samples, prompts and responses. Each branch of a branched sample counts as
a sample here, with the advantage and the weight of the whole sample.

`tether replay` compares digests to verify that it rebuilt the same batch. The digest covers the numbers and
arrays that follow from the records and the algorithm. It excludes log-probabilities of other policies and the
choice of measurements.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Totals over the samples of all data-parallel replicas; equal on every rank."""

    samples: int
    """Samples of the step or mini-batch."""
    trained_tokens: int
    """Tokens under the loss mask."""
    lag_max: int
    """Largest lag of a trained token, versions; 0 without trained tokens."""
    fresh: bool
    """Whether a trained token has lag 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step: all samples, or the part of one data-parallel replica.

    Token i of sample s is at `offsets[s] + i` of the arrays [t]. The first token of a sample is never
    trained.
    """

    step: int
    """Version at the start of the step."""
    totals: StepTotals
    """Totals of the whole step, or of the mini-batch of an update, over all replicas."""
    offsets: torch.Tensor
    """int64 [n + 1]: start of each sample; the last entry is t."""
    tokens: torch.Tensor
    """int32 [t]."""
    loss_mask: torch.Tensor
    """bool [t]: sampled tokens within the bound; only these tokens carry gradient."""
    sampled_mask: torch.Tensor
    """bool [t]: all sampled tokens."""
    behaviour_logprobs: torch.Tensor
    """float32 [t]: log-probabilities of the engine under the weights that sampled each token; 0 where not
    sampled."""
    versions: torch.Tensor
    """int32 [t]: version of each sampled token; -1 elsewhere."""
    advantages: torch.Tensor
    """float32 [t]: 0 where `loss_mask` is False."""
    group_index: torch.Tensor
    """int64 [n]: index of the sample's group within the step."""
    rewards: torch.Tensor
    """float32 [n]: rewards from which advantages are computed, including the overlong penalty."""
    weights: torch.Tensor
    """float32 [n]: weight of each trained token of the sample in the loss of an update."""
    measured: torch.Tensor
    """bool [n]: samples whose mismatch of trainer and engine is measured."""
    temperature: float = 1.0
    """Sampling temperature of the behaviour policy; logits are divided by it before the log-softmax."""
    decoupled: bool = False
    """Whether the objective is decoupled: the proximal policy is the policy at the start of the step."""
    start_logprobs: torch.Tensor | None = None
    """float32 [t]: log-probabilities under the policy at the start of a step of several updates; 0 where not
    sampled. None: use the training pass, since the first update's pass computes the same values."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [t]: log-probabilities under the initial model, for the KL term; None without it."""
    rows: torch.Tensor | None = None
    """int64 [n]: index of each sample within the step, equal for all of its branches; None where not needed.
    """
    shares: torch.Tensor | None = None
    """float32 [n]: share of each branch in its sample's tokens, for means over samples. None: no sample has
    branches."""
    experts: torch.Tensor | None = None
    """int16 [t, L, K]: experts that each of the engine's L mixture-of-experts layers chose for the token as
    an input; -1 if unknown. They replace the choice of the trainer's routers. None: not recorded."""
    log_ratio_limit: float | None = None
    """Largest |log(pi / pi_behaviour)| that M2PO does not clip in an update; None: no limit."""
    entropy_coef: float | None = None
    """Entropy bonus coefficient of this step; None: as in the settings."""
    mini_batch: torch.Tensor | None = None
    """int64 [n]: index of each sample's mini-batch; None: one mini-batch."""
    values: torch.Tensor | None = None
    """float32 [t]: values of the critic, at the start of the step, for the state in which each token was
    sampled; 0 where not sampled. None: no critic."""
    returns: torch.Tensor | None = None
    """float32 [t]: target of the critic for each sampled token; None: no critic."""
    turn_rewards: torch.Tensor | None = None
    """float32 [t]: reward that follows each sampled token, from which a critic's advantages are computed.
    None: the last token gets the sample's reward, because turns were not scored or there is no critic."""

    @property
    def lengths(self) -> torch.Tensor:
        """Number of tokens of each sample, int64 [n]."""
        return self.offsets.diff()

    @property
    def sample_index(self) -> torch.Tensor:
        """Index of each token's sample within this batch, int64 [t]."""
        return torch.repeat_interleave(
            torch.arange(len(self.group_index), device=self.offsets.device), self.lengths
        )

    def select(self, samples: torch.Tensor) -> "Batch":
        """Return the `samples` (int64 [m]) in this order; `totals` are unchanged."""
        lengths = self.lengths[samples]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shift = self.offsets[samples] - offsets[:-1]
        place = torch.arange(int(offsets[-1]), device=offsets.device) + shift.repeat_interleave(lengths)
        changed = self._map(TOKEN_FIELDS, lambda values: values[place])
        changed |= self._map(SAMPLE_FIELDS, lambda values: values[samples])
        return replace(self, offsets=offsets, **changed)

    def select_mini_batch(self, mini_batch: int, totals: StepTotals) -> "Batch":
        """Return the samples of a mini-batch, with the mini-batch's totals over all replicas."""
        part = self
        if self.mini_batch is not None:
            part = self.select((self.mini_batch == mini_batch).nonzero()[:, 0])
        return replace(part, totals=totals)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with all arrays on a device."""
        return replace(
            self,
            **self._map(("offsets", *TOKEN_FIELDS, *SAMPLE_FIELDS), lambda values: values.to(device)),
        )

    def _map(self, names: Iterable[str], change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in names}
        return {name: change(values) for name, values in found.items() if values is not None}


TOKEN_FIELDS = (
    "tokens",
    "loss_mask",
    "sampled_mask",
    "behaviour_logprobs",
    "versions",
    "advantages",
    "start_logprobs",
    "reference_logprobs",
    "experts",
    "values",
    "returns",
    "turn_rewards",
)
"""Arrays with one entry per token."""
SAMPLE_FIELDS = ("group_index", "rewards", "weights", "measured", "mini_batch", "rows", "shares")
"""Arrays with one entry per sample."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The k tokens of a batch that carry gradient, in order; every array is [k]."""

    place: torch.Tensor
    """int64: index into the batch's tokens."""
    sample: torch.Tensor
    """int64: index of the sample within the batch."""
    samples: int
    """Number of samples in the batch."""
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """float32: weight in the loss of the update."""
    lags: torch.Tensor
    """int64: lag of each token, versions."""
    measured: torch.Tensor
    """bool: whether the token's mismatch of trainer and engine is measured."""
    start_logprobs: torch.Tensor | None
    """As in `Batch`."""
    reference_logprobs: torch.Tensor | None
    decoupled: bool = False
    """As in `Batch`."""
    proximal_logprobs: torch.Tensor | None = None
    """Log-probabilities under the proximal policy of a decoupled objective, set by `micro_batch_loss`."""
    log_ratio_limit: float | None = None
    entropy_coef: float | None = None
    """As in `Batch`, like `log_ratio_limit`."""
    join: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Sums an array, with its gradient, over the ranks that share the samples; None: no rank shares them."""
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    """As in `Batch`, like `values` and `returns`; [k] by the sample of each token."""

    def over_samples(self, values: torch.Tensor) -> torch.Tensor:
        """Return, for each token, the sum of `values` [k] over the trained tokens of its sample, [k]."""
        sums = values.new_zeros(self.samples).index_add(0, self.sample, values)
        return (sums if self.join is None else self.join(sums))[self.sample]


def trained_tokens(batch: Batch) -> TrainedTokens:
    """Return the tokens under the loss mask."""
    place = batch.loss_mask.nonzero()[:, 0]
    sample = batch.sample_index[place]
    return TrainedTokens(
        place=place,
        sample=sample,
        samples=len(batch.group_index),
        behaviour_logprobs=batch.behaviour_logprobs[place],
        advantages=batch.advantages[place],
        weights=batch.weights[sample],
        lags=(batch.step - batch.versions[place]).long(),
        measured=batch.measured[sample],
        start_logprobs=_index_optional(batch.start_logprobs, place),
        reference_logprobs=_index_optional(batch.reference_logprobs, place),
        decoupled=batch.decoupled,
        log_ratio_limit=batch.log_ratio_limit,
        entropy_coef=batch.entropy_coef,
        values=_index_optional(batch.values, place),
        returns=_index_optional(batch.returns, place),
        shares=_index_optional(batch.shares, sample),
    )


def _index_optional(values: torch.Tensor | None, place: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[place]


class BatchDigest:
    """Incremental digest of a batch's samples, independent of division and padding.

    Each array is hashed with xxh3-128 over its bytes, little-endian, as `Batch` stores it. The digest is the
    xxh3-128 of all names, dtypes and hashes.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, xxhash.xxh3_128] = {}

    def add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the `token_arrays` of the next sample."""
        for name, values in arrays.items():
            self._tokens.setdefault(f"{name} {values.dtype}", xxhash.xxh3_128()).update(values.data)

    def finish(self, numbers: Mapping[str, float], by_sample: Mapping[str, torch.Tensor]) -> str:
        """Return the digest, 32 hex digits, with the step's numbers and the arrays [N] by sample."""
        state = xxhash.xxh3_128()
        for name, value in numbers.items():
            state.update(f"{name} {value!r}\n".encode())
        for name, values in by_sample.items():
            array = values.numpy()
            state.update(f"{name} {array.dtype} {xxhash.xxh3_128_hexdigest(array.data)}\n".encode())
        for name, digest in self._tokens.items():
            state.update(f"{name} {digest.hexdigest()}\n".encode())
        return state.hexdigest()
