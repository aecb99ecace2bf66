"""Trains Hugging Face's models in plain torch."""

from typing import Any

import torch

from tests.trainer.measured import expected
from tests.trainer.megatron.models import (
    BALANCE,
    OPTIMIZER,
    make_model,
    plain_logprobs,
    plain_loss,
    tensors_of,
)
from trainer.algorithms.base import Algorithm
from trainer.batch import Batch


class PlainTrainer:
    """Hugging Face model and torch's AdamW, one pass over the whole batch: what every layout must agree
    with."""

    def __init__(self, name: str, algorithm: Algorithm) -> None:
        self.model = make_model(name)
        self.algorithm = algorithm
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": OPTIMIZER.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        betas = (OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=betas, eps=OPTIMIZER.adam_eps)
        self.steps = 0
        self.chosen: dict[Any, list[torch.Tensor]] = {}
        """Router -> experts of every token but the last of each sample, which is no input."""
        self.extra: list[torch.Tensor] = []
        """Losses of routers, of each sample."""
        self.balance = BALANCE.get(name)
        for name, module in self.model.named_modules():
            if name.endswith((".gate", ".mlp.router")):
                module.register_forward_hook(self._count)

    def _count(self, router: torch.nn.Module, inputs: Any, output: Any) -> None:
        logits, chosen = output[0][:-1].float(), output[2][:-1]
        self.chosen.setdefault(router, []).append(chosen.flatten())
        if self.balance is not None:
            shares = chosen.flatten().bincount(minlength=router.num_experts) / chosen.numel()
            even = router.num_experts * (shares * logits.softmax(-1).mean(0)).sum()
            self.extra.append(self.balance["moe_aux_loss_coeff"] * even)
            self.extra.append(self.balance["moe_z_loss_coeff"] * logits.logsumexp(-1).square().mean())

    def loads(self) -> dict[str, float]:
        """How the tokens of the passes were spread over experts."""
        counts = [
            torch.cat(found).bincount(minlength=gate.num_experts) for gate, found in self.chosen.items()
        ]
        self.chosen.clear()
        shares = [(count / count.double().mean()).tolist() for count in counts]
        if not shares:
            return {}
        return {"expert_load_max": max(map(max, shares)), "expert_load_min": min(map(min, shares))}

    def step(self, batch: Batch) -> dict[str, float]:
        logprobs, entropy = plain_logprobs(self.model, batch)
        loss = plain_loss(self.algorithm, batch, logprobs, entropy)
        self.optimizer.zero_grad()
        (loss + self._spread(batch)).backward()
        self.extra.clear()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_grad)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIMIZER.lr * min(1.0, self.steps / OPTIMIZER.lr_warmup_steps)
        self.optimizer.step()
        return {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            **expected(batch, logprobs, entropy, clip=self.algorithm.config.clip_low),
            **self.loads(),
        }

    def _spread(self, batch: Batch) -> torch.Tensor | int:
        """The mean over samples of what their tokens' routers lost, in the order of rows."""
        rows = range(len(batch.lengths)) if batch.rows is None else batch.rows.tolist()
        tokens = [length - 1 for length in batch.lengths.tolist()]
        losses = len(self.extra) // len(tokens)
        total: torch.Tensor | int = 0
        for place, (row, own) in enumerate(zip(rows, tokens, strict=True)):
            of_sample = sum(n for n, other in zip(tokens, rows, strict=True) if other == row)
            mean = sum(self.extra[place * losses : (place + 1) * losses])
            total = total + mean * own / of_sample / len(set(rows))
        return total

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in tensors_of(self.model).items()}
