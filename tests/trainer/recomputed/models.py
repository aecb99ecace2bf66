"""Loads Hugging Face's models in float64, and steps them by torch's AdamW."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trainer.config import OptimizerConfig


def load(model_dir: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.double().eval()


def load_classifier(model_dir: Path) -> Any:
    model = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    return model.double().eval()


class NaiveAdam:
    """torch's AdamW after a linear warm-up; vectors don't decay."""

    def __init__(self, parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters, self.config, self.made = parameters, config, 0
        matrices = [p for p in parameters if p.ndim > 1]
        vectors = [p for p in parameters if p.ndim <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
        )

    def step(self, loss: torch.Tensor, scale: float = 1.0) -> float:
        """Make an update, its learning rate times `scale`; returns the norm of the gradient."""
        self.adam.zero_grad()
        if loss.requires_grad:
            loss.backward()
        for parameter in self.parameters:
            if parameter.grad is None:  # no token's loss depends on it
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_grad)
        self.made += 1
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * min(1.0, self.made / max(1, self.config.lr_warmup_steps)) * scale
        self.adam.step()
        return norm.item()
