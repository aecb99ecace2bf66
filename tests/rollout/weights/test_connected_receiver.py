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

import msgspec
import pytest
import torch

from protocol.device.pair_store import Line
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import Chunk, chunks
from rollout.weights.base import Destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.nccl import NcclReceiver
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import Deadline
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import fill_buckets, make_manifest
from trainer.weights.receiver_connection import ReceiverConnection
from trainer.weights.version_server import ServedVersion, VersionServer

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
        connection.answer({"ready": True}, end)
        connection.wait_done(served.manifest.version, end)

    def close(self) -> None:
        pass


class MappingChannel:
    """Maps the memory of a sender in this very process, as `ipc` does that of another one's GPU."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self._memory = memory
        self.mapped: list[torch.Tensor] = []

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        return parse_address(manifest.location, manifest.location)

    def chunks(
        self,
        answer: dict[str, Any],
        manifest: WeightManifest,
        deadline: Deadline,
        place: Destination,
        disconnected: Callable[[], bool],
        line: Line,
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        self.mapped = self._memory
        for chunk in chunks(manifest):
            assert self.mapped, "released beneath a copy"
            yield chunk, self.mapped[chunk.bucket][chunk.start : chunk.end]

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

    def chunks(self, *_: Any, **__: Any) -> Iterator[tuple[Chunk, torch.Tensor]]:
        (memory,), self._memory = self._memory, []
        raise ConnectionError(f"failed with {len(memory)} elements mapped")
        yield


@contextmanager
def mapping() -> Iterator[tuple[VersionServer, WeightManifest, ConnectedReceiver, MappingChannel]]:
    memory: list[torch.Tensor] = []

    def allocate(_: int, size: int) -> torch.Tensor:
        memory.append(torch.empty(size, dtype=torch.uint8))
        return memory[-1]

    channel = MappingChannel(memory)
    with (
        closing(VersionServer(CONFIG, DoneChannel)) as server,
        closing(ConnectedReceiver(channel)) as receiver,
    ):
        manifest = make_manifest(
            "ipc",
            server.address,
            "e1",
            1,
            fill_buckets(iter(TENSORS.items()), 1 << 20, allocate),
            base_model="",
            tied=(),
        )
        server.current = ServedVersion(manifest, tuple(memory))
        yield server, manifest, receiver, channel


def test_memory_of_a_sender_is_released_when_it_disconnects() -> None:
    with mapping() as (server, manifest, receiver, channel):
        assert len(list(receiver.tensors(manifest, 60))) == len(TENSORS)
        assert channel.mapped
        server.close()
        until(lambda: not channel.mapped)
        until(lambda: not watchers())


def test_a_disconnect_is_noticed_with_more_descriptors_than_select_supports() -> None:
    with many_descriptors(), mapping() as (server, manifest, receiver, channel):
        assert len(list(receiver.tensors(manifest, 60))) == len(TENSORS)
        server.close()
        until(lambda: not channel.mapped)


def test_memory_of_a_transfer_that_failed_is_not_kept_by_its_error() -> None:
    channel, problem = FailingChannel(), ""
    with mapping() as (_, manifest, _, _), closing(ConnectedReceiver(channel)) as receiver:
        try:
            list(receiver.tensors(manifest, 60))
        except WeightError as error:
            problem = str(error)
        assert "failed with 1 elements mapped" in problem
        assert channel.seen() is None  # without a garbage collection


def test_memory_is_released_only_after_a_copy_in_progress() -> None:
    with mapping() as (server, manifest, receiver, channel):
        coming = receiver.tensors(manifest, 60)
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
        assert len(list(receiver.tensors(manifest, 60))) == len(TENSORS)
        assert server.current is not None
        moved = msgspec.structs.replace(manifest, location=successor.address)
        successor.current = ServedVersion(moved, server.current.buckets)
        assert len(list(receiver.tensors(moved, 60))) == len(TENSORS)
        server.close()
        until(lambda: len(watchers()) == 1)
        assert channel.mapped
        successor.close()
        until(lambda: not channel.mapped)


def test_a_closed_receiver_leaves_no_thread_and_may_be_used_again() -> None:
    with mapping() as (_, manifest, receiver, channel):
        for _ in range(3):
            assert len(list(receiver.tensors(manifest, 60))) == len(TENSORS)
            assert len(watchers()) == 1
            receiver.close()
            assert not channel.mapped
            until(lambda: not watchers())


def test_joining_a_group_ends_when_the_sender_disconnects() -> None:
    with (
        mapping() as (_, manifest, _, _),
        socket.create_server(("127.0.0.1", 0)) as listener,
        closing(NcclReceiver()) as receiver,
    ):

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile() as lines:
                lines.readline()
                connection.sendall(b'{"join": true}\n')
                lines.readline()
                assert "key" in lines.readline()  # it waits for the sender's part of the group

        thread = threading.Thread(target=serve)
        thread.start()
        location = f"127.0.0.1:{listener.getsockname()[1]}/gloo"
        with pytest.raises(WeightError, match="the sender disconnected"):
            list(receiver.tensors(msgspec.structs.replace(manifest, location=location), 30))
        thread.join()
