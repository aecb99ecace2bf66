"""A disconnect of the sender: memory is released, transfers end, and no thread is left."""

import os
import resource
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from protocol.device.slice_digests import digests_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.provisional import with_digests
from protocol.weights.slices import BucketSizes, Cut
from rollout.weights.channel import PartTransfer
from rollout.weights.part_receiver import PartReceiver
from rollout.weights.registry import make_receiver
from rollout.weights.sender_connection import parse_location
from tests.changes import WEIGHTS, slow_unless_changed
from tests.trainer.weights.senders import at, layout_of, read_request, received
from trainer.config import WeightConfig
from trainer.weights.served.receiver_connection import ReceiverConnection
from trainer.weights.served.version_server import ServedVersion, VersionServer

CONFIG = WeightConfig(transport="nccl", bucket_mb=1, timeout_s=60)
TENSORS = {"a": torch.arange(300_000.0), "b": torch.ones(300_000)}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights.watch"]


@contextmanager
def many_descriptors() -> Iterator[None]:
    """More of them in use than `select` knows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        yield


class DoneChannel:
    """The sender's channel of receivers that can read its memory already."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        connection.answer({"ready": True, "sizes": [1 << 30, 1]}, end)
        connection.wait_done(served.manifest.version, end)

    def close(self) -> None:
        pass


class MappingChannel:
    """Maps the memory of a sender in this very process, as `ipc` does that of another one's GPU."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self._memory = memory
        self.mapped: list[torch.Tensor] = []

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        return parse_location(f"{manifest.location}/", ("",))[:2]

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        return BucketSizes(*answer["sizes"])

    def slices(self, transfer: PartTransfer) -> Iterator[list[tuple[Cut, torch.Tensor]]]:
        self.mapped = self._memory
        for (cut,) in transfer.plan.buckets:
            assert self.mapped, "released beneath a copy"
            yield [(cut, self.mapped[cut.piece])]

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        raise NotImplementedError

    def drain_device(self) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def release(self) -> None:
        self.mapped = []


class FailingChannel(MappingChannel):
    """Fails when it has mapped memory."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)])
        self.seen = weakref.ref(self._memory[0])

    def slices(self, transfer: PartTransfer) -> Iterator[list[tuple[Cut, torch.Tensor]]]:
        (memory,), self._memory = self._memory, []
        raise ConnectionError(f"failed with {len(memory)} elements mapped")
        yield


@contextmanager
def mapping() -> Iterator[tuple[VersionServer, WeightManifest, PartReceiver, MappingChannel]]:
    channel = MappingChannel(list(TENSORS.values()))
    with (
        closing(VersionServer(CONFIG, DoneChannel)) as server,
        closing(PartReceiver(lambda: channel)) as receiver,
    ):
        blank = layout_of(TENSORS.items(), CONFIG)
        digests = digests_of(TENSORS.values())
        manifest = at(replace(with_digests(blank, digests), epoch="e1", version=1), server.address)
        server.current = ServedVersion(manifest)
        yield server, manifest, receiver, channel


def test_memory_of_a_sender_is_released_when_it_disconnects() -> None:
    with mapping() as (server, manifest, receiver, channel):
        assert len(list(received(receiver, manifest, 60))) == len(TENSORS)
        assert channel.mapped
        server.close()
        until(lambda: not channel.mapped)
        until(lambda: not watchers())


def test_a_disconnect_is_noticed_with_more_descriptors_than_select_supports() -> None:
    with many_descriptors(), mapping() as (server, manifest, receiver, channel):
        assert len(list(received(receiver, manifest, 60))) == len(TENSORS)
        server.close()
        until(lambda: not channel.mapped)


def test_memory_of_a_transfer_that_failed_is_not_kept_by_its_error() -> None:
    channel, problem = FailingChannel(), ""
    with mapping() as (_, manifest, _, _), closing(PartReceiver(lambda: channel)) as receiver:
        try:
            list(received(receiver, manifest, 60))
        except WeightError as error:
            problem = str(error)
        assert "failed with 1 elements mapped" in problem
        assert channel.seen() is None  # without a garbage collection


def test_memory_is_released_only_after_a_copy_in_progress() -> None:
    with mapping() as (server, manifest, receiver, channel):
        coming = received(receiver, manifest, 60)
        next(coming)
        server.close()
        until(lambda: not watchers())  # it has seen that
        assert channel.mapped
        with pytest.raises(WeightError, match="disconnected in the middle"):
            list(coming)
        assert not channel.mapped


def test_a_successor_at_another_address_is_watched_instead() -> None:
    with (
        mapping() as (server, manifest, receiver, channel),
        closing(VersionServer(CONFIG, DoneChannel)) as successor,
    ):
        assert len(list(received(receiver, manifest, 60))) == len(TENSORS)
        moved = at(manifest, successor.address)
        successor.current = ServedVersion(moved)
        assert len(list(received(receiver, moved, 60))) == len(TENSORS)
        server.close()
        until(lambda: len(watchers()) == 1)
        assert channel.mapped
        successor.close()
        until(lambda: not channel.mapped)


def test_a_closed_receiver_leaves_no_thread_and_may_be_used_again() -> None:
    with mapping() as (_, manifest, receiver, channel):
        for _ in range(3):
            assert len(list(received(receiver, manifest, 60))) == len(TENSORS)
            assert len(watchers()) == 1
            receiver.close()
            assert not channel.mapped
            until(lambda: not watchers())


@slow_unless_changed(*WEIGHTS, "protocol/device/")
def test_joining_a_group_ends_when_the_sender_disconnects() -> None:
    with (
        mapping() as (_, manifest, _, _),
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(make_receiver("nccl")) as receiver,
    ):

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                read_request(lines)
                connection.sendall(b'{"join": true, "sizes": [1, 1]}\n')
                lines.readline()
                assert b"key" in lines.readline()  # it waits for the sender's part of the group

        thread = threading.Thread(target=serve)
        thread.start()
        location = f"127.0.0.1:{listener.getsockname()[1]}/gloo"
        with pytest.raises(WeightError, match="the sender disconnected"):
            list(received(receiver, at(manifest, location), 30))
        thread.join()
