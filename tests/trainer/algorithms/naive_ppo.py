"""Trains policy and critic by PPO from the papers, a token at a time, over Hugging Face's models.

Nothing of the project is used but the batch and the settings.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.trainer.algorithms.naive import policy_losses
from trainer.batch import Batch
from trainer.config import AlgorithmConfig, OptimizerConfig
from trainer.roles.config import CriticConfig


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, eq. 16: the sum of (gamma lambda)^l delta_(t + l)."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * later - v for r, later, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (late - t) * deltas[late] for late in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


class NaivePpo:
    """Both models, each with its optimizer."""

    def __init__(
        self,
        model_dir: Path,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        critic: CriticConfig,
    ) -> None:
        self.policy = AutoModelForCausalLM.from_pretrained(model_dir)
        self.body = AutoModelForCausalLM.from_pretrained(model_dir).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.algorithm, self.critic = algorithm, critic
        self.clips = optimizer.clip_grad, critic.clip_grad
        self.rates = [
            lambda made: optimizer.lr,
            lambda made: critic.lr * min(1, (made + 1) / max(1, critic.lr_warmup_steps)),
        ]
        decays = optimizer.weight_decay, critic.weight_decay
        self.parameters = [[*self.policy.parameters()], [*self.body.parameters(), *self.head.parameters()]]
        self.optimizers = [
            torch.optim.AdamW(
                [
                    {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
                    {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
                ],
                betas=(optimizer.adam_beta1, optimizer.adam_beta2),
                eps=optimizer.adam_eps,
            )
            for parameters, decay in zip(self.parameters, decays, strict=True)
        ]
        self.made = 0

    def weights(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        of_critic = {f"model.{name}": p for name, p in self.body.named_parameters()}
        of_critic |= {f"score.{name}": p for name, p in self.head.named_parameters()}
        return dict(self.policy.named_parameters()), of_critic

    def step(self, batch: Batch, updates: int = 1) -> dict[str, float]:
        """Make so many updates on the whole batch; returns the means of what they measured."""
        first, end = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
        sampled = [
            [t for t in range(*span) if batch.sampled_mask[t]] for span in zip(first, end, strict=True)
        ]
        trained = [[t for t in tokens if batch.loss_mask[t]] for tokens in sampled]
        values = self._values(batch, sampled)
        old = {t: value.item() for t, value in values.items()}
        advantages: dict[int, float] = {}
        for tokens, reward in zip(sampled, batch.rewards.tolist(), strict=True):
            rewards = [0.0] * (len(tokens) - 1) + [reward]
            found = gae(rewards, [old[t] for t in tokens], self.algorithm.gamma, self.algorithm.gae_lambda)
            advantages |= dict(zip(tokens, found, strict=True))
        returns = {t: advantages[t] + old[t] for t in advantages}
        chosen = [advantages[t] for tokens in trained for t in tokens]
        mean = sum(chosen) / len(chosen)
        deviation = (sum((a - mean) ** 2 for a in chosen) / len(chosen)) ** 0.5
        whitened = {
            t: (advantages[t] - mean) / (deviation + self.algorithm.advantage_eps)
            for tokens in trained
            for t in tokens
        }
        made = [self._update(batch, sampled, trained, whitened, old, returns) for _ in range(updates)]
        return {name: sum(found[name] for found in made) / updates for name in made[0]}

    def _update(
        self,
        batch: Batch,
        sampled: list[list[int]],
        trained: list[list[int]],
        advantages: dict[int, float],
        old: dict[int, float],
        returns: dict[int, float],
    ) -> dict[str, float]:
        total, values = sum(map(len, sampled)), self._values(batch, sampled)
        losses = [torch.zeros(()), torch.zeros(())]
        for sample, tokens in enumerate(trained):
            first, end = batch.offsets[sample : sample + 2].tolist()
            table = self._logprobs(batch, first, end)
            for t in tokens:
                row = table[t - first - 1]
                new, engine = row[batch.tokens[t].long()], batch.behaviour_logprobs[t]
                (loss,) = policy_losses(self.algorithm, [new], [engine], [advantages[t]])
                entropy = -(row.exp() * row).sum()
                losses[0] = losses[0] + (loss - self.algorithm.entropy_coef * entropy) / total
                losses[1] = losses[1] + self._value_loss(values[t], old[t], returns[t]) / total
        norms = [self._step(which, loss) for which, loss in enumerate(losses)]
        self.made += 1
        found = {t: values[t].item() for tokens in trained for t in tokens}
        wanted = [returns[t] for t in found]
        return {
            "loss": losses[0].item(),
            "grad_norm": norms[0],
            "value_loss": losses[1].item(),
            "critic_grad_norm": norms[1],
            "value_mean": sum(found.values()) / len(found),
            "return_mean": sum(wanted) / len(wanted),
            "explained_variance": 1 - variance([returns[t] - found[t] for t in found]) / variance(wanted),
        }

    def _values(self, batch: Batch, sampled: list[list[int]]) -> dict[int, torch.Tensor]:
        values = {}
        for tokens, first, end in zip(sampled, batch.offsets[:-1], batch.offsets[1:], strict=True):
            hidden = self.body(batch.tokens[first:end].long()[None]).last_hidden_state[0]
            values |= {t: self.head(hidden[t - int(first) - 1])[0] for t in tokens}
        return values

    def _logprobs(self, batch: Batch, first: int, end: int) -> torch.Tensor:
        logits = self.policy(batch.tokens[first:end].long()[None]).logits[0]
        return torch.log_softmax(logits / batch.temperature, -1)

    def _value_loss(self, value: torch.Tensor, old: float, wanted: float) -> torch.Tensor:
        clip = self.critic.value_clip or float("inf")
        clipped = min(max(value, torch.tensor(old - clip)), torch.tensor(old + clip))
        return 0.5 * max((value - wanted) ** 2, (clipped - wanted) ** 2)

    def _step(self, which: int, loss: torch.Tensor) -> float:
        parameters, optimizer = self.parameters[which], self.optimizers[which]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt().item()
        for parameter in parameters:
            parameter.grad *= min(1.0, self.clips[which] / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = self.rates[which](self.made)
        optimizer.step()
        return norm


def variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)
