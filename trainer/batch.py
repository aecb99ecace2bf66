"""Defines a training batch: samples of one step, one after the other, without padding; and its digest.

Shapes: n samples, t tokens of all of them together, prompts and responses. A branch of a sample with several
is a sample here, with the advantage and the weight of the whole one.

The digest, by which `tether replay` can tell whether it built the same batch, covers the numbers and arrays
that the records and the algorithm determine, without log-probabilities of other policies and the choice of
measurements.
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
    """Samples of the step, or of a mini-batch of it, over all replicas."""
    trained_tokens: int
    """Tokens under the loss mask, over all replicas."""
    lag_max: int
    """Largest lag of a trained token of the step, versions; 0 without one."""
    fresh: bool
    """Whether there are trained tokens of lag 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples of one step: all of them, or one data-parallel replica's.

    Token i of sample s is at `offsets[s] + i` of the arrays [t]. The first token of a sample is never
    trained.
    """

    step: int
    """The version that the step starts from."""
    totals: StepTotals
    """Totals of the whole step, or of the mini-batch that an update trains, even if only some samples are
    here."""
    offsets: torch.Tensor
    """int64 [n + 1]: where each sample begins; the last one is t."""
    tokens: torch.Tensor
    """int32 [t]."""
    loss_mask: torch.Tensor
    """bool [t]: sampled tokens within the bound; only they carry gradient."""
    sampled_mask: torch.Tensor
    """bool [t]: all sampled tokens."""
    behaviour_logprobs: torch.Tensor
    """float32 [t]: under the weights that sampled each token, set by the engine; 0 where not sampled."""
    versions: torch.Tensor
    """int32 [t]: version of each sampled token; -1 elsewhere."""
    advantages: torch.Tensor
    """float32 [t]: 0 where `loss_mask` is False."""
    group_index: torch.Tensor
    """int64 [n]: index of the sample's group within the step."""
    rewards: torch.Tensor
    """float32 [n]: basis of the advantages, after any punishment of long samples."""
    weights: torch.Tensor
    """float32 [n]: weight of each trained token of the sample in the loss of an update."""
    measured: torch.Tensor
    """bool [n]: samples whose mismatch of trainer and engine is measured."""
    temperature: float = 1.0
    """Sampling temperature of the behaviour policy; logits are divided by it before the log-softmax."""
    decoupled: bool = False
    """Whether the objective is decoupled, with the policy at the start of the step as proximal policy."""
    start_logprobs: torch.Tensor | None = None
    """float32 [t]: under the policy at the start of the step, where it makes several updates; 0 where not
    sampled. None: the training pass's own, since in the first update another pass would compute the same."""
    reference_logprobs: torch.Tensor | None = None
    """float32 [t]: under the initial model, for the KL term; else None."""
    rows: torch.Tensor | None = None
    """int64 [n]: index of each sample within the step, the same for all of its branches; None where it is not
    needed."""
    shares: torch.Tensor | None = None
    """float32 [n]: what part of its sample's tokens each branch has, where a mean over samples counts it by
    that; None: each is a sample."""
    experts: torch.Tensor | None = None
    """int16 [t, L, K]: experts that each of the engine's L mixture layers chose for the token as an input, -1
    where unknown. The trainer's model uses them in place of its own choice. None: not recorded."""
    log_ratio_limit: float | None = None
    """Largest |log(pi / pi_behaviour)| that M2PO does not clip in an update; None: any."""
    entropy_coef: float | None = None
    """Bonus for entropy in this step; None: the settings' value."""
    mini_batch: torch.Tensor | None = None
    """int64 [n]: the mini-batch of each sample, from 0; None: they are of one."""
    values: torch.Tensor | None = None
    """float32 [t]: the critic's, at the start of the step, of the state in which each token was sampled; 0
    where not sampled. None: there is no critic."""
    returns: torch.Tensor | None = None
    """float32 [t]: the critic's target for each sampled token; else None."""
    turn_rewards: torch.Tensor | None = None
    """float32 [t]: reward that follows each sampled token, the basis of a critic's advantages. None: the
    sample's, at its last one; turns were not scored, or there is no critic."""

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sample, int64 [n]."""
        return self.offsets.diff()

    @property
    def sample_index(self) -> torch.Tensor:
        """Index of each token's sample within this batch, int64 [t]."""
        return torch.repeat_interleave(
            torch.arange(len(self.group_index), device=self.offsets.device), self.lengths
        )

    def select(self, samples: torch.Tensor) -> "Batch":
        """Return the `samples` (int64 [m]) in the order given; `totals` stay the step's."""
        lengths = self.lengths[samples]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        shift = self.offsets[samples] - offsets[:-1]
        place = torch.arange(int(offsets[-1]), device=offsets.device) + shift.repeat_interleave(lengths)
        changed = self._map(TOKEN_FIELDS, lambda values: values[place])
        changed |= self._map(SAMPLE_FIELDS, lambda values: values[samples])
        return replace(self, offsets=offsets, **changed)

    def select_mini_batch(self, mini_batch: int, totals: StepTotals) -> "Batch":
        """Return its samples of a mini-batch, whose totals over all replicas are given."""
        part = self
        if self.mini_batch is not None:
            part = self.select((self.mini_batch == mini_batch).nonzero()[:, 0])
        return replace(part, totals=totals)

    def to(self, device: torch.device) -> "Batch":
        """Return the batch with every array on a device."""
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
"""Arrays with an entry for each token."""
SAMPLE_FIELDS = ("group_index", "rewards", "weights", "measured", "mini_batch", "rows", "shares")
"""Arrays with an entry for each sample."""


