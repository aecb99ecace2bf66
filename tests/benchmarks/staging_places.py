"""Measures the price of each place of `engine.staging`: memory beside the live parameters, and the pause.

    python -m tests.benchmarks.staging_places [--mb 512] [--repeats 5] [--device cuda] [--places layers,...]

Each place is measured in a process of its own, on versions in bfloat16 that come by `shm`. Memory is
anonymous memory of the host, and allocated memory of the device; pages of a version's files, which all
processes share, are neither, also where they are locked. `layers-copied` locks none, as where the driver
refuses it. The pages of a version are unlocked before the next one is published.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from protocol.device.page_locks import PageLocks
from rollout.staging.layers import LayeredStaging
from rollout.staging.places import StagingPlace, allocate_copies
from rollout.staging.staging import Committable, LiveAndStaged, Staging, digest_of, whole_source
from tests.benchmarks.weights import ROOT, TIMEOUT_S, copy_all, shapes, tensors
from trainer.config import WeightConfig
from trainer.weights.files import shm_sender

COPIED = "layers-copied"
PLACES = (*map(str, (StagingPlace.DEVICE, StagingPlace.HOST, StagingPlace.LAYERS)), COPIED)
HEADER = (
    "| place | device MiB | host MiB | locked MiB | stage ms | pause ms | unlock ms | plain copy ms |\n"
    "|---|---|---|---|---|---|---|---|"
)
DTYPE = torch.bfloat16


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel does not say how much memory is anonymous")


def allocated_bytes() -> int:
    """Return the memory of the device that torch has allocated."""
    return int(torch.cuda.memory_allocated()) if torch.cuda.is_available() else 0


def placed(place: str, live: Mapping[str, torch.Tensor]) -> tuple[Staging, Committable, PageLocks]:
    """Return the staging of a place, the weights that it is committed to, and the locks of its pages."""
    host = PageLocks(torch.device("cpu"))  # refuses all memory
    if place in (StagingPlace.LAYERS, COPIED):
        layers = LayeredStaging({name: whole_source(tensor) for name, tensor in live.items()})
        if place == COPIED:
            layers.buffer.locks = host
        return layers, layers, layers.buffer.locks
    copy = allocate_copies(StagingPlace(place), live)
    staging = Staging({name: whole_source(tensor) for name, tensor in copy.items()})
    return staging, LiveAndStaged(dict(live), copy), host


def measure(place: str, megabytes: int, repeats: int, device: str, directory: str) -> None:
    """Print bytes ("device", "host", "locked") and seconds ("stage", "pause", "unlock", "copy"), medians."""
    torch.set_num_threads(1)
    live = {
        name: torch.zeros(shape, dtype=DTYPE, device=device)
        for name, shape in shapes(megabytes, DTYPE).items()
    }
    source = tensors(megabytes, DTYPE, "cpu")
    sender = shm_sender(WeightConfig(directory=directory), "bench")
    before = anonymous_bytes(), allocated_bytes()
    staging, weights, locks = placed(place, live)
    found: dict[str, list[float]] = {"stage": [], "pause": [], "unlock": [], "locked": []}
    for version in range(repeats + 1):
        manifest = sender.publish("bench", version, source.items())
        times = [time.perf_counter()]
        staging.fetch(manifest, TIMEOUT_S)
        times.append(time.perf_counter())
        locked = locks.nbytes
        staging.take(manifest)
        weights.apply()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        assert locks.wait(TIMEOUT_S)
        times.append(time.perf_counter())
        if version:
            for name, (start, end) in zip(("stage", "pause", "unlock"), pairwise(times), strict=True):
                found[name].append(end - start)
            found["locked"].append(locked)
        sender.retire(frozenset())
    numbers = {name: median(seconds) for name, seconds in found.items()}
    numbers |= {"host": anonymous_bytes() - before[0], "device": allocated_bytes() - before[1]}
    assert digest_of(live) == manifest.digest
    numbers["copy"] = median(copy_all(live, source) for _ in range(repeats))
    sender.close()
    print(json.dumps(numbers))


def main() -> None:
    """Print the table, or measure one place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--places", default=",".join(PLACES), help="of these, in this order")
    parser.add_argument("--place", default="", choices=("", *PLACES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.place:
        with tempfile.TemporaryDirectory(prefix="tether-bench-", dir="/dev/shm") as directory:
            measure(given.place, given.mb, given.repeats, given.device, directory)
        return
    print(HEADER)
    for place in given.places.split(","):
        command = [sys.executable, "-m", "tests.benchmarks.staging_places", *sys.argv[1:], "--place", place]
        told = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(told.stdout)
        memory = (f"{found[name] / 2**20:.0f}" for name in ("device", "host", "locked"))
        times = (f"{1e3 * found[name]:.0f}" for name in ("stage", "pause", "unlock", "copy"))
        print(f"| `{place}` | {' | '.join((*memory, *times))} |", flush=True)


if __name__ == "__main__":
    main()
