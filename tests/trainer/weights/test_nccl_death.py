"""kill -9 of a receiver in the middle of a transfer, on gloo: nobody else notices, and the next update succeeds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.messages import WeightManifest
from tests.trainer.weights.receiver import COUNT, SIZE
from trainer.config import WeightConfig
from trainer.weights.nccl import NcclSender

ROOT = Path(__file__).parents[3]


class Engine:
    """A receiver process that is told what to do."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def tell(self, command: str, manifest: WeightManifest | None = None) -> None:
        assert self.process.stdin is not None
        text = msgspec.msgpack.encode(manifest).hex() if manifest else ""
        self.process.stdin.write(f"{command} {text}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, int]:
        assert self.process.stdout is not None
        found: dict[str, int] = json.loads(self.process.stdout.readline() or "{}")
        return found

    def ask(self, command: str, manifest: WeightManifest | None = None) -> dict[str, int]:
        self.tell(command, manifest)
        return self.answer()


@contextmanager
def started() -> Iterator[Engine]:
    command = [sys.executable, "-m", "tests.trainer.weights.receiver"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Engine(process)
        finally:
            process.kill()


@pytest.fixture
def sender() -> Iterator[NcclSender]:
    made = NcclSender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=60))
    yield made
    made.close()


def publish(sender: NcclSender, version: int) -> WeightManifest:
    return sender.publish("e1", version, [(f"t{i}", torch.full((SIZE,), float(100 * version + i))) for i in range(COUNT)])


def test_a_receiver_killed_in_the_middle_hurts_neither_sender_nor_the_other(sender: NcclSender) -> None:
    with ExitStack() as stack:
        survivor, victim = stack.enter_context(started()), stack.enter_context(started())
        first = publish(sender, 1)
        assert survivor.ask("stage", first) == {"staged": 1}
        assert survivor.ask("commit", first) == {"served": 1}
        live = survivor.ask("digest")
        assert live == {"digest": first.digest}

        second = publish(sender, 2)
        assert victim.ask("hang", second) == {"came": COUNT // 2}
        survivor.tell("stage", second)
        victim.process.kill()
        assert survivor.answer() == {"staged": 2}
        assert survivor.ask("digest") == live
        assert torch.ones(8, 8).matmul(torch.ones(8, 8)).sum() == 512  # the sender's process still computes

        third = publish(sender, 3)
        again = stack.enter_context(started())  # its successor
        for engine in (survivor, again):
            assert engine.ask("stage", third) == {"staged": 3}
            assert engine.ask("commit", third) == {"served": 3}
            assert engine.ask("digest") == {"digest": third.digest}
