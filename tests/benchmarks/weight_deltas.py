"""Measures which share of a version's bytes changes, by learning rate, and what sending changes alone takes.

    python -m tests.benchmarks.weight_deltas [--steps 24] [--dtype bfloat16] [--rates 1e-6 1e-5 1e-4 1.5e-3]
    python -m tests.benchmarks.weight_deltas --nccl smollm2 [--device cuda] [--steps 4] [--rates 1e-6 1e-5]

Each rate is a run of `tether up` of the demo, with AdamW and `weights.delta`: the engine serves every version
out of its changes, whose digests it checks. The shares are those of the coded changes, as they were written
and read.

With `--nccl` versions go over `nccl` to a process that stages them, once as changes and once whole, each time
from their publication to the verified copy. They are made as in `weights_over_links.py`, of a model of that
shape. On a CPU over gloo; with `--device cuda` from the first GPU to the second.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch

from protocol.messages import WeightManifest
from rollout.staging.placement import SlicePlacement
from rollout.staging.staging import digest_of, whole_source
from rollout.weights.nccl_pairs import PairSlices
from rollout.weights.part_receiver import PartReceiver
from tests.benchmarks.weights_over_links import SHAPES, masters
from tests.gpus import visible_gpus
from tests.trainer.weights.senders import layout_of
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.served.sender import PartSender
from trainer.weights.version_directories import read_manifests

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0
NCCL_HEADER = (
    "| model | lr | MiB | share | changes ms | whole ms | ratio | ratio of publishing |\n"
    "|---|---|---|---|---|---|---|---|"
)
HEADER = "| learning rate | versions | median share of bytes | least | most |\n|---|---|---|---|---|"


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of bytes of the versions of one run."""

    rate: str
    found: Sequence[float]
    """By version, without the anchor."""

    def row(self) -> str:
        """Return the row of the table."""
        cells = (f"{100 * number:.2f} %" for number in (median(self.found), min(self.found), max(self.found)))
        return f"| {self.rate} | {len(self.found)} | {' | '.join(cells)} |"


def measured(rate: str, steps: int, dtype: str) -> Shares:
    """Run the demo with a learning rate."""
    with tempfile.TemporaryDirectory(prefix="tether-deltas-") as directory:
        settings = {
            "run.dir": directory,
            "run.steps": steps,
            "engine.name": "hf",
            "engine.dtype": dtype,
            "optimizer.lr": rate,
            "eval.at_end": "false",
            "weights.transport": "disk",
            "weights.delta": "true",
            "weights.anchor_every": steps + 1,
            "weights.keep": steps + 1,
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "services.cli", "up", str(ROOT / "deploy/configs/demo.toml"), *words]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        if ended.returncode:
            raise SystemExit(
                f"{' '.join(command)} ended with {ended.returncode}:\n{(ended.stdout + ended.stderr)[-4000:]}"
            )
        manifests = sorted(read_manifests(Path(directory) / "weights"), key=lambda one: one.version)
    whole = sum(manifests[0].buckets)
    return Shares(rate, [one.chain[-1].nbytes / whole for one in manifests if len(one.chain) > 1])


class Far:
    """A process that stages versions as they come, with one staging copy."""

    def __init__(self, shape: str, device: str) -> None:
        """Start it on the CPU, or on the second GPU."""
        gpus = {"CUDA_VISIBLE_DEVICES": visible_gpus()[1]} if device == "cuda" else {}
        command = [sys.executable, "-m", "tests.benchmarks.weight_deltas", "--far", device, "--nccl", shape]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | gpus, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def stage(self, manifest: WeightManifest) -> tuple[int, float]:
        """Have it stage a version; return the bytes that came, and milliseconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(msgspec.msgpack.encode(manifest).hex() + "\n")
        self.process.stdin.flush()
        nbytes, seconds = self.process.stdout.readline().split()
        return int(nbytes), 1e3 * float(seconds)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def stage_at_far_end(shape: str, device: str) -> None:
    """Stage each version whose manifest comes as a line, and say how many bytes came and how long it took."""
    copy = {name: tensor.to(device, torch.bfloat16) for name, tensor in masters(shape).items()}
    channel = PairSlices()
    placement = SlicePlacement({name: whole_source(tensor) for name, tensor in copy.items()})
    receiver = PartReceiver(lambda: channel)
    for line in sys.stdin:
        manifest = msgspec.msgpack.decode(bytes.fromhex(line), type=WeightManifest)
        began = time.perf_counter()
        for found in receiver.slices(manifest, placement.wanted, TIMEOUT_S, placement.destination):
            placement.place((part.entry.name, part.box, part.tensor) for part in found)
        took = time.perf_counter() - began
        assert digest_of(copy) == manifest.digest
        print(channel.read, took, flush=True)


def over_nccl(shape: str, device: str, rate: float, steps: int) -> None:
    """Print a row for each version after the first."""
    weights = {name: tensor.to(device).requires_grad_() for name, tensor in masters(shape).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)
    with ExitStack() as stack:
        ends = []
        for delta in (True, False):
            config = WeightConfig(transport="nccl", delta=delta, timeout_s=TIMEOUT_S)
            layout = layout_of(in_dtype(weights.items(), "bfloat16"), config)
            sender = stack.enter_context(closing(PartSender(config, 0, layout)))
            ends.append((sender, stack.enter_context(closing(Far(shape, device)))))
        for version in range(steps + 1):
            rows = []
            for sender, far in ends:
                began = time.perf_counter()
                manifest = sender.publish("e", version, in_dtype(weights.items(), "bfloat16"))
                published = 1e3 * (time.perf_counter() - began)
                rows.append((*far.stage(manifest), published))
            (nbytes, changes_ms, publish_ms), (whole, whole_ms, publish_whole_ms) = rows
            if version:
                print(
                    f"| {shape} | {rate:g} | {nbytes / 2**20:.2f} | {100 * nbytes / whole:.2f} % | "
                    f"{changes_ms:.0f} | {whole_ms:.0f} | {changes_ms / whole_ms:.2f} | "
                    f"{publish_ms / publish_whole_ms:.2f} |",
                    flush=True,
                )
            for tensor in weights.values():
                tensor.grad = torch.randn_like(tensor)
            optimizer.step()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rates", nargs="+", default=["1e-6", "1e-5", "1e-4", "1.5e-3"])
    parser.add_argument("--nccl", choices=SHAPES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--far", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.far:
        stage_at_far_end(given.nccl, given.far)
        return
    if given.nccl:
        print(NCCL_HEADER)
        for rate in given.rates:
            over_nccl(given.nccl, given.device, float(rate), given.steps)
        return
    print(HEADER)
    for rate in given.rates:
        print(measured(rate, given.steps, given.dtype).row(), flush=True)


if __name__ == "__main__":
    main()
