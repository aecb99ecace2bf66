"""Versions sent during their export: a copy is committed only under the manifest that it matches."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.provisional import provisional_manifest
from rollout.staging.staging import Staging, whole_source
from rollout.weights.base import WeightReceiver
from rollout.weights.registry import make_receiver
from tests.changes import WEIGHTS, slow_unless_changed
from tests.gpus import TWO_GPUS
from tests.trainer.weights import receiver as process
from tests.trainer.weights.engines import ROOT, publish, started, version_tensors
from tests.trainer.weights.making import WAIT_S, Making
from tests.trainer.weights.senders import part_sender, received, sender_of
from trainer.config import WeightConfig
from trainer.weights.served.sender import PartSender

COUNT = 4
SIZE = 300_000
"""Elements of a tensor, which fills a bucket."""
CONFIG = WeightConfig(transport="nccl", bucket_mb=1, timeout_s=WAIT_S)

Tensors = list[tuple[str, torch.Tensor]]


def weights(value: float, size: int = SIZE) -> Tensors:
    return [(f"t{i}", torch.full((size,), value + i)) for i in range(COUNT)]


@pytest.fixture
def sender() -> Iterator[PartSender]:
    with closing(part_sender(CONFIG, weights(0.0))) as made:
        yield made


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def coming(sender: PartSender, before: WeightManifest) -> WeightManifest:
    """The draft of the next version, as an engine makes it from the manifest before."""
    said = sender.provisional(before.epoch, before.version + 1)
    assert said is not None
    assert (said.epoch, said.version, said.like) == (before.epoch, before.version + 1, before.version)
    return provisional_manifest(before, said.version)


def receive(receiver: WeightReceiver, manifest: WeightManifest) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    return received(receiver, manifest, WAIT_S)


def staging(size: int = SIZE) -> Staging:
    return Staging({f"t{i}": whole_source(torch.empty(size)) for i in range(COUNT)})


def test_tensors_come_before_the_version_is_complete(sender: PartSender, workers: ThreadPoolExecutor) -> None:
    before = sender.publish("e1", 1, weights(1.0))
    making = Making(weights(10.0))
    with closing(make_receiver("nccl")) as receiver:
        stream = receive(receiver, coming(sender, before))
        published = workers.submit(sender.publish, "e1", 2, making)
        values = []
        for i in range(COUNT):
            making.let(1)
            values.append(float(next(stream)[1][0]))
            assert i + 1 == COUNT or not published.done()
        assert list(stream) == []
        assert values == [10.0 + i for i in range(COUNT)]
        assert receiver.digest == published.result(WAIT_S).digest


def test_a_provisional_copy_is_committed_only_under_the_manifest_of_its_digest(
    sender: PartSender, workers: ThreadPoolExecutor
) -> None:
    before = sender.publish("e1", 1, weights(1.0))
    copy = staging()
    draft = coming(sender, before)
    fetched = workers.submit(copy.fetch, draft, WAIT_S)
    manifest = sender.publish("e1", 2, weights(10.0))
    assert fetched.result(WAIT_S) == sum(entry.nbytes for entry in manifest.tensors)
    with pytest.raises(WeightError, match="not staged"):
        copy.take(draft)
    with pytest.raises(WeightError, match="not staged"):
        copy.take(sender.publish("e1", 2, weights(11.0)))
    assert copy.take(manifest).digest == manifest.digest
    copy.close()


def test_provisional_needs_an_earlier_version_of_the_epoch(sender: PartSender) -> None:
    assert sender.provisional("e1", 0) is None
    sender.publish("e1", 1, weights(1.0))
    assert sender.provisional("e2", 2) is None


@pytest.mark.parametrize(
    "end", ["it fails", "another is published", "another is drafted", "the sender is closed"]
)
def test_receivers_of_a_cancelled_provisional_version_are_disconnected(
    sender: PartSender, workers: ThreadPoolExecutor, end: str
) -> None:
    before = sender.publish("e1", 1, weights(1.0))
    making = Making(weights(10.0))
    with closing(make_receiver("nccl")) as receiver:
        stream = receive(receiver, coming(sender, before))
        if end == "it fails":
            published = workers.submit(sender.publish, "e1", 2, making)
            making.let(2)
            next(stream)
            making.fails = True
            making.let()
            with pytest.raises(WeightError, match="cannot be made"):
                published.result(WAIT_S)
        rest = workers.submit(list, stream)
        if end == "another is published":
            sender.publish("e1", 5, weights(3.0))
        elif end == "another is drafted":
            sender.provisional("e1", 5)
        elif end == "the sender is closed":
            sender.close()
        with pytest.raises(WeightError, match="version 2"):
            rest.result(WAIT_S)
    if end != "the sender is closed":
        with closing(make_receiver("nccl")) as receiver:
            manifest = sender.publish("e1", 6, weights(7.0))
            assert [float(tensor[0]) for _, tensor in received(receiver, manifest, WAIT_S)] == [
                7.0,
                8.0,
                9.0,
                10.0,
            ]


@pytest.mark.parametrize(("size", "count"), [(SIZE // 2, COUNT), (2 * SIZE, COUNT), (SIZE, COUNT // 2)])
def test_export_of_another_layout_is_refused_and_disconnects_its_receivers(
    sender: PartSender, workers: ThreadPoolExecutor, size: int, count: int
) -> None:
    copy = staging()
    before = sender.publish("e1", 1, weights(1.0))
    fetched = workers.submit(copy.fetch, coming(sender, before), WAIT_S)
    with pytest.raises(WeightError, match=r"version 2: rank 0: "):
        sender.publish("e1", 2, weights(10.0, size)[:count])
    assert isinstance(fetched.exception(WAIT_S / 2), WeightError)
    copy.fetch(before, WAIT_S)
    copy.close()


def test_a_receiver_that_leaves_during_the_export_delays_no_other(
    sender: PartSender, workers: ThreadPoolExecutor
) -> None:
    before = sender.publish("e1", 1, weights(1.0))
    making = Making(weights(10.0))
    draft = coming(sender, before)
    leaver, stayer = make_receiver("nccl"), make_receiver("nccl")
    published = workers.submit(sender.publish, "e1", 2, making)
    making.let(2)
    for engine in (leaver, stayer):
        stream = receive(engine, draft)
        next(stream)
        if engine is leaver:
            stream.close()
    making.let()
    assert [float(tensor[0]) for _, tensor in stream] == [11.0, 12.0, 13.0]
    assert stayer.digest == published.result(WAIT_S).digest
    stayer.close()


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_a_provisional_manifest_is_refused_by_transports_that_do_not_stream(
    transport: str, tmp_path: Path
) -> None:
    config = WeightConfig(transport=transport, directory=str(tmp_path), bucket_mb=1)
    with (
        closing(sender_of(config, weights(1.0), tmp_path)) as sender,
        closing(make_receiver(transport)) as receiver,
    ):
        manifest = sender.publish("e1", 1, weights(1.0))
        assert sender.provisional("e1", 2) is None
        with pytest.raises(WeightError, match="tensor t0: digest"):
            list(received(receiver, provisional_manifest(manifest, 1), WAIT_S))


def test_a_request_that_expects_another_layout_is_refused(sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights(1.0))
    manifest = replace(manifest, buckets=tuple(size + 1 for size in manifest.buckets))
    with closing(make_receiver("nccl")) as receiver, pytest.raises(WeightError, match="another layout"):
        list(receive(receiver, manifest))


@pytest.mark.parametrize("gpu", [None, pytest.param(1, marks=TWO_GPUS)])
def test_an_engine_in_a_process_of_its_own_receives_versions_during_their_export(
    workers: ThreadPoolExecutor, gpu: int | None
) -> None:
    backend, device = ("gloo", "cpu") if gpu is None else ("nccl", "cuda:0")
    with (
        closing(
            part_sender(
                WeightConfig(transport="nccl", backend=backend, bucket_mb=1, timeout_s=WAIT_S),
                version_tensors(0),
            )
        ) as sender,
        started(gpu) as engine,
    ):
        before = publish(sender, 1, device)
        engine.serve(before)
        for version in (2, 3):
            engine.tell("stage", coming(sender, before))
            making = Making(
                (f"t{i}", torch.full((process.SIZE,), float(100 * version + i), device=device))
                for i in range(process.COUNT)
            )
            published = workers.submit(sender.publish, "e1", version, making)
            for _ in range(process.COUNT):
                making.let(1)
            before = published.result(WAIT_S)
            assert engine.answer() == {"staged": version}
            assert engine.ask("commit", before) == {"served": version}
            assert engine.ask("digest") == {"digest": before.digest}


CLOSED_IN_THE_MIDDLE = """
import threading, torch
from contextlib import suppress
from protocol.weights.provisional import provisional_manifest
from protocol.errors import WeightError
from rollout.weights.registry import make_receiver
from trainer.config import WeightConfig
from tests.trainer.weights.senders import part_sender, received

given = [(f"t{i}", torch.ones(300_000)) for i in range(4)]
sender = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=60), given)
before = sender.publish("e1", 1, given)
begun = threading.Event()

def making():
    for i in range(4):
        yield f"t{i}", torch.zeros(300_000)
        if i == 1:
            begun.wait()
            sender.close()

def receive():
    with suppress(WeightError):
        for _ in received(make_receiver("nccl"), provisional_manifest(before, 2), 60):
            begun.set()

assert sender.provisional("e1", 2) is not None
receiving = threading.Thread(target=receive)
receiving.start()
with suppress(OSError):  # it does not listen any more
    sender.publish("e1", 2, making())
receiving.join()
"""


@slow_unless_changed(*WEIGHTS)
def test_a_trainer_that_exits_during_an_export_exits_cleanly() -> None:
    """No thread of a transfer is left that would release a group while the interpreter exits."""
    for _ in range(2):
        found = subprocess.run(
            [sys.executable, "-c", CLOSED_IN_THE_MIDDLE],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert found.returncode == 0, found.stderr
