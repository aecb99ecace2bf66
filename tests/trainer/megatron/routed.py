"""Makes batches with recorded experts, and computes what routers give that choose them."""

import dataclasses
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.trainer.megatron.models import ALL_MODELS, BASE, make_batch, make_model, plain_logprobs
from trainer.batch import Batch


def routed_batch(name: str) -> Batch:
    """With recorded experts: random ones, of which some tokens have none."""
    batch, numbers = make_batch(name, 0), ALL_MODELS[name][1]
    generator = torch.Generator().manual_seed(5)
    layers = int({**BASE, **numbers}["num_hidden_layers"]) - len(numbers.get("mlp_only_layers", ()))
    scores = torch.rand(len(batch.tokens), layers, int(numbers["num_experts"]), generator=generator)
    experts = scores.topk(int(numbers["num_experts_per_tok"])).indices.short()
    experts[torch.rand(len(experts), generator=generator) < 0.3] = -1
    return dataclasses.replace(batch, experts=experts)


def forced_logprobs(name: str, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, PreTrainedModel]:
    """[t] log-probabilities and entropies of transformers' own model whose routers choose as recorded."""
    model, first = make_model(name), 0
    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]

    def force(layer: int, router: Any, output: Any) -> Any:
        logits, _, chosen = output
        given = batch.experts[first : first + len(chosen), layer].long()
        chosen = torch.where(given >= 0, given, chosen)
        weights = torch.softmax(logits.float(), -1).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    for layer, router in enumerate(routers):
        router.register_forward_hook(lambda module, _, output, layer=layer: force(layer, module, output))
    found = []
    for sample in range(len(batch.lengths)):
        one = batch.select(torch.tensor([sample]))
        found.append(plain_logprobs(model, one))
        first += len(one.tokens)
    logprobs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logprobs, entropies, model
