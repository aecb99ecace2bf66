"""Trains from the records of scored groups by plain Python loops over a Hugging Face model, in float64.

Of the trainer only the settings are used: reading records, masking, the passes, the loss, the optimizer and
what a step reports are written again here, a sample and a token at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from protocol.messages import ScoredRollout
from tests.trainer.algorithms import naive
from trainer.config import AlgorithmConfig, OptimizerConfig

Groups = Sequence[tuple[ScoredRollout, int]]
"""Scored groups, each with the bound of its lease."""


@dataclass
class NaiveBatch:
    """All tokens of a step, one sample after the other: what `naive.step_loss` reads of a batch."""

    step: int
    decoupled: bool
    tokens: list[int]
    offsets: list[int]
    """Where each sample begins, and the end."""
    lengths: torch.Tensor
    sampled_mask: torch.Tensor
    loss_mask: torch.Tensor
    versions: torch.Tensor
    behaviour_logprobs: torch.Tensor
    rewards: torch.Tensor
    group_index: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    start_logprobs: torch.Tensor | None = None
    """None: those that the loss is computed from."""

    @property
    def trained(self) -> list[list[int]]:
        """The trained tokens of each sample."""
        return [
            [token for token in range(first, end) if self.loss_mask[token]]
            for first, end in zip(self.offsets, self.offsets[1:], strict=False)
        ]


def read(groups: Groups, step: int, *, decoupled: bool) -> NaiveBatch:
    """Return the batch of a step that starts from version `step`."""
    tokens: list[int] = []
    sampled: list[bool] = []
    trained: list[bool] = []
    versions: list[int] = []
    behaviour: list[float] = []
    offsets, rewards, group_index = [0], [], []
    for index, (scored, bound) in enumerate(groups):
        rollout = scored.rollout
        prompt = rollout.prompt_tokens.numpy().tolist()
        all_tokens, all_masks = rollout.tokens.numpy().tolist(), rollout.loss_mask.numpy().tolist()
        all_logprobs, spans = rollout.logprobs.numpy().tolist(), rollout.spans.numpy().tolist()
        first = 0
        for sample, length in enumerate(rollout.lengths.numpy().tolist()):
            tokens += prompt
            sampled += [False] * len(prompt)
            trained += [False] * len(prompt)
            versions += [-1] * len(prompt)
            behaviour += [0.0] * len(prompt)
            for place in range(length):
                version = next(v for row, end, v in spans if row == sample and place < end)
                is_sampled = all_masks[first + place] == 1
                tokens.append(all_tokens[first + place])
                sampled.append(is_sampled)
                trained.append(is_sampled and step - version <= bound)
                versions.append(version)
                behaviour.append(all_logprobs[first + place])
            first += length
            offsets.append(len(tokens))
            rewards.append(scored.rewards.numpy().tolist()[sample])
            group_index.append(index)
    return NaiveBatch(
        step=step,
        decoupled=decoupled,
        tokens=tokens,
        offsets=offsets,
        lengths=torch.tensor(offsets).diff(),
        sampled_mask=torch.tensor(sampled),
        loss_mask=torch.tensor(trained),
        versions=torch.tensor(versions),
        behaviour_logprobs=torch.tensor(behaviour, dtype=torch.float64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_index=torch.tensor(group_index),
    )


class NaiveTrainer:
    """A Hugging Face model in float64 and torch's AdamW."""

    def __init__(
        self, model_dir: Path, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, temperature: float
    ) -> None:
        self.algorithm, self.config, self.temperature = algorithm, optimizer, temperature
        self.model, self.initial = (_load(model_dir) for _ in range(2))
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optimizer.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(optimizer.adam_beta1, optimizer.adam_beta2),
            eps=optimizer.adam_eps,
        )
        self.made = 0

    def step(self, groups: Groups, version: int, *, decoupled: bool) -> dict[str, Any]:
        """Make a step and return what it should report; without a trained token nothing changes."""
        batch = read(groups, version, decoupled=decoupled)
        if not batch.loss_mask.any():
            return {"trained_tokens": 0}
        if self.algorithm.kl_coef:
            with torch.no_grad():
                batch.reference_logprobs = self.forward(self.initial, batch)[0]
        logprobs, entropy = self.forward(self.model, batch)
        trust = None
        if self.algorithm.second_moment_threshold:
            batch.start_logprobs = logprobs.detach()
            trust = naive.trusted(batch, self.algorithm.second_moment_threshold)  # type: ignore[arg-type]
        loss = naive.step_loss(self.algorithm, batch, logprobs, entropy, None, trust)  # type: ignore[arg-type]
        found = measured(self.algorithm, batch, logprobs.tolist(), entropy.tolist(), trust)
        self.adam.zero_grad()
        if loss.requires_grad:
            loss.backward()
        for parameter in self.model.parameters():
            if parameter.grad is None:  # no token's loss depends on it
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.made += 1
        for group in self.adam.param_groups:
            rate = self.config.lr * min(1.0, self.made / max(1, self.config.lr_warmup_steps))
            group["lr"] = rate * found.get("lr_scale", 1.0)
        self.adam.step()
        return {**found, "loss": loss.item(), "grad_norm": norm.item()}

    def forward(self, model: torch.nn.Module, batch: NaiveBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability and entropy of every token, a sample at a time; 0 for its first one."""
        logprobs, entropy = [], []
        for first, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            tokens = torch.tensor(batch.tokens[first:end])
            logits = model(input_ids=tokens[None]).logits[0, :-1] / self.temperature
            log_p = logits.log_softmax(-1)
            zero = log_p.new_zeros(1)
            logprobs.append(torch.cat([zero, log_p[torch.arange(len(tokens) - 1), tokens[1:]]]))
            entropy.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
        return torch.cat(logprobs), torch.cat(entropy)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def _load(model_dir: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.double().eval()


def measured(
    config: AlgorithmConfig,
    batch: NaiveBatch,
    logprobs: list[float],
    entropy: list[float],
    trust: set[int] | None,
) -> dict[str, float]:
    """Return what a step reports of its tokens, but for loss and gradient; names are those of the report."""
    engine = batch.behaviour_logprobs.tolist()
    scores = naive.advantages(config, batch.rewards.tolist(), batch.group_index.tolist())
    rows: dict[str, list[float]] = {}
    by_lag: dict[int, dict[str, list[float]]] = {}
    samples: list[float] = []

    def note(name: str, value: float, into: dict[str, list[float]] = rows) -> None:
        into.setdefault(name, []).append(float(value))

    for sample, tokens in enumerate(batch.trained):
        if not tokens:
            continue
        gaps = [math.exp(logprobs[token] - engine[token]) for token in tokens]
        old = [_weight_of_old(config, batch, token, gap) for token, gap in zip(tokens, gaps, strict=True)]
        ratios = [gap / before for gap, before in zip(gaps, old, strict=True)]
        if config.name == "gspo":
            ratios = naive.at_level(ratios, "geometric")
        weights = naive.at_level(old, config.importance_level)
        kept = naive.at_level(gaps, config.rejection_level or "token")
        samples.append(math.prod(gaps))
        for place, token in enumerate(tokens):
            gap = gaps[place]
            note("entropy", entropy[token])
            note("ratio_mean", ratios[place])
            note("clip_fraction", _clipped(config, ratios[place], scores[sample]))
            note("behaviour_clip_fraction", _outside(config, gap, scores[sample]))
            note("behaviour_kl_k3", gap - 1 - math.log(gap))
            note("importance_mean", gap)
            if batch.decoupled and config.importance_cap:
                note("importance_capped", weights[place] > config.importance_cap)
            if trust is not None:
                note("importance_rejected", token not in trust)
            elif config.rejection_level:
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
        found["lr_scale"] = _ess(samples) ** (0.5 if config.ess_scaling == "sqrt" else 1.0)
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


def _outside(config: AlgorithmConfig, ratio: float, advantage: float) -> bool:
    """Return whether PPO's clip takes the gradient."""
    up, down = ratio > 1 + config.clip_high, ratio < 1 - config.clip_low
    return (advantage > 1e-9 and up) or (advantage < -1e-9 and down)  # not of rounding alone


def _clipped(config: AlgorithmConfig, ratio: float, advantage: float) -> bool:
    if config.name == "cispo":
        return not 1 - config.clip_low <= ratio <= 1 + config.clip_high
    return config.name != "m2po" and _outside(config, ratio, advantage)


def _ess(weights: list[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))
