"""From the trainer's tensors to the engine's live ones, by transport: publish, stage and commit against one
plain copy in the same run.

    python -m tests.benchmarks.weights [--mb 512] [--repeats 7] [--dtype bfloat16] [--device cuda]
    [--transports nccl ipc]

The engine's side is a process of its own that stages into a copy and commits it, with the code that the
engines use; on GPUs it has the last one, the trainer's side the first. Shapes are those of a dense decoder
with a hidden size of 2048 and as many layers as the size asks for.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec
import torch

from protocol.messages import WeightManifest
from protocol.weights.provisional import is_provisional, provisional_manifest
from rollout.engines.base import Served
from rollout.staging.staging import Staging, whole_source
from tests.benchmarks.table import Figure, Run, figure, render
from tests.trainer.weights.senders import sender_of
from trainer.config import WeightConfig

ROOT = Path(__file__).parents[2]
HIDDEN = 2048
LAYER = (
    ("attn", (4 * HIDDEN, HIDDEN)),
    ("up", (4 * HIDDEN, HIDDEN)),
    ("down", (HIDDEN, 4 * HIDDEN)),
    ("norm", (HIDDEN,)),
)
TRANSPORTS = ("shm", "disk", "nccl", "ipc")
PHASES = ("publish", "stage", "commit", "all", "drafted")
TIMEOUT_S = 300.0


def shapes(megabytes: int, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """Tensors of about so many MB."""
    layer = sum(torch.Size(shape).numel() for _, shape in LAYER) * dtype.itemsize
    layers = max(1, round(megabytes * 1e6 / layer))
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in LAYER}


def tensors(megabytes: int, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Random ones, so that nothing is compressed or shared by being zero."""
    return {
        name: torch.randn(shape, device=device).to(dtype) for name, shape in shapes(megabytes, dtype).items()
    }


def copy_all(target: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> float:
    """One copy of everything; the seconds that it takes."""
    began = time.perf_counter()
    torch._foreach_copy_(list(target.values()), list(source.values()))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def engine(megabytes: int, dtype: torch.dtype, device: str) -> None:
    """Stage and commit every manifest that comes as a line of hex, but of a draft only stage it; answer
    {"stage_s", "commit_s"}."""
    torch.set_num_threads(1)
    live = {
        name: torch.zeros(shape, dtype=dtype, device=device)
        for name, shape in shapes(megabytes, dtype).items()
    }
    copy = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
    staging = Staging({name: whole_source(tensor) for name, tensor in copy.items()})
    print("ready", flush=True)
    for line in sys.stdin:
        manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=WeightManifest)
        began = time.perf_counter()
        if staging.staged != Served(manifest.epoch, manifest.version, manifest.digest):
            staging.fetch(manifest, TIMEOUT_S)
        if is_provisional(manifest):
            continue
        staged = time.perf_counter()
        staging.take(manifest)
        print(json.dumps({"stage_s": staged - began, "commit_s": copy_all(live, copy)}), flush=True)


def measure(
    transport: str, source: dict[str, torch.Tensor], arguments: list[str], directory: Path, repeats: int
) -> Iterator[Run]:
    """MB/s of each phase, and of a plain copy, `repeats` times after a first that is not counted.

    "all" is from the beginning of publishing to the live weights, one phase after the other; "drafted" the
    same of a version that is received while it is published, where the transport can do that.
    """
    megabytes = sum(tensor.nbytes for tensor in source.values()) / 1e6
    other = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    config = WeightConfig(transport=transport, timeout_s=TIMEOUT_S)
    sender = sender_of(config, source.items(), directory, "bench")
    command = [sys.executable, "-m", "tests.benchmarks.weights", "--engine", *arguments]
    last = {"CUDA_VISIBLE_DEVICES": str(torch.cuda.device_count() - 1)} if torch.cuda.is_available() else {}
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | last, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            for version in range(0, 2 * repeats + 2, 2):
                began = time.perf_counter()
                manifest = sender.publish("bench", version, source.items())
                published = time.perf_counter()
                _tell(process.stdin, manifest)
                found = json.loads(process.stdout.readline())
                plain = copy_all(other, source)
                sender.retire(frozenset())
                seconds = {
                    "publish": published - began,
                    "stage": found["stage_s"],
                    "commit": found["commit_s"],
                    "copy": plain,
                }
                seconds["all"] = seconds["publish"] + seconds["stage"] + seconds["commit"]
                began = time.perf_counter()
                if sender.provisional("bench", version + 1) is not None:
                    _tell(process.stdin, provisional_manifest(manifest, version + 1))
                    _tell(process.stdin, sender.publish("bench", version + 1, source.items()))
                    process.stdout.readline()
                    seconds["drafted"] = time.perf_counter() - began
                if version:
                    yield {key: megabytes / value for key, value in seconds.items()}
        finally:
            process.kill()
            sender.close()


def _tell(engine: IO[str], manifest: WeightManifest) -> None:
    engine.write(msgspec.msgpack.encode(manifest).hex() + "\n")
    engine.flush()


def run(
    directory: Path,
    *,
    quick: bool = False,
    megabytes: int = 512,
    repeats: int = 7,
    dtype: str = "float32",
    device: str = "cpu",
    transports: Sequence[str] = TRANSPORTS,
) -> tuple[dict[str, Figure], list[str]]:
    """The section of `make bench`."""
    torch.set_num_threads(1)
    if quick:
        megabytes, repeats = 200, 1
    source = tensors(megabytes, getattr(torch, dtype), device)
    figures: dict[str, Figure] = {}
    for transport in transports:
        arguments = ["--mb", str(megabytes), "--dtype", dtype, "--device", device]
        runs = list(measure(transport, source, arguments, directory / transport, repeats))
        for phase in (phase for phase in PHASES if phase in runs[0]):
            figures[f"weights.{transport}.{phase}"] = figure(runs, phase, unit="MB/s", reference="copy")
    size = sum(tensor.nbytes for tensor in source.values()) / 1e6
    return figures, [
        f"weights: {size:.0f} MB in {len(source)} {dtype} tensors; the reference is one copy in memory"
    ]


def main() -> None:
    """The engine's side, or the table."""
    parser = argparse.ArgumentParser(description="Weight transports.")
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        engine(arguments.mb, getattr(torch, arguments.dtype), arguments.device)
        return
    with tempfile.TemporaryDirectory() as directory:
        options = vars(arguments)
        del options["engine"]
        found, notes = run(Path(directory), megabytes=options.pop("mb"), **options)
    print(render(found), *notes, sep="\n")


if __name__ == "__main__":
    main()
