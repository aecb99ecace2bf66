"""A peer that stops while the group is created: the other end times out and serves or asks others."""

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest

from protocol.device import bounded_init
from protocol.device.bounded_init import MAX_STUCK
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.weights.registry import make_receiver
from tests.changes import WEIGHTS, slow_unless_changed
from tests.trainer.weights.engines import ROOT, publish, started, version_tensors
from tests.trainer.weights.receiver import COUNT
from tests.trainer.weights.senders import at, part_sender, received
from trainer.config import WeightConfig
from trainer.weights.served.nccl_pairs import PairChannel
from trainer.weights.served.receiver_connection import ReceiverConnection
from trainer.weights.served.sender import PartSender
from trainer.weights.served.version_server import MAX_RECEIVERS, ServedVersion


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
        return sum(1 for _ in received(receiver, manifest, deadline_s))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def receive_at_last(manifest: WeightManifest) -> int:
    """Asks again where it is refused, as an engine does."""
    end = time.monotonic() + 120
    while True:
        try:
            return receive(manifest, 60)
        except WeightError:
            assert time.monotonic() < end


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def sending(backend: str, timeout_s: float) -> Iterator[tuple[PartSender, WeightManifest]]:
    with closing(
        part_sender(
            WeightConfig(transport="nccl", backend=backend, bucket_mb=1, timeout_s=timeout_s),
            version_tensors(0),
        )
    ) as sender:
        yield sender, publish(sender, 1, "cpu" if backend == "gloo" else "cuda")


def test_a_receiver_times_out_on_a_stopped_sender(backend: str) -> None:
    with sending("gloo", 60) as (_, manifest):
        with halted("sender") as port, pytest.raises(WeightError, match="not complete within 2 s"):
            receive(at(manifest, f"127.0.0.1:{port}/{backend}"), 2)
        assert receive(manifest, 60) == COUNT


@slow_unless_changed(*WEIGHTS)
def test_a_sender_times_out_on_stopped_receivers_and_serves_the_next() -> None:
    with sending("gloo", 12) as (sender, manifest):
        with halted("receiver", msgspec.msgpack.encode(manifest).hex(), str(MAX_RECEIVERS)) as said:
            assert said == "there"
            assert receive_at_last(manifest) == COUNT  # there is no slot before they are given up
            assert receive_at_last(publish(sender, 2)) == COUNT


def test_a_sender_that_times_out_drops_the_group_though_its_error_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = PairChannel._send_version

    def too_late(
        channel: PairChannel,
        connection: ReceiverConnection,
        served: ServedVersion,
        base: ServedVersion | None,
        end: float,
    ) -> None:
        broadcast(channel, connection, served, base, 0.0)

    monkeypatch.setattr(PairChannel, "_send_version", too_late)
    with sending("gloo", 60) as (_, manifest), pytest.raises(WeightError, match=r"disconnected|was closed"):
        receive(manifest, 60)
    assert [record.getMessage() for record in caplog.records] == [
        "weights.send_failed error=not complete within weights.timeout_s"
    ]


@pytest.mark.gpu
@pytest.mark.two_gpus
def test_threads_stuck_in_nccl_are_abandoned_until_the_trainer_is_poisoned() -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=stick
    )  # no other test could make a group in this one afterwards
    process.start()
    try:
        process.join(240)
        assert process.exitcode == 0
    finally:
        process.kill()


def stick() -> None:
    """Stop receivers one after the other until the process tolerates no more, then end it, which its threads
    would keep alive."""
    try:
        _stick()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _stick() -> None:
    with sending("nccl", 10) as (sender, manifest), started(1) as engine:
        words = msgspec.msgpack.encode(manifest).hex()
        with halted("receiver", words, str(MAX_STUCK - 1)) as said:
            assert said == "there"
            until(lambda: len(bounded_init._abandoned) == MAX_STUCK - 1)
            engine.serve(publish(sender, 2, "cuda"))
            with halted("receiver", msgspec.msgpack.encode(publish(sender, 3, "cuda")).hex(), "1"):
                until(lambda: len(bounded_init._abandoned) == MAX_STUCK)
                with pytest.raises(WeightError, match="4 threads are stuck initializing process groups"):
                    until(lambda: publish(sender, 4, "cuda").version != 4)
