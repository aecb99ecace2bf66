"""Writes a table of families and engines: log-probabilities at the start and after a commit.

`python -m tests.benchmarks.families --engines vllm sglang --out results/families.md` takes a tiny random
model of each family, starts each engine on it, generates, publishes other weights, commits them, and
generates again. A cell has the largest difference of a token's log-probability from transformers', before
and after, or the reason why there is none. It computes in float32 on a CPU and in bfloat16 on a GPU. Cells
that are not asked for (`--families`) stay as they are in the file, so that it may be made in pieces.
`[engine.arguments]` for all engines come as JSON (`--arguments '{"quantization": "fp8"}'`).
"""

import argparse
import asyncio
import copy
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from protocol.errors import TetherError
from rollout.engines.base import Engine, EngineConfig
from rollout.engines.contract.bench import ask, together
from rollout.engines.contract.models import logits_of, write_shm
from rollout.engines.registry import make_engine
from tests.contracts.engine_models import YARN
from tests.contracts.sglang_environment import sglang_settings
from tests.trainer.megatron.models import ALL_MODELS, YARN_ROPE, make_model, tensors_of

SIZES: dict[str, object] = {"hidden_size": 128, "head_dim": 32}
"""Sizes that kernels have."""
LATENT = {
    "head_dim": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}
CHANGES: dict[str, dict[str, object]] = {
    "DeepseekV2": {**LATENT, "rope_parameters": YARN},
    "DeepseekV3": {**LATENT},
    "Gemma2": {"hidden_act": "gelu_pytorch_tanh"},
    "Qwen3Moe": {"mlp_only_layers": [], "decoder_sparse_step": 1},
    "GptOss": {
        "swiglu_limit": 7.0,
        "rope_parameters": {**YARN_ROPE, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
}
"""Family -> further fields that engines want, as published configurations have them."""
PROMPTS = ((5, 17, 20, 33, 9, 41), (7, 17, 20, 33))
TOKENS = 16
EQUAL = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest difference of log-probabilities that rounding makes."""
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


async def cell(name: str, family: str, config: EngineConfig, limit_s: float) -> str:
    """Return the cell of a model for an engine."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    first, second = (
        changed(make_model(name, **{**SIZES, **CHANGES.get(family, {})}), dtype, seed) for seed in (1, 2)
    )
    with tempfile.TemporaryDirectory() as directory:
        copy.deepcopy(first).to(dtype).save_pretrained(Path(directory, "model"))
        engine = make_engine(config, Path(directory, "model"), f"{config.name}.families")
        try:
            async with asyncio.timeout(limit_s):
                await engine.start()
                before = await difference(engine, "before", first)
                tensors = {key: tensor.detach().to(dtype) for key, tensor in tensors_of(second).items()}
                manifest = write_shm(Path(directory, "v1"), tensors, 1)
                await engine.stage(manifest)
                await engine.commit(manifest)
                after = await difference(engine, "after", second)
        except TimeoutError:
            return f"not within {limit_s:g} s"
        except TetherError as error:
            return reason(str(error).replace(f"{directory}/", ""))
        finally:
            await engine.close()
    is_equal = max(before, after) < EQUAL[config.dtype]
    return f"{'' if is_equal else '**differs**: '}{before:.1g}, {after:.1g}"


def reason(text: str) -> str:
    """Return an error as a cell: of a log, whose lines are parted by slashes, the last exception."""
    lines = text.split(" / ")
    found = [line for line in lines if re.match(r"[\w.]*(Error|Exception):", line.strip())]
    return " ".join((found[-1] if found else text).replace("|", "/").split())[:200]


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


def read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return family -> engine -> cell of a page, as far as there is one."""
    rows = [
        [word.strip() for word in line[2:-2].split(" | ")]
        for line in (path.read_text().splitlines() if path.exists() else [])
        if line.startswith("| ")
    ]
    head = rows[0] if rows else []
    return {row[0].strip("`"): dict(zip(head[1:], row[1:], strict=True)) for row in rows[1:]}


def write_page(path: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Write the page."""
    engines = sorted({engine for cells in rows.values() for engine in cells})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        "# Families and engines",
        "",
        *textwrap.wrap(
            "`python -m tests.benchmarks.families --out results/families.md`, in pieces, "
            f"{datetime.now(UTC):%Y-%m-%d}, {device}, {', '.join(map(version_of, engines))}, transformers "
            f"{version('transformers')}. A tiny random model of each family: the largest difference of a "
            "token's log-probability from transformers' at the start, and after a commit of other weights "
            "(float32 on a CPU, bfloat16 on a GPU), or why there is none.",
            100,
            break_on_hyphens=False,
        ),
        "",
        f"| family | {' | '.join(engines)} |",
        "|---" * (1 + len(engines)) + "|",
        *(
            f"| `{family}` | {' | '.join(cells.get(engine, '') for engine in engines)} |"
            for family, cells in rows.items()
        ),
    ]
    path.write_text("\n".join(lines) + "\n")


def version_of(engine: str) -> str:
    """Return an engine's name and version, of SGLang in its own environment."""
    python = sglang_settings()["python"] if engine == "sglang" else sys.executable
    code = f"import importlib.metadata as m; print(m.version(m.packages_distributions()[{engine!r}][0]))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return f"{engine} {found.stdout.strip()}".strip()


def main(words: Sequence[str] | None = None) -> None:
    """Write the page after each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--families", nargs="*", default=list(families()))
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each cell")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    rows = read_rows(args.out)
    for family in args.families:
        for engine in args.engines:
            config = config_of(engine, args.arguments)
            found = asyncio.run(cell(families()[family], family, config, args.limit_s))
            rows.setdefault(family, {})[engine] = found
            write_page(args.out, dict(sorted(rows.items())))


if __name__ == "__main__":
    main()
