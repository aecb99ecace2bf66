"""The other end stands still in the moment in which the group is made: each end gives it up at its deadline, and serves or asks others."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.weights.registry import make_receiver
from tests.trainer.weights.engines import ROOT, publish
from tests.trainer.weights.receiver import COUNT
from trainer.config import WeightConfig
from trainer.weights.nccl import NcclSender
from trainer.weights.serving import MAX_RECEIVERS


@contextmanager
def halted(*words: str) -> Iterator[str]:
    """What it says first; by then it has not stopped itself yet, but nothing makes it wait any more."""
    command = [sys.executable, "-m", "tests.trainer.weights.halted", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def receive(manifest: WeightManifest, deadline_s: float) -> int:
    with closing(make_receiver("nccl")) as receiver:
        return sum(1 for _ in receiver.tensors(manifest, deadline_s))


def receive_at_last(manifest: WeightManifest) -> int:
    """Asks again where it is refused, as an engine does."""
    end = time.monotonic() + 60
    while True:
        try:
            return receive(manifest, 60)
        except WeightError:
            assert time.monotonic() < end


def test_a_receiver_gives_up_a_sender_that_stands_still() -> None:
    with closing(NcclSender(WeightConfig(transport="nccl", backend="gloo", bucket_mb=1, timeout_s=60))) as sender:
        manifest = publish(sender, 1)
        with halted("sender") as port, pytest.raises(WeightError, match="not complete within 2 s"):
            receive(msgspec.structs.replace(manifest, location=f"127.0.0.1:{port}/gloo"), 2)
        assert receive(manifest, 60) == COUNT


def test_a_sender_gives_up_receivers_that_stand_still_and_serves_the_next() -> None:
    with closing(NcclSender(WeightConfig(transport="nccl", backend="gloo", bucket_mb=1, timeout_s=4))) as sender:
        manifest = publish(sender, 1)
        with halted("receiver", msgspec.msgpack.encode(manifest).hex(), str(MAX_RECEIVERS)) as said:
            assert said == "there"
            assert receive_at_last(manifest) == COUNT  # there is no slot before they are given up
            assert receive(publish(sender, 2), 60) == COUNT
