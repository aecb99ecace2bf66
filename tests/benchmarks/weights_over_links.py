"""Measures versions that an engine reads by `http` over a link with a rate and a delay. Needs root.

    python -m tests.benchmarks.weights_over_links [--shape smollm2] [--steps 4] [--mbit 1000] [--rtt-ms 100]

The trainer's server is in this network namespace, the receiver in another (`slow_link.py`). Versions are
steps of torch's AdamW with random gradients on float32 masters of random values, in bfloat16. The plain time
is one GET of as many bytes over the same link, without a digest; `least` is these bytes by the rate.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import IO

import aiohttp
import msgspec
import torch

from protocol.messages import WeightManifest
from protocol.weights.slices import all_of
from rollout.weights.files import FileReceiver
from tests.benchmarks.slow_link import NEAR, slow_link
from tests.trainer.weights.senders import layout_of
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.files import http_sender

SHAPES = {"demo": (128, 128, 2, 128, 128, 16), "smollm2": (576, 1536, 30, 576, 192, 49152)}
"""hidden, intermediate, layers, queries, keys, vocabulary of the demo's model and of SmolLM2-135M."""
DEADLINE_S = 300.0
PLAIN = "plain.bin"
HEADER = "| version | lr | MiB | share | read ms | plain ms | least ms |\n|---|---|---|---|---|---|---|"


def masters(shape: str) -> dict[str, torch.Tensor]:
    """Make the parameters of a model with random values."""
    hidden, inner, layers, queries, keys, words = SHAPES[shape]
    sizes = {"embed": (words, hidden)}
    for layer in range(layers):
        sizes |= {
            f"{layer}.q": (queries, hidden), f"{layer}.k": (keys, hidden), f"{layer}.v": (keys, hidden),
            f"{layer}.o": (hidden, queries), f"{layer}.gate": (inner, hidden), f"{layer}.up": (inner, hidden),
            f"{layer}.down": (hidden, inner), f"{layer}.norm": (hidden,), f"{layer}.norm2": (hidden,),
        }  # fmt: skip
    torch.manual_seed(0)
    return {name: torch.randn(size) * 0.02 for name, size in sizes.items()}


def read_at_far_end() -> None:
    """Read each version whose manifest comes as a line, and say how long it and a plain GET took."""
    receiver = FileReceiver()
    for line in sys.stdin:
        text, url = line.split()
        manifest = msgspec.msgpack.decode(bytes.fromhex(text), type=WeightManifest)
        began = time.perf_counter()
        for _ in receiver.slices(manifest, all_of(manifest), DEADLINE_S):
            pass
        took = time.perf_counter() - began
        print(receiver.digest == manifest.digest, took, asyncio.run(plain_s(url)), flush=True)


async def plain_s(url: str) -> float:
    """Return how long a GET takes."""
    began = time.perf_counter()
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        async for _ in answer.content.iter_chunked(1 << 20):
            pass
    return time.perf_counter() - began


def measured(shape: str, rate: float, steps: int, mbit: float, far: "subprocess.Popen[str]") -> None:
    """Print a row for an anchor and for each version after it."""
    weights = {name: tensor.requires_grad_() for name, tensor in masters(shape).items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)
    with tempfile.TemporaryDirectory(prefix="tether-links-") as directory:
        config = WeightConfig(host=NEAR, delta=True, anchor_every=steps + 1, keep=steps + 1)
        layout = layout_of(in_dtype(weights.items(), "bfloat16"), config)
        with closing(http_sender(config, Path(directory), layout)) as sender:
            for version in range(steps + 1):
                manifest = sender.publish("e", version, in_dtype(weights.items(), "bfloat16"))
                nbytes, whole = manifest.chain[-1].nbytes, manifest.chain[0].nbytes
                (sender.directory / PLAIN).write_bytes(bytes(nbytes))
                read, plain = _asked(far, manifest)
                numbers = (nbytes / 2**20, 100 * nbytes / whole, read, plain, 8e-3 * nbytes / mbit)
                cells = "{:.2f} | {:.2f} % | {:.0f} | {:.0f} | {:.0f}".format(*numbers)
                print(f"| {'delta' if version else 'anchor'} | {rate:g} | {cells} |", flush=True)
                for tensor in weights.values():
                    tensor.grad = torch.randn(tensor.shape)
                optimizer.step()


def _asked(far: "subprocess.Popen[str]", manifest: WeightManifest) -> tuple[float, float]:
    """Have the far end read a version; milliseconds of that and of the plain GET."""
    assert far.stdin is not None
    assert far.stdout is not None
    url = f"{manifest.location.rpartition('/')[0]}/{PLAIN}"
    _tell(far.stdin, f"{msgspec.msgpack.encode(manifest).hex()} {url}\n")
    equal, read, plain = far.stdout.readline().split()
    assert equal == "True"
    return 1e3 * float(read), 1e3 * float(plain)


def _tell(file: IO[str], line: str) -> None:
    file.write(line)
    file.flush()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-6])
    parser.add_argument("--far", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.far:
        read_at_far_end()
        return
    print(HEADER)
    with slow_link(given.mbit, given.rtt_ms) as words:
        command = [*words, sys.executable, "-m", "tests.benchmarks.weights_over_links", "--far"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as far:
            for rate in given.rates:
                measured(given.shape, rate, given.steps, given.mbit, far)


if __name__ == "__main__":
    main()
