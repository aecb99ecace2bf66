"""Recomputes what a step reports of its tokens, a token at a time."""

import math

from tests.trainer.algorithms import naive
from tests.trainer.recomputed.records import NaiveBatch
from trainer.config import AlgorithmConfig


def measured(
    config: AlgorithmConfig,
    batch: NaiveBatch,
    logprobs: list[float],
    entropy: list[float],
    scores: dict[int, float],
    cap: float,
) -> dict[str, float]:
    """Return what a step reports of its tokens, but for loss and gradient; names are those of the report.

    Of tokens that nobody sampled there is only the entropy.
    """
    if config.name == "sft":
        trained = [entropy[token] for tokens in batch.trained for token in tokens]
        return {"trained_tokens": len(trained), "entropy": naive.mean(trained)}
    engine = batch.behaviour_logprobs.tolist()
    rows: dict[str, list[float]] = {}
    by_lag: dict[int, dict[str, list[float]]] = {}
    samples: list[float] = []
    shares: list[float] = []
    part = naive.shares_of_rows(batch)  # type: ignore[arg-type]

    def note(name: str, value: float, into: dict[str, list[float]] = rows) -> None:
        into.setdefault(name, []).append(float(value))

    for row, tokens in enumerate(batch.trained):
        if not tokens:
            continue
        shares.append(part[row])
        gaps = [math.exp(logprobs[token] - engine[token]) for token in tokens]
        old = [_weight_of_old(config, batch, token, gap) for token, gap in zip(tokens, gaps, strict=True)]
        ratios = [gap / before for gap, before in zip(gaps, old, strict=True)]
        if config.name == "gspo":
            ratios = naive.at_level(ratios, "geometric")
            compared = naive.at_level(gaps, "geometric")
        else:
            compared = gaps
        weights = naive.at_level(old, config.importance_level)
        kept = naive.at_level(gaps, config.rejection_level or "token")
        samples.append(math.prod(gaps))
        for place, token in enumerate(tokens):
            gap = gaps[place]
            note("entropy", entropy[token])
            note("ratio_mean", ratios[place])
            note("clip_fraction", _clipped(config, ratios[place], scores[token], cap))
            note("behaviour_clip_fraction", _clipped(config, compared[place], scores[token], cap))
            note("behaviour_kl_k3", gap - 1 - math.log(gap))
            note("importance_mean", gap)
            if batch.decoupled and config.importance_cap:
                note("importance_capped", weights[place] > config.importance_cap)
            if config.rejection_level:
                note("importance_rejected", not config.rejection_low <= kept[place] <= config.rejection_high)
            if batch.reference_logprobs is not None:
                q = math.exp(batch.reference_logprobs[token].item() - logprobs[token])
                note("reference_kl_k3", q - 1 - math.log(q))
            at = by_lag.setdefault(batch.step - int(batch.versions[token]), {})
            note("error", abs(logprobs[token] - engine[token]), at)
            note("gap", gap, at)
    found: dict[str, float] = {name: naive.mean(values) for name, values in rows.items()}
    found["trained_tokens"] = len(rows["entropy"])
    found["importance_max"] = max(rows["importance_mean"])
    found["importance_ess"] = _ess(rows["importance_mean"])
    if config.ess_scaling:
        found["lr_scale"] = _ess(samples, shares) ** (0.5 if config.ess_scaling == "sqrt" else 1.0)
    for lag, at in by_lag.items():
        found |= {f"mismatch.{lag}.{name}": value for name, value in _mismatch(at).items()}
    if 0 in by_lag:
        found["mismatch_mean"], found["mismatch_max"] = (
            found[f"mismatch.0.error_{name}"] for name in ("mean", "max")
        )
        found["token_mult_prob_error"] = found["mismatch.0.token_mult_prob_error"]
        found["logprob_error_max"] = found["mismatch_max"]
    return found


def _weight_of_old(config: AlgorithmConfig, batch: NaiveBatch, token: int, gap: float) -> float:
    """Return pi_old / pi_engine of a token, whose pi / pi_engine is `gap`."""
    if not batch.decoupled:
        return 1.0
    lag = batch.step - int(batch.versions[token])
    return gap ** (lag / (lag + 1)) if config.proximal_policy == "interpolated" else gap


def _mismatch(at: dict[str, list[float]]) -> dict[str, float]:
    return {
        "tokens": len(at["error"]),
        "error_mean": naive.mean(at["error"]),
        "error_max": max(at["error"]),
        "token_mult_prob_error": naive.mean([math.exp(error) for error in at["error"]]),
        "ess": _ess(at["gap"]),
    }


def _clipped(config: AlgorithmConfig, ratio: float, advantage: float, cap: float) -> bool:
    """Return whether the recipe's clip bounds a weight, or takes a gradient."""
    low, high = naive.edges(config, cap)
    if config.name == "cispo":
        return not low <= ratio <= high
    return (advantage > 1e-9 and ratio > high) or (advantage < -1e-9 and ratio < low)  # not of rounding alone


def _ess(weights: list[float], counts: list[float] | None = None) -> float:
    """Return (sum w)^2 / (n sum w^2); a weight may count for less than one."""
    pairs = list(zip(weights, counts or [1.0] * len(weights), strict=True))
    total, squares = (sum(count * weight**power for weight, count in pairs) for power in (1, 2))
    return total**2 / (sum(count for _, count in pairs) * squares)
