"""Writes a table of families and engines: log-probabilities at the start and after a commit.

`python -m tests.benchmarks.families --engines vllm sglang hf --out FILE` takes a tiny random model of each
family, starts each engine on it, generates, publishes other weights, commits them, and generates again. A
cell has the largest difference of a token's log-probability from transformers', before and after, or the
reason why there is none. It computes in float32 on a CPU and in bfloat16 on a GPU; `[engine.arguments]` for
all engines come as JSON (`--arguments '{"quantization": "fp8"}'`).
"""

import argparse
import asyncio
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from protocol.errors import TetherError
from rollout.engines.base import Engine, EngineConfig
from rollout.engines.contract.bench import ask, together
from rollout.engines.contract.models import logits_of, write_shm
from rollout.engines.registry import make_engine
from tests.contracts.sglang_environment import sglang_settings
from tests.trainer.megatron.models import ALL_MODELS, YARN_ROPE, make_model, tensors_of

SIZES: dict[str, object] = {"hidden_size": 128, "head_dim": 32}
"""Sizes that kernels have."""
LATENT = {"head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
CHANGES: dict[str, dict[str, object]] = {
    "DeepseekV2": {**LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "DeepseekV3": {**LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "GptOss": {
        "swiglu_limit": 7.0,
        "rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
}
"""Family -> further fields that engines want."""
PROMPTS = ((5, 17, 20, 33, 9, 41), (7, 17, 20, 33))
TOKENS = 16
PLACES = 128
"""Positions that the models have."""


def families() -> dict[str, str]:
    """Return family -> the first of the trainer's test models that is one."""
    found: dict[str, str] = {}
    for name, (family, _) in ALL_MODELS.items():
        found.setdefault(family, name)
    return found


def changed(model: PreTrainedModel, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Return a model with other weights, rounded to `dtype`."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
            parameter.copy_(parameter.to(dtype))
    return other


async def difference(engine: Engine, name: str, model: PreTrainedModel) -> float:
    """Return the largest difference of log-probabilities from the model's."""
    found = await together(engine, [ask(f"{name}{i}", p, TOKENS) for i, p in enumerate(PROMPTS)])
    worst = 0.0
    for prompt, one in zip(PROMPTS, found, strict=True):
        rows = logits_of(model, prompt, one.tokens).log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(one.tokens)[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(one.logprobs) - expected).abs().max()))
    return worst


async def cell(name: str, family: str, config: EngineConfig) -> str:
    """Return the cells of a model for an engine."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    first, second = (
        changed(make_model(name, **{**SIZES, **CHANGES.get(family, {})}), dtype, seed) for seed in (1, 2)
    )
    with tempfile.TemporaryDirectory() as directory:
        copy.deepcopy(first).to(dtype).save_pretrained(Path(directory, "model"))
        engine = make_engine(config, Path(directory, "model"), f"{config.name}.families")
        try:
            await engine.start()
            before = await difference(engine, "before", first)
            tensors = {key: tensor.detach().to(dtype) for key, tensor in tensors_of(second).items()}
            manifest = write_shm(Path(directory, "v1"), tensors, 1)
            await engine.stage(manifest)
            await engine.commit(manifest)
            return f"{before:.1g}, {await difference(engine, 'after', second):.1g}"
        except TetherError as error:
            return str(error).replace("|", "/").replace("\n", " ")[:200]
        finally:
            await engine.close()


def config_of(engine: str, arguments: dict[str, Any]) -> EngineConfig:
    """Return the settings of an engine."""
    return EngineConfig(
        name=engine,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_model_len=PLACES,
        memory_fraction=0.1,
        enforce_eager=True,
        arguments=arguments if engine in ("vllm", "sglang") else {},
        **(sglang_settings() if engine == "sglang" else {}),
    )


def main(words: Sequence[str] | None = None) -> None:
    """Write the table as rows come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--families", nargs="*", default=list(families()))
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    with args.out.open("w") as file:
        for row in (["family", *args.engines], ["---"] * (1 + len(args.engines))):
            print(f"| {' | '.join(row)} |", file=file)
        for family in args.families:
            row = [family]
            for engine in args.engines:
                row.append(asyncio.run(cell(families()[family], family, config_of(engine, args.arguments))))
            print(f"| {' | '.join(row)} |", file=file, flush=True)


if __name__ == "__main__":
    main()
