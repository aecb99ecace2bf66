"""Every receiver: what it delivers, what it refuses, and its deadline."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.device.bucket_handles import machine
from protocol.device.pair_group import BACKENDS
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest, manifest_digest
from protocol.weights.slices import all_of, encode_wanted
from rollout.engines.contract.models import write_shm
from rollout.weights.registry import RECEIVERS, make_receiver
from rollout.weights.sender_connection import parse_location
from tests.rollout.weights.test_connected_receiver import many_descriptors
from tests.trainer.weights.senders import at, part_sender, read_request, receive, received
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender
from trainer.weights.served.sender import PartSender

DEADLINE_S = 20.0
STRANGE_LINES = [
    b'{"join": true, "sizes": [1000, 1000]}\n%s\n' % line
    for line in (b'{"key": 1, "value": ""}', b'{"key": "a", "value": "x"}', b'{"ready": true}', b"null", b"")
]

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.randint(0, 255, (2, 2, 2), generator=generator, dtype=torch.uint8),
        "large": torch.randn(100, 10, generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def sender(tensors: Tensors) -> Iterator[PartSender]:
    made = part_sender(WeightConfig(transport="nccl", bucket_mb=1, timeout_s=DEADLINE_S), tensors.items())
    yield made
    made.close()


@pytest.fixture(params=["shm", "disk", "nccl"])
def publish(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Tensors], WeightManifest]:
    if request.param == "shm":
        return lambda tensors: write_shm(tmp_path / "v1", tensors, 1, bucket_bytes=256)
    if request.param == "disk":
        return lambda tensors: disk_sender(WeightConfig(), tmp_path).publish("e1", 1, tensors.items())
    sender: PartSender = request.getfixturevalue("sender")
    return lambda tensors: sender.publish("e1", 1, tensors.items())


def test_every_transport_delivers_the_bits(
    publish: Callable[[Tensors], WeightManifest], tensors: Tensors
) -> None:
    found = receive(publish(tensors))
    assert sorted(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_every_transport_refuses_bytes_that_do_not_match(
    publish: Callable[[Tensors], WeightManifest], tensors: Tensors
) -> None:
    manifest = publish(tensors)
    entries = [msgspec.structs.replace(e, digest=e.digest ^ (e.name == "large")) for e in manifest.tensors]
    with pytest.raises(WeightError, match="tensor large: digest"):
        receive(msgspec.structs.replace(manifest, tensors=tuple(entries), digest=manifest_digest(entries)))


def test_every_transport_checks_the_manifest_first(
    publish: Callable[[Tensors], WeightManifest], tensors: Tensors
) -> None:
    manifest = publish(tensors)
    with pytest.raises(WeightError, match="digest does not match"):
        receive(msgspec.structs.replace(manifest, digest=manifest.digest ^ 1, location="nowhere"))


def test_every_transport_ends_at_its_deadline(
    publish: Callable[[Tensors], WeightManifest], tensors: Tensors
) -> None:
    with pytest.raises(WeightError, match="within 0 s"):
        receive(publish(tensors), deadline_s=0)


@pytest.mark.parametrize(
    ("keep", "words"),
    [(None, "No such file"), (0, "0 bytes, the manifest says"), (-1, "bytes, the manifest says")],
)
def test_shm_names_a_file_that_is_missing_or_short(
    tmp_path: Path, tensors: Tensors, keep: int | None, words: str
) -> None:
    manifest = write_shm(tmp_path / "v1", tensors, 1, bucket_bytes=256)
    bucket = next(e.bucket for e in manifest.tensors if e.name == "large")
    path = tmp_path / "v1" / f"bucket_{bucket:05d}.bin"
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[:keep])
    with pytest.raises(WeightError, match=words) as error:
        receive(manifest)
    assert "large" in str(error.value)


def test_shm_survives_that_the_publisher_unlinks_what_is_mapped(tmp_path: Path, tensors: Tensors) -> None:
    manifest = write_shm(tmp_path / "v1", tensors, 1, bucket_bytes=1 << 20)
    found = received(make_receiver("shm"), manifest, DEADLINE_S)
    first = next(found)
    (tmp_path / "v1" / "bucket_00000.bin").unlink()
    rest = {entry.name: tensor for entry, tensor in [first, *found]}
    assert all(torch.equal(rest[name], tensor) for name, tensor in tensors.items())


def test_shm_refuses_an_offset_that_is_not_aligned(tmp_path: Path) -> None:
    manifest = write_shm(tmp_path / "v1", {"a": torch.ones(4)}, 1)
    entry = msgspec.structs.replace(manifest.tensors[0], offset=1)
    moved = msgspec.structs.replace(
        manifest, tensors=(entry,), buckets=(17,), digest=manifest_digest([entry])
    )
    with (tmp_path / "v1" / "bucket_00000.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(WeightError, match="tensor a at offset 1"):
        receive(moved)


def test_nccl_serves_several_receivers_and_versions(sender: PartSender, tensors: Tensors) -> None:
    sender.publish("e1", 1, tensors.items())
    manifest = sender.publish("e1", 2, (tensors | {"a": tensors["a"] + 1}).items())
    results: list[Tensors] = []
    threads = [threading.Thread(target=lambda: results.append(receive(manifest))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(results) == 3
    assert all(torch.equal(found["a"], tensors["a"] + 1) for found in results)


def test_nccl_passes_on_the_senders_refusal(sender: PartSender, tensors: Tensors) -> None:
    old = sender.publish("e1", 1, tensors.items())
    sender.publish("e1", 2, tensors.items())
    with pytest.raises(WeightError, match="refused version 1: the current version is 2"):
        receive(old)


def test_nccl_fails_on_a_sender_that_has_exited(tensors: Tensors) -> None:
    sender = part_sender(WeightConfig(transport="nccl", timeout_s=DEADLINE_S), tensors.items())
    manifest = sender.publish("e1", 1, tensors.items())
    sender.close()
    with pytest.raises(WeightError, match="refused"):
        receive(manifest)


@pytest.mark.parametrize("answer", [b"", b"hello\n", b"[]\n", b"y" * 10_000, *STRANGE_LINES])
def test_nccl_refuses_a_malformed_answer(sender: PartSender, tensors: Tensors, answer: bytes) -> None:
    manifest = sender.publish("e1", 1, tensors.items())
    asked: list[dict[str, object]] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(read_request(connection.makefile("rb")))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WeightError):
            receive(at(manifest, f"127.0.0.1:{listener.getsockname()[1]}/gloo"))
        thread.join(DEADLINE_S)
    assert asked == [
        {
            "version": 1,
            "epoch": "e1",
            "layout": layout_digest(manifest),
            "slices": len(encode_wanted(all_of(manifest), all_of(manifest))),
        }
    ]


@pytest.mark.parametrize("own", [True, False])
def test_ipc_refuses_the_memory_of_another_host(tensors: Tensors, own: bool) -> None:
    config = WeightConfig(transport="ipc", backend="gloo", timeout_s=DEADLINE_S)
    boot, name = machine()
    answer = {
        "machine": [boot if own else "other", "host-7"],
        "gpu": "host",
        "buckets": [],
        "sizes": [64, 64],
    }
    with (
        closing(part_sender(config, tensors.items())) as sender,
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor() as pool,
    ):
        manifest = at(sender.publish("e1", 1, tensors.items()), f"127.0.0.1:{listener.getsockname()[1]}/cpu")
        fetching = pool.submit(receive, manifest)
        connection, _ = listener.accept()
        with connection:
            read_request(connection.makefile("rb"))
            connection.sendall(json.dumps(answer).encode() + b"\n")
            words = "0 buckets" if own else f"memory of host host-7, and this engine is on {name}; use nccl"
            with pytest.raises(WeightError, match=words):
                fetching.result(DEADLINE_S)


def test_closing_nccl_wakes_who_waits_for_an_answer(sender: PartSender, tensors: Tensors) -> None:
    manifest = sender.publish("e1", 1, tensors.items())
    receiver = make_receiver("nccl")
    errors: list[Exception] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = at(manifest, f"127.0.0.1:{listener.getsockname()[1]}/gloo")

        def wait() -> None:
            try:
                list(received(receiver, silent, 600))
            except WeightError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        connection, _ = listener.accept()
        with connection:
            read_request(connection.makefile("rb"))  # it has asked
            receiver.close()
            thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert errors


def test_nccl_works_with_more_descriptors_than_select_supports(sender: PartSender, tensors: Tensors) -> None:
    with many_descriptors():
        found = receive(sender.publish("e1", 1, tensors.items()))
    assert found.keys() == tensors.keys()


def test_nccl_times_out_on_a_sender_that_hangs_in_the_group(sender: PartSender, tensors: Tensors) -> None:
    manifest = sender.publish("e1", 1, tensors.items())
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"join": true, "sizes": [1, 1]}\n')
                connection.makefile("rb").read()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WeightError):
            receive(
                at(manifest, f"127.0.0.1:{listener.getsockname()[1]}/gloo"),
                deadline_s=1.0,
            )
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_nccl_leaves_the_default_group_alone(sender: PartSender, tensors: Tensors) -> None:
    assert not torch.distributed.is_initialized()
    receive(sender.publish("e1", 1, tensors.items()))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "location", ["", "host", "host:1", "host:x/gloo", ":1/gloo", "host:1/mpi", "host:1/"]
)
def test_a_malformed_location_is_refused(location: str) -> None:
    with pytest.raises(WeightError, match="location"):
        parse_location(location, BACKENDS)


def test_a_location_is_split_at_the_last_colon() -> None:
    assert parse_location("fe80::1:29500/nccl", BACKENDS) == ("fe80::1", 29500, "nccl")


def test_an_unknown_transport_is_refused_with_those_there_are() -> None:
    with pytest.raises(WeightError, match=", ".join(sorted(RECEIVERS))):
        make_receiver("pigeon")
