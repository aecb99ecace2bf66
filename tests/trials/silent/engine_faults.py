"""Defines faults of an engine: its weights, its cache, its sampling."""

import dataclasses
from typing import Any

import torch

from protocol.weights.lora import LoraConfig
from rollout.engines.base import Completion, Request
from services.settings.sections import ModelConfig
from tests.trials.silent.faults import fault
from tests.trials.silent.world import SCRATCH, World

EXPERTS = ModelConfig(
    scratch=dataclasses.replace(
        SCRATCH, architecture="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
)
ADAPTERS = LoraConfig(rank=4)
BROKEN = 1
"""Index of the engine that has the fault; the other one has none."""


def model_of(world: World) -> Any:
    """Return the broken engine's model of transformers."""
    return world.engines[BROKEN]._model.decoder._model


def after_commits(world: World, change: Any) -> None:
    """Call `change` on the broken engine's model after each commit."""
    engine = world.engines[BROKEN]
    commit = engine.commit

    async def committed(manifest: Any) -> float:
        pause_ms = await commit(manifest)
        await engine._between_steps(lambda: change(model_of(world)))
        return pause_ms

    engine.commit = committed


def never_apply(world: World) -> None:
    """Have the broken engine serve new versions by name only."""
    engine: Any = world.engines[BROKEN]

    async def named(manifest: Any) -> float:
        await engine.adopt(manifest.epoch, manifest.version)
        return 0.0

    engine.commit = named


@fault("one stale block of KV", "logprob", only_hf=True, engine="engine.1")
def stale_kv(world: World) -> None:
    """Leave the first positions of one sample's KV in each group as another sequence has them."""
    decoder = world.engines[BROKEN]._model.decoder
    prefill = decoder._prefill

    def stale(rows: Any) -> Any:
        logits = prefill(rows)
        if len(rows) > 1:
            rows[0].kv[0][1][:, :2] = rows[0].kv[0][1][:, :2].flip(1)
        return logits

    decoder._prefill = stale


@fault("one tensor of an old version", "logprob", only_hf=True, engine="engine.1")
def old_tensor(world: World) -> None:
    kept = model_of(world).model.layers[1].mlp.down_proj.weight.detach().clone()
    after_commits(world, lambda model: model.model.layers[1].mlp.down_proj.weight.data.copy_(kept))


@fault("RoPE scaled on one engine", "logprob", only_hf=True, engine="engine.1")
def rope(world: World) -> None:
    model_of(world).model.rotary_emb.inv_freq.mul_(1.02)


@fault("weights of a version never applied", "logprob", engine="engine.1")
def not_applied(world: World) -> None:
    never_apply(world)


@fault("scale of one quantised tensor", "logprob", only_hf=True, engine="engine.1")
def scale(world: World) -> None:
    """Multiply a tensor as a wrong FP8 scale would."""
    after_commits(world, lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(1.06))


@fault("temperature not applied by the sampler", "sampling", only_hf=True, engine="engine.1")
def temperature(world: World) -> None:
    """Sample at another temperature, and report log-probabilities of the right one."""
    decoder = world.engines[BROKEN]._model.decoder
    step, right = decoder.step, dict[int, torch.Tensor]()

    def sharpened(forward: Any) -> Any:
        def run(rows: Any) -> Any:
            logits = forward(rows)
            right.update({id(row): row_logits for row, row_logits in zip(rows, logits, strict=True)})
            return logits * 1.7

        return run

    def report(rows: Any, version: int) -> None:
        step(rows, version)
        for row in rows:
            row.logprobs[-1] = float(right[id(row)].float().log_softmax(-1)[row.tokens[-1]])

    decoder._prefill, decoder._decode = sharpened(decoder._prefill), sharpened(decoder._decode)
    decoder.step = report


@fault("log-probabilities at another temperature", "logprob", only_hf=True, engine="engine.1")
def reported(world: World) -> None:
    """Sample at the right temperature, and report log-probabilities of another one."""
    decoder = world.engines[BROKEN]._model.decoder
    step, right = decoder.step, dict[int, torch.Tensor]()

    def kept(forward: Any) -> Any:
        def run(rows: Any) -> Any:
            logits = forward(rows)
            right.update({id(row): row_logits for row, row_logits in zip(rows, logits, strict=True)})
            return logits

        return run

    def report(rows: Any, version: int) -> None:
        step(rows, version)
        for row in rows:
            row.logprobs[-1] = float((right[id(row)].float() / 1.1).log_softmax(-1)[row.tokens[-1]])

    decoder._prefill, decoder._decode = kept(decoder._prefill), kept(decoder._decode)
    decoder.step = report


@fault("one seed for all samples", "copy", engine="engine.1")
def seed(world: World) -> None:
    engine = world.engines[BROKEN]
    generate = engine.generate

    async def seeded(request: Request) -> Completion:
        sampling = dataclasses.replace(request.sampling, seed=7)
        return await generate(dataclasses.replace(request, sampling=sampling))

    engine.generate = seeded


@fault(
    "two experts of a router swapped", "logprob", sections={"model": EXPERTS}, only_hf=True, engine="engine.1"
)
def router(world: World) -> None:
    def swap(model: Any) -> None:
        gate = model.model.layers[0].mlp.gate.weight.data
        gate[[0, 1]] = gate[[1, 0]]

    after_commits(world, swap)


@fault("adapter not applied", "logprob", sections={"lora": ADAPTERS}, engine="engine.1")
def adapter(world: World) -> None:
    never_apply(world)
