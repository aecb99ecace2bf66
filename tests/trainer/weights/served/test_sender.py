"""Versions that stay on the trainer's ranks: what arrives, and what is refused."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest
import torch
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.weights.boxes import Box, shape_of, whole
from protocol.weights.provisional import provisional_manifest
from protocol.weights.slices import decode_wanted, encode_wanted
from rollout.staging.staging import digest_of
from rollout.weights.checked import ManifestCheck
from rollout.weights.registry import make_receiver
from rollout.weights.sender_connection import parse_location
from tests.trainer.weights.engines import ROOT
from tests.trainer.weights.served.memory_of_rank import made_of
from tests.trainer.weights.served.trainer_ranks import (
    DEADLINE_S,
    EngineRank,
    TrainerRanks,
    halves,
    index,
    tensor_ranks,
    trainer_ranks,
)
from trainer.weights.part_layout import PartReport
from trainer.weights.served.nccl_pairs import PairChannel
from trainer.weights.served.receiver_connection import ReceiverConnection

SHAPES = {"embed": (131, 300), "q": (96, 400), "o": (400, 96), "norm": (400,), "scale": (), "none": (0, 3)}
"""Rows that share rows of the digest with others, columns, a replicated vector, a scalar, an empty one."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def of_ranks(ranks: int) -> dict[str, list[tuple[int, Box]]]:
    """Pieces as of tensor ranks: rows of q, columns of o, uneven rows of the embedding."""
    cut = -(-131 // ranks)
    rows = [((i * cut, min(131, (i + 1) * cut)), (0, 300)) for i in range(ranks)]
    return {
        "embed": list(enumerate(rows)),
        "q": list(enumerate(halves(SHAPES["q"], 0, ranks))),
        "o": list(enumerate(halves(SHAPES["o"], 1, ranks))),
        "norm": [(ranks - 1, whole(SHAPES["norm"]))],
        "scale": [(0, ())],
        "none": [(0, whole(SHAPES["none"]))],
    }


def engines(ranks: int, dtype: torch.dtype = torch.float32, wider: Container[str] = ()) -> list[EngineRank]:
    """Ranks of an engine that pads the vocabulary, so that its rows are cut elsewhere."""
    cut = 136 // ranks
    found = []
    for i in range(ranks):
        boxes: dict[str, list[Box]] = {
            "embed": [((i * cut, min(131, (i + 1) * cut)), (0, 300))],
            "q": [halves(SHAPES["q"], 0, ranks)[i]],
            "o": [halves(SHAPES["o"], 1, ranks)[i]],
            "norm": [whole(SHAPES["norm"])],
            "scale": [()],
            "none": [whole(SHAPES["none"])],
        }
        found.append(EngineRank(boxes, SHAPES, dtype, wider))
    return found


@pytest.fixture(params=["ipc", "nccl"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def two(transport: str) -> Iterator[TrainerRanks]:
    with trainer_ranks(of_ranks(2), SHAPES, 2, transport) as made:
        yield made


@pytest.fixture
def drafting() -> Iterator[TrainerRanks]:
    """Two ranks from which a version may be received while it is made."""
    with trainer_ranks(of_ranks(2), SHAPES, 2) as made:
        yield made


@pytest.mark.parametrize(("trained", "served"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_every_engine_rank_gets_its_slices_and_the_digest_of_the_whole(
    trained: int, served: int, transport: str
) -> None:
    with trainer_ranks(of_ranks(trained), SHAPES, trained, transport) as ranks:
        found = engines(served)
        for version in (1, 2, 3, 4):
            sent = tensors(version)
            manifest = ranks.publish("e1", version, sent)
            ManifestCheck()(manifest)
            assert manifest.digest == digest_of(sent)
            for engine in found:
                assert engine.fetch(manifest) == sum(tensor.nbytes for tensor in sent.values())
                assert engine.staging.take(manifest).digest == manifest.digest
                assert engine.holds(sent)
        for engine in found:
            engine.staging.close()


@pytest.mark.parametrize("delta", [False, True])
def test_ranks_with_wider_tensors_have_the_values_of_each_version(transport: str, delta: bool) -> None:
    found = engines(2, torch.bfloat16, {"q", "norm", "scale"})  # a half, all of a vector, and a scalar
    with trainer_ranks(of_ranks(2), SHAPES, 2, transport, "bfloat16", delta) as ranks:
        for version in (1, 2, 3):
            sent = {name: tensor.bfloat16() for name, tensor in tensors(version // 2).items()}
            is_draft = version > 1 and ranks.draft("e1", version) is not None
            manifest = ranks.senders[0].collect(ranks.fill("e1", version, sent), base_model="")
            if is_draft:
                found[0].fetch(provisional_manifest(manifest, version))
            for sender in ranks.senders:
                sender.serve_or_discard(True)
            for engine in found[is_draft:]:
                engine.fetch(manifest)
            for engine in found:
                assert engine.staging.take(manifest).digest == manifest.digest
                assert engine.holds(sent)
    for engine in found:
        engine.staging.close()


def test_engine_ranks_follow_a_trainer_that_is_started_again_with_other_ranks(transport: str) -> None:
    found = engines(2)
    for version, trained in enumerate((2, 3, 1, 2), 1):
        with trainer_ranks(of_ranks(trained), SHAPES, trained, transport) as ranks:
            for sent in (tensors(version), tensors(10 + version)):
                manifest = ranks.publish(f"e{trained}", version, sent)
                for engine in found:
                    engine.fetch(manifest)
                    assert engine.holds(sent)
    for engine in found:
        engine.staging.close()


def test_equal_replicas_are_sent_by_one_rank_alone(two: TrainerRanks) -> None:
    manifest = two.publish("e1", 1, tensors(1))
    holders = [
        [rank for rank, part in enumerate(manifest.parts) for piece in part.pieces if piece.tensor == number]
        for number in range(len(manifest.tensors))
    ]
    assert holders == [[0, 1], [0, 1], [0, 1], [1], [0], [0]]


def test_late_engine_gets_the_current_version_and_no_other(two: TrainerRanks) -> None:
    first, second = two.publish("e1", 1, tensors(1)), two.publish("e1", 2, tensors(2))
    (engine,) = engines(1)
    with pytest.raises(WeightError, match="the current version is 2 of epoch e1"):
        engine.fetch(first)
    assert engine.staging.staged is None
    engine.fetch(second)
    assert engine.holds(tensors(2))
    engine.staging.close()


def test_version_that_a_rank_could_not_make_is_served_by_none(two: TrainerRanks) -> None:
    before = two.publish("e1", 1, tensors(1))
    reports = two.fill("e1", 2, tensors(2) | {"q": torch.zeros(2, 2)})
    assert [bool(report.error) for report in reports] == [True, True]
    with pytest.raises(WeightError, match="version 2: rank 0: q: a piece of"):
        two.senders[0].collect(reports, base_model="")
    for sender in two.senders:
        sender.serve_or_discard(False)
    (engine,) = engines(1)
    engine.fetch(before)
    assert engine.holds(tensors(1))
    after = two.publish("e1", 2, tensors(2))
    engine.fetch(after)
    assert engine.holds(tensors(2))
    engine.staging.close()


@pytest.mark.parametrize("name", ["embed", "q", "o", "norm"])
@pytest.mark.parametrize("served", [1, 2])
def test_bytes_that_a_rank_changed_after_it_published_are_refused(
    name: str, served: int, transport: str
) -> None:
    """Whether they are sent or not: the sums of the rest are computed from the same copy."""
    with trainer_ranks(of_ranks(1), SHAPES, 1, transport) as ranks:
        manifest = ranks.publish("e1", 1, tensors(1))
        number = list(SHAPES).index(name)
        changed = ranks.senders[0]._server.current.streamed.bucket(number, 0)  # type: ignore[union-attr]
        assert changed is not None
        changed.view(-1)[-1] += 1
        for engine in engines(served):
            with pytest.raises(WeightError, match=f"tensor {name}: digest"):
                engine.fetch(manifest)
            assert engine.staging.staged is None
            engine.staging.close()


def test_ranks_of_two_versions_are_not_mixed(two: TrainerRanks) -> None:
    """One rank serves other weights under the version's number."""
    manifest = two.publish("e1", 1, tensors(1))
    other = two.senders[1]
    other.fill("e1", 1, two.pieces(1, tensors(2)))
    other.serve_or_discard(True)
    for engine in engines(2):
        with pytest.raises(WeightError, match="digest"):
            engine.fetch(manifest)
        assert engine.staging.staged is None
        engine.staging.close()


def test_version_is_received_while_it_is_made_and_committed_under_its_manifest_only(
    drafting: TrainerRanks,
) -> None:
    before = drafting.publish("e1", 1, tensors(1))
    said = drafting.draft("e1", 2)
    assert said is not None
    assert (said.version, said.like) == (2, 1)
    draft = provisional_manifest(before, 2)
    found = engines(2)
    with ThreadPoolExecutor() as pool:
        fetched = [pool.submit(engine.fetch, draft) for engine in found]
        manifest = drafting.publish("e1", 2, tensors(2))
        for done in fetched:
            done.result(DEADLINE_S)
    for engine in found:
        with pytest.raises(WeightError, match="not staged"):
            engine.staging.take(draft)
        assert engine.staging.take(manifest).digest == manifest.digest
        assert engine.holds(tensors(2))
        engine.staging.close()


def test_receivers_of_a_draft_that_is_not_made_are_disconnected(drafting: TrainerRanks) -> None:
    before = drafting.publish("e1", 1, tensors(1))
    assert drafting.draft("e2", 2) is None
    drafting.draft("e1", 2)
    (engine,) = engines(1)
    with ThreadPoolExecutor() as pool:
        fetched = pool.submit(engine.fetch, provisional_manifest(before, 2))
        drafting.fill("e1", 2, tensors(2))
        for sender in drafting.senders:
            sender.serve_or_discard(False)
        with pytest.raises(WeightError, match="version 2"):
            fetched.result(DEADLINE_S)
    assert engine.staging.staged is None
    engine.fetch(drafting.publish("e1", 3, tensors(3)))
    assert engine.holds(tensors(3))
    engine.staging.close()


def test_version_is_not_announced_where_engines_map_the_memory_of_the_last_two() -> None:
    with trainer_ranks(of_ranks(2), SHAPES, 2, "ipc") as ranks:
        ranks.publish("e1", 1, tensors(1))
        assert ranks.draft("e1", 2) is None


def test_memory_that_an_engine_rank_reads_is_not_written(two: TrainerRanks) -> None:
    """It reads version 2 while two more are published, and has all of version 2 or nothing."""
    two.publish("e1", 1, tensors(1))
    manifest = two.publish("e1", 2, tensors(2))
    receiver = make_receiver(manifest.transport)
    wanted = {name: (whole(shape),) for name, shape in SHAPES.items()}
    found = receiver.slices(manifest, wanted, DEADLINE_S)
    first, *_ = next(found)
    assert torch.equal(first.tensor, tensors(2)[first.entry.name][index(first.box)])
    two.publish("e1", 3, tensors(3))
    for sender in two.senders:
        sender._memory._timeout_s = 0.01  # type: ignore[attr-defined]
    reports = two.fill("e1", 4, tensors(4))
    problems = [report.error for report in reports if report.error]
    assert torch.equal(first.tensor, tensors(2)[first.entry.name][index(first.box)])
    if manifest.transport == "ipc":
        assert problems == ["rank 1: 1 engine ranks still copy the version before the last after 0.01 s"]
    with pytest.raises(WeightError, match="the current version is 3"):
        list(found)
    receiver.close()


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (b"\xff", "cannot be read"),
        (encode_wanted({"other": ()}), "cannot be served"),
        (encode_wanted({"q": (((0, 97), (0, 400)),)}), "are not in"),
        (encode_wanted({"q": (((0, 96), (0, 400)), ((0, 1), (0, 1)))}), "requests elements of q twice"),
    ],
)
def test_slices_that_are_not_the_versions_are_refused(
    two: TrainerRanks, wanted: bytes, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = two.publish("e1", 1, tensors(1))
    with pytest.raises(WeightError, match=problem):
        decode_wanted(wanted, manifest)
    host, port, _ = parse_location(manifest.location, ("cpu", "gloo"))
    with socket.create_connection((host, port), timeout=DEADLINE_S) as connection:
        request = {"version": 1, "epoch": "e1", "slices": 1 << 40}
        connection.sendall(json.dumps(request).encode() + b"\n")
        assert connection.recv(1) == b""
    (engine,) = engines(1)
    engine.fetch(manifest)
    assert engine.holds(tensors(1))
    engine.staging.close()


def test_manifest_whose_pieces_leave_a_hole_is_refused(two: TrainerRanks) -> None:
    manifest = two.publish("e1", 1, tensors(1))
    parts = (replace(manifest.parts[0], pieces=manifest.parts[0].pieces[1:]), manifest.parts[1])
    (engine,) = engines(1)
    with pytest.raises(WeightError, match="tensor embed: the pieces of the trainer's ranks do not cover"):
        engine.fetch(replace(manifest, parts=parts))
    assert engine.staging.staged is None


class SentAtOnce:
    """Stands in for a process group, and for the work that it queues: nobody receives."""

    def broadcast(self, _: list[torch.Tensor], __: object) -> "SentAtOnce":
        return self

    def wait(self) -> None:
        pass


@pytest.mark.gpu
def test_versions_sent_to_one_receiver_take_the_memory_of_the_first_one_again() -> None:
    shapes = {"w": (1024, 1024)}
    near, far = socket.socketpair()
    with near, far, trainer_ranks({"w": [(0, whole(shapes["w"]))]}, shapes, 1, "nccl:0") as ranks:
        ranks.publish("e1", 1, {"w": torch.ones(shapes["w"])})
        (sender,) = ranks.senders
        served, channel = sender._server.current, sender._memory.channel()
        assert served is not None
        assert isinstance(channel, PairChannel)
        channel._group = SentAtOnce()
        connection = ReceiverConnection(near)
        connection.wanted = encode_wanted({"w": (whole(shapes["w"]),)})
        reserved = []
        for _ in range(40):
            channel._send_version(connection, served, None, time.monotonic() + DEADLINE_S)
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[-1] == reserved[0]


@pytest.mark.slow
def test_rank_that_publishes_takes_memory_for_its_part_and_a_few_buckets() -> None:
    mib, ranks = 512, 4
    command = [sys.executable, "-m", "tests.trainer.weights.served.memory_of_rank", str(mib), str(ranks)]
    with (
        closing(made_of(mib, ranks)) as made,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        theirs = msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=PartReport)
        publishing = json.loads(process.stdout.readline())
        reports = []
        for rank, sender in enumerate(made.senders[:-1]):
            held = [
                (made.publication.names[piece.tensor], torch.full(shape_of(piece.box), float(i)))
                for i, piece in enumerate(made.publication.parts[rank])
            ]
            reports.append(sender.fill("e1", 1, held))
        manifest = made.senders[0].collect([*reports, theirs], base_model="")
        for sender in made.senders[:-1]:
            sender.serve_or_discard(True)
        shapes = dict(zip(made.publication.names, made.publication.shapes, strict=True))
        for boxes in tensor_ranks(shapes, 2):
            engine = EngineRank(boxes, shapes)
            engine.fetch(manifest)
            engine.staging.close()
        process.stdin.write("\n")
        process.stdin.flush()
        sending = json.loads(process.stdout.readline())
    print(f"{mib} MiB over {ranks} ranks: publishing +{publishing:.0f} MiB, sending +{sending:.0f} MiB")
    assert publishing < mib / ranks + 32
    assert sending < 64
