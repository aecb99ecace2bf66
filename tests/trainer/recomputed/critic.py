"""Trains a critic by plain loops over a Hugging Face model, in float64."""

from pathlib import Path
from typing import Any

import torch

from tests.trainer.algorithms import naive
from tests.trainer.recomputed.models import NaiveAdam, load
from tests.trainer.recomputed.records import NaiveBatch
from trainer.config import OptimizerConfig
from trainer.roles.config import CriticConfig


class NaiveCritic:
    """The policy's initial model with a head that begins as zero in the place of its last layer."""

    def __init__(self, model_dir: Path, config: CriticConfig, optimizer: OptimizerConfig) -> None:
        self.config = config
        self.body = load(model_dir).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1).double()
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.adam = NaiveAdam([*self.body.parameters(), *self.head.parameters()], config.optimizer(optimizer))

    def values(self, batch: NaiveBatch) -> dict[int, torch.Tensor]:
        """Return the value of the state in which each sampled token was sampled."""
        values = {}
        for tokens, first, end in zip(batch.sampled, batch.offsets, batch.offsets[1:], strict=False):
            hidden = self.body(torch.tensor(batch.tokens[first:end])[None]).last_hidden_state[0]
            values |= {token: self.head(hidden[token - first - 1])[0] for token in tokens}
        return values

    def update(self, batch: NaiveBatch, old: dict[int, float], returns: dict[int, float]) -> dict[str, Any]:
        """Make an update on the trained tokens and return what it should report."""
        values, clip = self.values(batch), self.config.value_clip
        trained = [token for tokens in batch.trained for token in tokens]
        total = torch.zeros((), dtype=torch.float64)
        clipped = []
        for token in trained:
            inside = values[token].clamp(old[token] - clip, old[token] + clip)
            plain, bounded = ((value - returns[token]) ** 2 / 2 for value in (values[token], inside))
            total = total + torch.maximum(plain, bounded)
            clipped.append(float(bounded > plain))
        loss = total / sum(map(len, batch.sampled))
        now, wanted = [values[token].item() for token in trained], [returns[token] for token in trained]
        errors = [goal - value for goal, value in zip(wanted, now, strict=True)]
        return {
            "value_loss": loss.item(),
            "critic_grad_norm": self.adam.step(loss),
            "value_mean": naive.mean(now),
            "return_mean": naive.mean(wanted),
            "explained_variance": 1 - naive.deviation(errors) ** 2 / naive.deviation(wanted) ** 2,
            "value_clip_fraction": naive.mean(clipped),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        both = {"model": self.body, "score": self.head}
        return {
            f"critic.{part}.{name}": parameter.detach()
            for part, module in both.items()
            for name, parameter in module.named_parameters()
        }