@dataclass(frozen=True, slots=True)
class TrainedTokens:
    """The tokens of a batch that carry gradient, k of them, in order; every array is [k]."""

    place: torch.Tensor
    """int64: index into the batch's tokens."""
    sample: torch.Tensor
    """int64: index of the sample within the batch."""
    samples: int
    """Samples of the batch."""
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """float32: weight in the loss of the update."""
    lags: torch.Tensor
    """int64: versions from the token to the step."""
    measured: torch.Tensor
    """bool: whether its mismatch of trainer and engine is measured."""
    start_logprobs: torch.Tensor | None
    """As in `Batch`."""
    reference_logprobs: torch.Tensor | None
    decoupled: bool = False
    """As in `Batch`."""
    proximal_logprobs: torch.Tensor | None = None
    """Under the proximal policy, which `micro_batch_loss` sets where the objective is decoupled."""
    log_ratio_limit: float | None = None
    entropy_coef: float | None = None
    """Both as in `Batch`."""
    join: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Adds up an array over the ranks that have other tokens of the same samples, with its gradient; None:
    there are none."""
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    shares: torch.Tensor | None = None
    """All as in `Batch`, the last of each token's sample."""

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
        start_logprobs=_picked(batch.start_logprobs, place),
        reference_logprobs=_picked(batch.reference_logprobs, place),
        decoupled=batch.decoupled,
        log_ratio_limit=batch.log_ratio_limit,
        entropy_coef=batch.entropy_coef,
        values=_picked(batch.values, place),
        returns=_picked(batch.returns, place),
        shares=_picked(batch.shares, sample),
    )


def _picked(values: torch.Tensor | None, place: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[place]


class BatchDigest:
    """Digests samples as they come: the arrays of a batch, not how they are divided or padded.

    Each array is an xxh3-128 of its bytes, little-endian, as `Batch` has them; the digest is the xxh3-128 of
    all names, dtypes and digests.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, xxhash.xxh3_128] = {}

    def add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the `token_arrays` of the next sample."""
        for name, values in arrays.items():
            self._tokens.setdefault(f"{name} {values.dtype}", xxhash.xxh3_128()).update(values.data)

    def finish(self, numbers: Mapping[str, float], by_sample: Mapping[str, torch.Tensor]) -> str:
        """Return the digest, 32 hex digits, with the numbers of the step and arrays [N] by sample."""
        state = xxhash.xxh3_128()
        for name, value in numbers.items():
            state.update(f"{name} {value!r}\n".encode())
        for name, values in by_sample.items():
            array = values.numpy()
            state.update(f"{name} {array.dtype} {xxhash.xxh3_128_hexdigest(array.data)}\n".encode())
        for name, digest in self._tokens.items():
            state.update(f"{name} {digest.hexdigest()}\n".encode())
        return state.hexdigest()
