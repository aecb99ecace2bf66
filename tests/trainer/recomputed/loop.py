"""Trains from the records of scored groups by plain Python loops over a Hugging Face model, in float64.

Of the trainer only the settings are used: reading records, masking, the passes of all models, advantages, the
losses, the optimizers and what a step reports are written again here, a sample and a token at a time.
"""

import math
from pathlib import Path
from typing import Any

import torch

from tests.trainer.algorithms import naive
from tests.trainer.recomputed import roles
from tests.trainer.recomputed.critic import NaiveCritic
from tests.trainer.recomputed.measures import measured
from tests.trainer.recomputed.models import NaiveAdam, load, load_classifier
from tests.trainer.recomputed.records import Groups, NaiveBatch, read
from trainer.config import AlgorithmConfig, OptimizerConfig
from trainer.roles.config import CriticConfig

OF_ALL_UPDATES = {
    "loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "reference_kl_k3", "value_loss",
    "critic_grad_norm", "value_mean", "return_mean", "explained_variance", "value_clip_fraction",
}  # fmt: skip
"""What is reported as a mean over all updates of a step; the rest is of its first one."""


class NaiveTrainer:
    """The policy and, where the recipe has them, the models beside it."""

    def __init__(
        self,
        model_dir: Path,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        temperature: float,
        *,
        reference: Path | None = None,
        teacher: Path | None = None,
        critic: CriticConfig | None = None,
        reward_model: tuple[Path, float] | None = None,
    ) -> None:
        """Load the models; without a path the reference model is the initial policy."""
        self.algorithm, self.temperature = algorithm, temperature
        self.model, self.initial = load(model_dir), load(reference or model_dir)
        self.teacher = load(teacher) if teacher else None
        self.critic = NaiveCritic(model_dir, critic, optimizer) if critic else None
        self.reward_model = load_classifier(reward_model[0]) if reward_model else None
        self.reward_weight = reward_model[1] if reward_model else 0.0
        self.adam = NaiveAdam(list(self.model.parameters()), optimizer)

    def step(self, groups: Groups, version: int, *, decoupled: bool, epochs: int) -> dict[str, Any]:
        """Make a step of so many updates on the whole batch and return what it should report.

        Without a trained token nothing changes.
        """
        config = self.algorithm
        batch = read(groups, version, config, decoupled=decoupled)
        with torch.no_grad():
            if config.kl_coef:
                batch.reference_logprobs = self.forward(self.initial, batch)[0]
            teacher = self.forward(self.teacher, batch)[0].tolist() if self.teacher else None
            found = self._score(batch) if self.reward_model else {}
            old = {t: v.item() for t, v in self.critic.values(batch).items()} if self.critic else {}
        returns: dict[int, float] = {}
        if self.critic:
            scores, returns, of_roles = roles.with_a_critic(config, batch, old)
        else:
            scores, of_roles = roles.with_a_teacher(config, batch, teacher)
        found |= of_roles | batch.measured
        if not batch.loss_mask.any():
            return {"trained_tokens": 0, **found}
        made = []
        for _ in range(epochs):
            made.append(self._update(batch, scores))
            if self.critic:
                made[-1] |= self.critic.update(batch, old, returns)
        of_all = {name: naive.mean([update[name] for update in made]) for name in made[0]}
        at_start = {name: made[0][name] for name in made[0] if name not in OF_ALL_UPDATES}
        return {**found, **of_all, **at_start}

    def _score(self, batch: NaiveBatch) -> dict[str, float]:
        """Add the mean score of a sample's rows to its reward; return what is reported of it."""
        ends = zip(batch.offsets, batch.offsets[1:], strict=False)
        rows = [
            self.reward_model(torch.tensor([batch.tokens[first:end]])).logits.item() for first, end in ends
        ]
        owners = batch.rows.tolist()
        scores = {
            sample: naive.mean([score for owner, score in zip(owners, rows, strict=True) if owner == sample])
            for sample in set(owners)
        }
        batch.rewards = batch.rewards + self.reward_weight * torch.tensor([scores[o] for o in owners])
        return {"reward_model_mean": naive.mean(list(scores.values()))}

    def _update(self, batch: NaiveBatch, scores: dict[int, float]) -> dict[str, Any]:
        config = self.algorithm
        logprobs, entropy = self.forward(self.model, batch)
        if batch.start_logprobs is None:
            batch.start_logprobs = logprobs.detach()
        cap = math.inf
        if config.second_moment_threshold:
            cap = naive.clip_of(config, batch, logprobs.tolist(), scores)  # type: ignore[arg-type]
        loss = naive.step_loss(config, batch, logprobs, entropy, cap=cap, of_tokens=scores)  # type: ignore[arg-type]
        found = measured(config, batch, logprobs.tolist(), entropy.tolist(), scores, cap)
        norm = self.adam.step(loss, found.get("lr_scale", 1.0))
        return {**found, "loss": loss.item(), "grad_norm": norm}

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
        found = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return found | (self.critic.weights() if self.critic else {})
