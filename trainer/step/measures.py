"""Measures a step, identically in every backend.

Each micro-batch yields one float64 vector of totals, totals by lag, and maxima. Vectors of micro-batches and
ranks are merged by sums and maxima, so results do not depend on the split of the batch.

Shapes: k trained tokens of a micro-batch, K lags.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from protocol.messages import Mismatch
from trainer.algorithms.base import TokenLoss
from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.base import StepStats
from trainer.batch import Batch, TrainedTokens
from trainer.config import AlgorithmConfig
from trainer.functional.losses import (
    MAX_LOG_RATIO,
    k3_kl,
    keep_mask,
    probability_ratio,
    ratio_at_level,
)

TOTALS = (
    "loss",
    "entropy",
    "clipped",
    "ratio",
    "importance",
    "importance_squared",
    "capped",
    "rejected",
    "behaviour_clipped",
    "behaviour_kl",
    "reference_kl",
    "samples",
    "sample_importance",
    "sample_importance_squared",
)
"""Sums over trained tokens, in the order of the vector. The loss is weighted. The last three are sums over
samples with trained tokens."""
BY_LAG = ("tokens", "error", "mult_error", "importance", "importance_squared")
"""Sums over the measured tokens of each lag. In the vector they follow the totals, K values per name."""
MAXIMA = ("importance", "fresh_error")
"""Maxima over trained tokens. In the vector, the largest error of each lag follows."""


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """Measures of an update; equal on every rank."""

    config: AlgorithmConfig
    tokens: int
    """Trained tokens of the update on all ranks."""
    lags: int
    """K: the largest lag of a trained token, plus 1."""
    truncates: bool
    """Whether the loss truncates importance weights."""
    refers: bool
    """Whether the batch contains log-probabilities of the reference model."""
    fresh: bool
    """Whether there are trained tokens of lag 0."""
    rejects: bool = False
    """Whether the loss rejects tokens, which zeroes their policy gradient."""

    @classmethod
    def of_batch(cls, batch: Batch, config: AlgorithmConfig) -> "StepMeasures":
        """Return the measures of a batch's update. `batch` may be one replica's part."""
        totals = batch.totals
        return cls(
            config=config,
            tokens=totals.trained_tokens,
            lags=totals.lag_max + 1,
            truncates=batch.decoupled and config.importance_cap > 0,
            refers=batch.reference_logprobs is not None,
            fresh=totals.fresh,
            rejects=bool(config.rejection_level),
        )

    @torch.no_grad()
    def measure(
        self,
        tokens: TrainedTokens,
        loss: torch.Tensor,
        terms: TokenLoss,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
    ) -> torch.Tensor:
        """Return the measurement vector of a micro-batch.

        Args:
            tokens: the k trained tokens of the micro-batch, on the device.
            loss: weighted sum of the token losses.
            terms: [k].
            logprobs: [k], under the current weights.
            entropy: [k].
        """
        behaviour, current = tokens.behaviour_logprobs.double(), logprobs.double()
        start = current if tokens.start_logprobs is None else tokens.start_logprobs.double()
        importance, errors = probability_ratio(start, behaviour), (start - behaviour).abs()
        by_token = {
            "entropy": entropy.double(),
            "clipped": terms.clipped.double(),
            "ratio": terms.ratio.double(),
            "importance": importance,
            "importance_squared": importance.square(),
            "behaviour_clipped": terms.behaviour_clipped.double(),
            "behaviour_kl": k3_kl(behaviour, start),
        }
        if self.truncates:
            proximal = start if tokens.proximal_logprobs is None else tokens.proximal_logprobs.double()
            by_token["capped"] = self._capped(proximal - behaviour, tokens)
        if self.rejects:
            by_token["rejected"] = self._rejected(start - behaviour, tokens)
        if self.config.ess_scaling:
            by_token |= _sample_measures(current - behaviour, tokens)
        if tokens.reference_logprobs is not None:
            by_token["reference_kl"] = k3_kl(current, tokens.reference_logprobs.double())
        totals = {name: values.sum() for name, values in by_token.items()} | {"loss": loss.double()}
        zero = errors.new_zeros(1)
        lags, chosen = tokens.lags, tokens.measured
        maxima = {"importance": importance, "fresh_error": torch.where(lags == 0, errors, 0.0)}
        return torch.cat(
            [
                *(totals.get(name, zero).reshape(1) for name in TOTALS),
                self._by_lag(lags, errors, importance, chosen),
                *(torch.cat([zero, maxima[name]]).max().reshape(1) for name in MAXIMA),
                errors.new_zeros(self.lags).scatter_reduce(0, lags, errors * chosen, "amax"),
            ]
        )

    def join(self, vectors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the merged vector of several micro-batches; zeros if `vectors` is empty."""
        size = len(TOTALS) + len(MAXIMA) + (len(BY_LAG) + 1) * self.lags
        rows = torch.stack([torch.zeros(size, dtype=torch.float64, device=device), *vectors])
        sums, maxima = self.split(rows.sum(0)), self.split(rows.amax(0))
        return torch.cat([sums[0], maxima[1]])

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a vector's sums and of its maxima."""
        sums = len(TOTALS) + len(BY_LAG) * self.lags
        return vector[:sums], vector[sums:]

    def lr_scale(self, vector: torch.Tensor) -> float:
        """Return the factor that scales the update's learning rate.

            rho = (sum_i w_i)^2 / (B sum_i w_i^2),  w_i = pi(o_i) / pi_behaviour(o_i) of each of B samples

        With `ess_scaling` = sqrt, which suits Adam, the factor is sqrt(rho). VCPO: Huang et al. 2026 (arXiv
        2602.17616). pi is the current policy. Samples without a trained token do not count. A branch counts
        by its share of the sample's tokens.
        """
        if not self.config.ess_scaling:
            return 1.0
        total = dict(zip(TOTALS, vector.tolist(), strict=False))
        share = _ess(total["samples"], total["sample_importance"], total["sample_importance_squared"])
        return math.sqrt(share) if self.config.ess_scaling == "sqrt" else share

    def stats(self, vector: torch.Tensor, *, grad_norm: float, skipped: str) -> StepStats:
        """Return the statistics of an update, computed from the vector of the whole update."""
        if not self.tokens:
            return StepStats(trained_tokens=0, skipped=skipped)
        sums, maxima = (part.tolist() for part in self.split(vector))
        total = dict(zip(TOTALS, sums, strict=False))
        importance_max, fresh_error, *errors_max = maxima
        mismatch = self._mismatch(sums[len(TOTALS) :], errors_max)
        fresh = mismatch.get(0)
        if ALGORITHMS[self.config.name].on_data:  # there is no sampling policy to compare with
            entropy = total["entropy"] / self.tokens
            return StepStats(
                trained_tokens=self.tokens,
                skipped=skipped,
                loss=total["loss"],
                grad_norm=grad_norm,
                entropy=entropy,
            )
        return StepStats(
            trained_tokens=self.tokens,
            skipped=skipped,
            loss=total["loss"],
            grad_norm=grad_norm,
            entropy=total["entropy"] / self.tokens,
            clip_fraction=total["clipped"] / self.tokens,
            ratio_mean=total["ratio"] / self.tokens,
            logprob_error_max=fresh_error if self.fresh else None,
            behaviour_kl_k3=total["behaviour_kl"] / self.tokens,
            reference_kl_k3=total["reference_kl"] / self.tokens if self.refers else None,
            importance_mean=total["importance"] / self.tokens,
            importance_max=importance_max,
            importance_capped=total["capped"] / self.tokens if self.truncates else None,
            importance_rejected=total["rejected"] / self.tokens if self.rejects else None,
            importance_ess=_ess(self.tokens, total["importance"], total["importance_squared"]),
            behaviour_clip_fraction=total["behaviour_clipped"] / self.tokens,
            mismatch=mismatch,
            mismatch_mean=fresh.error_mean if fresh else None,
            mismatch_max=fresh.error_max if fresh else None,
            token_mult_prob_error=fresh.token_mult_prob_error if fresh else None,
            lr_scale=self.lr_scale(vector) if self.config.ess_scaling else None,
            sums=tuple(vector.tolist()),
        )

    def _capped(self, log_ratio: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
        ratio = ratio_at_level(log_ratio, self.config.importance_level, tokens.over_samples)
        return (ratio > self.config.importance_cap).double()

    def _rejected(self, log_ratio: torch.Tensor, tokens: TrainedTokens) -> torch.Tensor:
        config, over = self.config, tokens.over_samples
        bounds = config.rejection_low, config.rejection_high
        return 1 - keep_mask(log_ratio, config.rejection_level, *bounds, over)

    def _by_lag(
        self, lags: torch.Tensor, errors: torch.Tensor, importance: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums `BY_LAG` over the `chosen` tokens as float64 [5 K]. Arguments are [k]."""
        values = {
            "tokens": torch.ones_like(errors),
            "error": errors,
            "mult_error": errors.clamp_max(MAX_LOG_RATIO).exp(),
            "importance": importance,
            "importance_squared": importance.square(),
        }
        zeros = errors.new_zeros(self.lags)
        return torch.cat([zeros.index_add(0, lags, values[name] * chosen) for name in BY_LAG])

    def _mismatch(self, sums: Sequence[float], largest: Sequence[float]) -> dict[int, Mismatch]:
        """Return the mismatch of each lag that has measured tokens."""
        columns = [sums[first : first + self.lags] for first in range(0, len(sums), self.lags)]
        return {
            lag: Mismatch(
                tokens=round(tokens),
                error_mean=error / tokens,
                error_max=largest[lag],
                token_mult_prob_error=mult_error / tokens,
                ess=_ess(tokens, importance, squared),
            )
            for lag, (tokens, error, mult_error, importance, squared) in enumerate(zip(*columns, strict=True))
            if tokens
        }


def _sample_measures(log_ratio: torch.Tensor, tokens: TrainedTokens) -> dict[str, torch.Tensor]:
    """Return per-sample sums as values of tokens, [k]: each token holds its share of the sample's value."""
    share = 1 / tokens.over_samples(torch.ones_like(log_ratio))
    if tokens.shares is not None:
        share = share * tokens.shares
    weight = ratio_at_level(log_ratio, "sequence", tokens.over_samples)
    return {
        "samples": share,
        "sample_importance": share * weight,
        "sample_importance_squared": share * weight.square(),
    }


def _ess(tokens: float, importance: float, squared: float) -> float:
    """Return (sum w)^2 / (tokens * sum w^2)."""
    return importance**2 / (tokens * squared) if squared else 0.0


class PassResult(NamedTuple):
    """Result of a step's forward passes; equal on every rank. Token counts cover inputs of all replicas."""

    vector: torch.Tensor
    """Measurements of the whole step."""
    micro_batches: int
    """Forward passes of the replica with the most passes."""
    tokens: int
    """Computed tokens, including padding."""
    padding: int
    """Computed tokens that are padding."""
    row_tokens: int
    """Tokens of all samples. A prefix shared by several samples counts once per sample."""

    @property
    def padding_share(self) -> float:
        """Share of padding in the computed tokens."""
        return self.padding / self.tokens if self.tokens else 0.0

    @property
    def shared_share(self) -> float:
        """Share of the samples' tokens that were not computed, because another sample shares the prefix."""
        return 1 - (self.tokens - self.padding) / self.row_tokens if self.row_tokens else 0.0

    def counted_in(self, stats: StepStats) -> StepStats:
        """Return the statistics of a step with these counts added."""
        return msgspec.structs.replace(
            stats,
            micro_batches=self.micro_batches,
            padding_share=self.padding_share,
            shared_share=self.shared_share,
            computed_tokens=self.tokens - self.padding,
        )
