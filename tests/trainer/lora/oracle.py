"""Trains adapters by hand: merges the weights anew for each step and differentiates through the merge."""

from functools import partial

import torch
from torch.func import functional_call

from protocol.weights.lora import AdapterTarget, LoraConfig, adapter_targets
from tests.trainer.megatron.models import OPTIMIZER, make_batch, make_model, plain_logprobs, plain_loss
from trainer.algorithms.grpo import Grpo
from trainer.config import AlgorithmConfig
from trainer.lora import initial_adapter

LORA = LoraConfig(rank=4, alpha=6.0)
ALGORITHM = Grpo(AlgorithmConfig(entropy_coef=0.02))
STEPS = 3


def targets_of(name: str, lora: LoraConfig | None = None) -> list[AdapterTarget]:
    shapes = {key: tuple(parameter.shape) for key, parameter in make_model(name).named_parameters()}
    return adapter_targets(shapes, lora or LORA)


def trained_by_hand(name: str, lora: LoraConfig | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of each step and the adapter after the last."""
    lora = lora or LORA
    model = make_model(name).requires_grad_(False)
    weights = dict(model.named_parameters())
    targets = targets_of(name, lora)
    adapter = {
        key: t.requires_grad_(True)
        for target in targets
        for key, t in initial_adapter(target, lora.rank, 0).items()
    }
    betas = (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2)
    decay = OPTIMIZER.weight_decay
    optimizer = torch.optim.AdamW(
        adapter.values(), lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.adam_eps, weight_decay=decay
    )
    losses = []
    for step in range(STEPS):
        batch = make_batch(name, step)
        merged = {t.weight: weights[t.weight] + lora.scaling * adapter[t.b] @ adapter[t.a] for t in targets}
        logprobs, entropy = plain_logprobs(partial(functional_call, model, merged), batch)
        loss = plain_loss(ALGORITHM, batch, logprobs, entropy)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.values(), OPTIMIZER.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.lr_warmup_steps)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: tensor.detach() for key, tensor in adapter.items()}
