"""The sender of nccl, on gloo: receivers that fail, stall or send nonsense affect no other."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
import torch

import trainer.weights.served.nccl_pairs as pairs
from protocol.device.changes import Changes, encode_changes
from protocol.errors import SettingsError, WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.nccl_pairs import PairSlices
from rollout.weights.part_receiver import PartReceiver
from rollout.weights.registry import make_receiver
from tests.trainer.weights.senders import part_sender, received
from tests.trainer.weights.served.test_changes import SHAPES, changed, engine_rank, first, of_ranks
from tests.trainer.weights.served.trainer_ranks import trainer_ranks
from trainer.config import WeightConfig
from trainer.weights.served.sender import PartSender
from trainer.weights.served.version_server import MAX_RECEIVERS


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((200_000,), value + i)) for i in range(4)]


@pytest.fixture
def sender() -> Iterator[PartSender]:
    made = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=30), weights())
    yield made
    made.close()


def fetch(manifest: WeightManifest) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
    with closing(make_receiver("nccl")) as receiver:
        yield from received(receiver, manifest, 30)


def connect(sender: PartSender) -> socket.socket:
    host, port = sender.location.partition("/")[0].rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def ask(sender: PartSender, line: bytes) -> dict[str, object]:
    with connect(sender) as connection, connection.makefile("rwb") as file:
        file.write(line)
        file.flush()
        answer = file.readline()
    return json.loads(answer) if answer else {}


def request(version: int, epoch: str = "e1") -> bytes:
    return json.dumps({"version": version, "epoch": epoch}).encode() + b"\n"


def test_only_the_current_version_is_served(sender: PartSender) -> None:
    assert ask(sender, request(1)) == {"error": "no version is published"}
    sender.publish("e1", 1, weights())
    sender.publish("e1", 2, weights())
    assert ask(sender, request(1)) == {"error": "the current version is 2 of epoch e1"}
    assert ask(sender, request(2, "e0")) == {"error": "the current version is 2 of epoch e1"}
    assert ask(sender, b"[]\n") == {"error": "the current version is 2 of epoch e1"}


def test_requests_that_come_at_once_are_answered_one_by_one(sender: PartSender) -> None:
    sender.publish("e1", 2, weights())
    with connect(sender) as connection, connection.makefile("rwb") as file:
        file.write(request(1) + request(3))
        file.flush()
        assert [json.loads(file.readline()) for _ in range(2)] == [
            {"error": "the current version is 2 of epoch e1"}
        ] * 2


@pytest.mark.parametrize("line", [b"not json\n", b"x" * 10_000, b"\xff\n"])
def test_a_malformed_request_is_disconnected(line: bytes, sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights())
    with suppress(ConnectionError):  # hung up before all of it was read
        assert ask(sender, line) == {}
    assert len(list(fetch(manifest))) == 4


def test_receivers_at_the_same_time_get_the_same_bytes(sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights(5.0))
    found: list[list[float]] = []

    def work() -> None:
        found.append([float(tensor[-1]) for _, tensor in fetch(manifest)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[5.0, 6.0, 7.0, 8.0]] * 4


def test_receivers_that_stall_or_leave_delay_no_other(sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights())
    silent = connect(sender)  # never asks
    joined = connect(sender)  # asks, but never joins the group
    joined.sendall(request(1))
    assert json.loads(joined.recv(4096))["join"]
    leaver = fetch(manifest)
    next(leaver)
    leaver.close()  # leaves in the middle
    assert [float(t[0]) for _, t in fetch(manifest)] == [1.0, 2.0, 3.0, 4.0]
    silent.close()
    joined.close()


def test_a_version_that_is_being_sent_survives_its_successors(sender: PartSender) -> None:
    stream = fetch(sender.publish("e1", 1, weights(1.0)))
    values = [float(next(stream)[1][0])]
    for version in (2, 3):
        sender.publish("e1", version, weights(100.0 * version))
    values += [float(tensor[0]) for _, tensor in stream]
    assert values == [1.0, 2.0, 3.0, 4.0]


def test_slots_are_released_after_failures(sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights())
    for _ in range(2 * MAX_RECEIVERS):
        ask(sender, request(99))
        ask(sender, b"nonsense\n")
    assert len(list(fetch(manifest))) == 4


def test_the_connection_and_the_group_stay_for_the_next_version(sender: PartSender) -> None:
    channel = PairSlices()
    with closing(PartReceiver(lambda: channel)) as receiver:
        groups = set()
        for version in range(1, 4):
            got = [
                float(t[0])
                for _, t in received(receiver, sender.publish("e1", version, weights(10.0 * version)), 30)
            ]
            assert got == [10.0 * version + i for i in range(4)]
            groups.add(id(channel.group))
        assert len(groups) == 1


def test_large_tensor_is_received_at_its_destination_and_verified_there() -> None:
    sent = [
        ("small", torch.ones(7)),
        ("large", torch.arange(300_000.0)),
        ("other", torch.full((300_000,), 3.0)),
        ("last", torch.zeros(2)),
    ]
    config = WeightConfig(transport="nccl", bucket_mb=2, timeout_s=30)
    target = torch.zeros(300_000)
    with closing(part_sender(config, sent)) as sender, closing(make_receiver("nccl")) as receiver:
        manifest = sender.publish("e1", 1, sent)
        got = dict(
            (entry.name, tensor)
            for entry, tensor in received(
                receiver, manifest, 30, place=lambda name, _: target if name == "large" else None
            )
        )
    assert got["large"].data_ptr() == target.data_ptr()
    for name, tensor in sent:
        assert torch.equal(got[name], tensor)


def test_a_receiver_whose_sender_was_replaced_finds_the_new_one(sender: PartSender) -> None:
    with closing(make_receiver("nccl")) as receiver:
        assert len(list(received(receiver, sender.publish("e1", 1, weights()), 30))) == 4
        successor = part_sender(WeightConfig(transport="nccl", bucket_mb=2, timeout_s=30), weights())
        sender.close()
        try:
            manifest = successor.publish("e2", 2, weights(7.0))
            assert [float(t[0]) for _, t in received(receiver, manifest, 30)] == [7.0, 8.0, 9.0, 10.0]
        finally:
            successor.close()


def test_a_receiver_that_never_joins_is_disconnected_after_the_timeout() -> None:
    sender = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=3), weights())
    sender.publish("e1", 1, weights())
    with connect(sender) as connection:
        connection.sendall(request(1))
        assert json.loads(connection.recv(4096))["join"]
        assert connection.recv(1) == b""  # hung up on
    sender.close()


def test_a_closed_sender_is_an_error_of_the_receiver(sender: PartSender) -> None:
    manifest = sender.publish("e1", 1, weights())
    sender.close()
    with pytest.raises(WeightError, match="Connection refused"):
        list(fetch(manifest))


def test_the_location_names_host_port_and_backend(sender: PartSender) -> None:
    address, _, backend = sender.publish("e1", 1, weights()).location.partition("/")
    assert address.startswith("127.0.0.1:")
    assert backend == "gloo"


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"weights\.backend 'mpi'"):
        part_sender(WeightConfig(transport="nccl", backend="mpi"), weights())
    with pytest.raises(WeightError, match="cannot listen"):
        part_sender(WeightConfig(transport="nccl", host="192.0.2.1"), weights())


def test_changes_are_coded_for_one_receiver_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, meeting, coding = [0], threading.Barrier(2), list[None]()

    def counted(old: torch.Tensor, new: torch.Tensor) -> Changes:
        coding.append(None)
        at_once.append(len(coding))
        with suppress(threading.BrokenBarrierError):
            meeting.wait(2)
        found = encode_changes(old, new)
        coding.pop()
        return found

    monkeypatch.setattr(pairs, "encode_changes", counted)
    engines, tensors = [engine_rank() for _ in range(3)], first()
    with ExitStack() as stack:
        ranks = stack.enter_context(trainer_ranks(of_ranks(1), SHAPES, 1, dtype="bfloat16", delta=True))
        pool = stack.enter_context(ThreadPoolExecutor())
        for one in engines:
            stack.callback(one.staging.close)
        for version in range(2):
            manifest = ranks.publish("e1", version, tensors)
            list(pool.map(lambda one, found=manifest: one.fetch(found), engines))
            assert all(one.holds(tensors) for one in engines)
            tensors = changed(tensors, 0.01, version)
    assert max(at_once) == 1
