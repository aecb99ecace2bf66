"""The transport ipc: engines copy versions from the trainer's GPU, or from another GPU."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from protocol.device.bucket_handles import HostBuckets
from protocol.errors import WeightError
from tests.gpus import TWO_GPUS
from tests.trainer.weights.engines import publish, started, trainer, version_tensors
from tests.trainer.weights.receiver import COUNT, SIZE
from tests.trainer.weights.senders import part_sender
from trainer.config import WeightConfig
from trainer.weights.served.double_buffer import DoubleBuffer
from trainer.weights.served.sender import PartSender

GPUS = [pytest.param(0, marks=pytest.mark.gpu), pytest.param(1, marks=TWO_GPUS)]


@pytest.fixture
def sender() -> Iterator[PartSender]:
    made = part_sender(WeightConfig(transport="ipc", bucket_mb=1, timeout_s=60), version_tensors(0))
    yield made
    made.close()


@pytest.fixture(params=GPUS)
def gpu(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_trainer_of_one_rank_shares_host_memory_without_a_gpu() -> None:
    config = WeightConfig(transport="ipc", backend="gloo", bucket_mb=1, timeout_s=60)
    with closing(part_sender(config, version_tensors(0))) as sender, started() as engine:
        for version in range(5):
            engine.serve(publish(sender, version))


def test_double_buffer_never_writes_to_a_set_that_is_read() -> None:
    buckets = HostBuckets()
    sets = DoubleBuffer(lambda: buckets.empty(64))
    first = sets.take(1)
    memory = first.memory
    sets.published()
    with first.reading():
        assert sets.take(1).memory.data_ptr() != memory.data_ptr()  # publishing it fails
        second = sets.take(1)
        sets.published()
        assert second.memory.data_ptr() != memory.data_ptr()
        with pytest.raises(WeightError, match="1 engine ranks still copy the version before the last"):
            sets.take(0.01)
        with second.reading():
            pass
    third = sets.take(1)
    assert third.memory.data_ptr() == memory.data_ptr()
    with pytest.raises(ValueError, match="replaced"), first.reading():
        pass


def test_updates_arrive_and_leak_nothing(gpu: int, sender: PartSender) -> None:
    with started(gpu) as engine:
        for version in range(5):
            engine.serve(publish(sender, version, "cuda"))
        before = engine.ask("memory"), torch.cuda.memory_reserved()
        for version in range(5, 105):
            engine.serve(publish(sender, version, "cuda"))
        assert (engine.ask("memory"), torch.cuda.memory_reserved()) == before


def test_an_engine_that_dies_while_it_copies_delays_no_other(gpu: int, sender: PartSender) -> None:
    with started(gpu) as victim, started(gpu) as survivor:
        manifest = publish(sender, 1, "cuda")
        victim.ask("hang", manifest)
        survivor.serve(manifest)
        victim.process.kill()
        for version in (2, 3, 4):
            survivor.serve(publish(sender, version, "cuda"))


def test_a_trainer_that_dies_while_an_engine_copies_costs_at_most_that_engine(gpu: int) -> None:
    with started(gpu) as engine, trainer("ipc", "cuda") as (process, (first, second)):
        assert "error" in engine.ask("stage", first)  # it is not current any more
        engine.serve(second)
        engine.tell("stage", second)
        process.kill()
        staged = engine.answer()  # from before, an error, or nothing: the process died
        if staged:
            assert staged.get("staged") == 2 or "error" in staged
            assert engine.ask("digest") == {"digest": second.digest}


def test_an_idle_engine_releases_the_memory_of_a_trainer_that_died(gpu: int, sender: PartSender) -> None:
    with started(gpu) as engine:
        engine.serve(publish(sender, 1, "cuda"))  # by then it has loaded what it needs
        before = torch.cuda.mem_get_info(0)[0]
        with trainer("ipc", "cuda") as (process, (_, second)):
            engine.serve(second)
            process.kill()
        end = time.monotonic() + 60
        while torch.cuda.mem_get_info(0)[0] < before - COUNT * SIZE * 4 // 2:  # the version is twice as large
            assert time.monotonic() < end
            time.sleep(0.01)
