"""Starts `receiver.py` as a process and talks to it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from protocol.messages import WeightManifest
from tests.gpus import visible_gpus
from tests.trainer.weights.receiver import COUNT, SIZE
from trainer.weights.base import WeightSender

ROOT = Path(__file__).parents[3]


class Engine:
    """A receiver process that takes commands."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def tell(self, command: str, manifest: WeightManifest | None = None) -> None:
        assert self.process.stdin is not None
        text = msgspec.msgpack.encode(manifest).hex() if manifest else ""
        self.process.stdin.write(f"{command} {text}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, object]:
        assert self.process.stdout is not None
        found: dict[str, object] = json.loads(self.process.stdout.readline() or "{}")
        return found

    def ask(self, command: str, manifest: WeightManifest | None = None) -> dict[str, object]:
        self.tell(command, manifest)
        return self.answer()

    def serve(self, manifest: WeightManifest) -> None:
        """Stage and commit a version, and check that it is live."""
        assert self.ask("stage", manifest) == {"staged": manifest.version}
        assert self.ask("commit", manifest) == {"served": manifest.version}
        assert self.ask("digest") == {"digest": manifest.digest}


@contextmanager
def started(gpu: int | None = None) -> Iterator[Engine]:
    """On the CPU, or on the GPU of that number, the only one that it sees."""
    environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_gpus()[gpu]})
    command = [sys.executable, "-m", "tests.trainer.weights.receiver", "cpu" if gpu is None else "cuda"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Engine(process)
        finally:
            process.kill()


@contextmanager
def trainer(transport: str, device: str) -> Iterator[tuple["subprocess.Popen[str]", list[WeightManifest]]]:
    """A process that serves the second of two versions that it has published."""
    command = [sys.executable, "-m", "tests.trainer.weights.publisher", transport, device]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            yield (
                process,
                [msgspec.msgpack.decode(bytes.fromhex(line), type=WeightManifest) for line in lines],
            )
        finally:
            process.kill()


def publish(sender: WeightSender, version: int, device: str = "cpu") -> WeightManifest:
    """A version of 16 tensors, other numbers in each."""
    return sender.publish("e1", version, version_tensors(version, device))


def version_tensors(version: int, device: str = "cpu") -> list[tuple[str, torch.Tensor]]:
    """The tensors of a version that is published so."""
    return [(f"t{i}", torch.full((SIZE,), float(100 * version + i), device=device)) for i in range(COUNT)]
