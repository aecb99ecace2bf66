"""Versions that are sent as changes: who gets them, who gets all bytes, and that each ends with the same."""

import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.device.slice_digests import bits_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import Box, whole
from protocol.weights.provisional import provisional_manifest
from rollout.staging.staging import LiveAndStaged, Staging, digest_of, whole_source
from rollout.weights.nccl_pairs import PairSlices
from tests.changes import WEIGHTS, slow_unless_changed
from tests.gpus import TWO_GPUS
from tests.trainer.weights.engines import ROOT, started
from tests.trainer.weights.making import Making
from tests.trainer.weights.receiver import COUNT, SIZE
from tests.trainer.weights.served import half_exporter
from tests.trainer.weights.served.trainer_ranks import (
    DEADLINE_S,
    EngineRank,
    TrainerRanks,
    halves,
    trainer_ranks,
)
from trainer.weights.served.version_server import MAX_RECEIVERS

SHAPES = {"embed": (60, 300), "q": (96, 400), "o": (400, 96), "norm": (401,), "scale": ()}
WHOLE = sum(2 * torch.empty(shape).numel() for shape in SHAPES.values())


def of_ranks(ranks: int) -> dict[str, list[tuple[int, Box]]]:
    """Pieces as of tensor ranks: rows of embed and q, columns of o."""
    return {
        "embed": list(enumerate(halves(SHAPES["embed"], 0, ranks))),
        "q": list(enumerate(halves(SHAPES["q"], 0, ranks))),
        "o": list(enumerate(halves(SHAPES["o"], 1, ranks))),
        "norm": [(ranks - 1, whole(SHAPES["norm"]))],
        "scale": [(0, ())],
    }


def engine_rank(rank: int = 0, ranks: int = 1) -> EngineRank:
    boxes: dict[str, list[Box]] = {name: [whole(shape)] for name, shape in SHAPES.items()}
    boxes |= {name: [halves(SHAPES[name], dim, ranks)[rank]] for name, dim in (("q", 0), ("o", 1))}
    return EngineRank(boxes, SHAPES, torch.bfloat16)


def first() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def changed(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Flip a bit of a share of the elements."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, tensor in tensors.items():
        flipped = torch.rand(tensor.shape, generator=generator) < share
        found[name] = (bits_of(tensor) ^ flipped.short()).view(torch.bfloat16)
    return found


def read(engine: EngineRank) -> int:
    """Bytes of buckets and changes that came with the last version."""
    receiver = engine.staging._receiver._receiver  # type: ignore[union-attr]
    return sum(channel.read for channel, _ in receiver._connections.values())


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def two() -> Iterator[TrainerRanks]:
    with trainer_ranks(of_ranks(2), SHAPES, 2, dtype="bfloat16", delta=True) as made:
        yield made


@pytest.fixture
def engine() -> Iterator[EngineRank]:
    made = engine_rank()
    with closing(made.staging):
        yield made


@given(
    trained=st.sampled_from([1, 2, 3]),
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-4, 1e-2, 0.2, 0.9]),
            st.sets(st.integers(0, 2)),
            st.booleans(),
            st.booleans(),
        ),
        min_size=3,
        max_size=6,
    ),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_engines_that_come_and_miss_versions_have_all_bits_of_each(
    trained: int, steps: Sequence[tuple[float, set[int], bool, bool]]
) -> None:
    """Each step: the share of elements that change, who fetches, whether early, and whether they leave."""
    with ExitStack() as stack:
        ranks = stack.enter_context(
            trainer_ranks(of_ranks(trained), SHAPES, trained, dtype="bfloat16", delta=True)
        )
        engines = [engine_rank(), engine_rank(0, 2), engine_rank(1, 2)]
        for one in engines:
            stack.callback(one.staging.close)
        tensors, has = first(), [-1] * len(engines)
        for version, (share, fetching, early, leaves) in enumerate(steps):
            tensors = changed(tensors, share, version)
            is_draft = early and ranks.draft("e1", version) is not None
            manifest = ranks.senders[0].collect(ranks.fill("e1", version, tensors), base_model="")
            assert manifest.digest == digest_of(tensors)
            if is_draft:
                for number in fetching:
                    engines[number].fetch(provisional_manifest(manifest, version))
            for sender in ranks.senders:
                sender.serve_or_discard(True)
            for number in fetching:
                one, wanted = engines[number], WHOLE if number == 0 else 0
                if not is_draft:
                    one.fetch(manifest)
                assert one.staging.take(manifest).digest == manifest.digest
                assert one.holds(tensors)
                if wanted and has[number] != version - 1:
                    assert read(one) >= WHOLE
                elif has[number] == version - 1 >= 0:
                    assert read(one) <= 1.01 * WHOLE * (3.5 * share / 2 if share < 0.5 else 1) + 99
                has[number] = version
                if leaves:
                    one.staging.close()
                    has[number] = -1


def test_engine_that_has_the_version_before_gets_changes_and_others_all_bytes(
    two: TrainerRanks, engine: EngineRank
) -> None:
    late, tensors, found = engine_rank(), first(), list[int]()
    with closing(late.staging):
        for version in range(6):
            manifest = two.publish("e1", version, tensors)
            engine.fetch(manifest)
            assert engine.holds(tensors)
            found.append(read(engine))
            if version in (1, 4):
                late.fetch(manifest)
                assert late.holds(tensors)
                assert read(late) >= WHOLE
            tensors = changed(tensors, 0.01, version) if version != 2 else tensors
    assert found[0] >= WHOLE
    assert found[3] == 0
    assert all(0 < n < WHOLE / 50 for number, n in enumerate(found) if number not in (0, 3))


def test_without_the_setting_all_bytes_are_sent(engine: EngineRank) -> None:
    with trainer_ranks(of_ranks(2), SHAPES, 2, dtype="bfloat16") as ranks:
        for version in range(3):
            engine.fetch(ranks.publish("e1", version, first()))
            assert read(engine) >= WHOLE


def test_version_is_received_as_changes_while_it_is_made(two: TrainerRanks, engine: EngineRank) -> None:
    tensors = first()
    manifest = two.publish("e1", 1, tensors)
    for version in (2, 3):
        engine.fetch(manifest)
        tensors = changed(tensors, 0.01, version)
        two.draft("e1", version)
        reports = two.fill("e1", version, tensors)
        manifest = two.senders[0].collect(reports, base_model="")
        engine.fetch(provisional_manifest(manifest, version))
        assert 0 < read(engine) < WHOLE / 50
        for sender in two.senders:
            sender.serve_or_discard(True)
        assert engine.staging.take(manifest).digest == digest_of(tensors)
        assert engine.holds(tensors)


def test_draft_that_is_given_up_is_followed_by_all_bytes(two: TrainerRanks, engine: EngineRank) -> None:
    tensors = first()
    manifest = two.publish("e1", 1, tensors)
    engine.fetch(manifest)
    other = changed(tensors, 0.5, 7)
    two.draft("e1", 2)
    given_up = two.senders[0].collect(two.fill("e1", 2, other), base_model="")
    engine.fetch(provisional_manifest(given_up, 2))
    assert engine.holds(other)
    for sender in two.senders:
        sender.serve_or_discard(False)
    manifest = two.publish("e1", 2, tensors)
    engine.fetch(manifest)
    assert read(engine) >= WHOLE
    assert engine.holds(tensors)


def test_copy_that_was_damaged_is_refused_and_then_sent_whole(two: TrainerRanks, engine: EngineRank) -> None:
    tensors = first()
    engine.fetch(two.publish("e1", 1, tensors))
    engine.copy["q", whole(SHAPES["q"])][3, 5] += 1
    tensors = changed(tensors, 1e-4, 2)
    manifest = two.publish("e1", 2, tensors)
    with pytest.raises(WeightError, match="tensor q: digest"):
        engine.fetch(manifest)
    assert engine.staging.staged is None
    engine.fetch(manifest)
    assert read(engine) >= WHOLE
    assert engine.holds(tensors)


@pytest.mark.parametrize("fails", ["rank 0", "rank 1"])
def test_rank_that_leaves_in_the_middle_changes_nothing_live_and_the_next_version_comes_whole(
    engine: EngineRank, fails: str
) -> None:
    names = [key[0] for key in engine.copy]
    staged = dict(zip(names, engine.copy.values(), strict=True))
    live = {name: torch.zeros_like(tensor) for name, tensor in staged.items()}
    tensors = first()
    with trainer_ranks(of_ranks(2), SHAPES, 2, dtype="bfloat16", delta=True) as before:
        manifest = before.publish("e1", 1, tensors)
        engine.fetch(manifest)
        engine.staging.take(manifest)
        LiveAndStaged(live, staged).apply()
        manifest = before.publish("e1", 2, changed(tensors, 0.01, 2))
        before.senders[int(fails[-1])].close()
        with pytest.raises(WeightError):
            engine.fetch(manifest)
    assert digest_of(live) == digest_of(tensors)
    assert engine.staging.staged is None
    with trainer_ranks(of_ranks(3), SHAPES, 3, dtype="bfloat16", delta=True) as after:
        engine.fetch(after.publish("e2", 3, tensors))
        assert read(engine) >= WHOLE
        assert engine.holds(tensors)


def test_sender_keeps_two_versions_however_late_its_receivers_are(engine: EngineRank) -> None:
    with trainer_ranks(of_ranks(1), SHAPES, 1, dtype="bfloat16", delta=True) as ranks:
        tensors, kept = first(), list[weakref.ref[object]]()
        for version in range(5):
            manifest = ranks.publish("e1", version, tensors)
            kept.append(weakref.ref(ranks.senders[0]._server.current.streamed))  # type: ignore[union-attr]
            if version == 1:
                engine.fetch(manifest)
            tensors = changed(tensors, 0.01, version)
        # the thread that sent version 1 may not have read yet that it came
        wait_until(lambda: [one() is not None for one in kept] == [False, False, False, True, True])
        ranks.draft("e1", 5)
        assert [one() is not None for one in kept] == [False, False, False, False, True]


class TwoPlaces:
    """An engine with a tensor that fills two parameters, and one that is divided between two."""

    def __init__(self) -> None:
        shapes = {**SHAPES, "again": SHAPES["embed"]}
        self.copy = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        own = {name: whole_source(tensor) for name, tensor in self.copy.items()}
        again = own.pop("again")
        self.staging = Staging(own | {"embed": replace(again, slices=own["embed"].slices + again.slices)})


def test_tensor_without_one_destination_comes_whole_and_others_as_changes(two: TrainerRanks) -> None:
    made = TwoPlaces()
    with closing(made.staging):
        tensors = first()
        for version in range(1, 4):
            made.staging.fetch(two.publish("e1", version, tensors), 30)
            assert digest_of(made.copy) == digest_of({**tensors, "again": tensors["embed"]})
            found = read(made)  # type: ignore[arg-type]
            embed = tensors["embed"].nbytes
            assert found >= WHOLE if version == 1 else embed <= found < embed + WHOLE / 2
            tensors = changed(tensors, 0.01, version)


def test_export_that_fails_leaves_the_version_that_is_served(engine: EngineRank) -> None:
    with trainer_ranks(of_ranks(1), SHAPES, 1, dtype="bfloat16", delta=True) as ranks:
        tensors = first()
        sender = ranks.senders[0]
        engine.fetch(ranks.publish("e1", 1, tensors))
        failing = Making(changed(tensors, 0.01, 1).items())
        failing.fails = True
        failing.let()
        with pytest.raises(WeightError, match="cannot be made"):
            sender.publish("e1", 2, failing)
        tensors = changed(tensors, 0.01, 2)
        engine.fetch(ranks.publish("e1", 2, tensors))
        assert engine.holds(tensors)
        assert 0 < read(engine) < WHOLE / 10  # since version 1


@pytest.mark.parametrize(
    "message",
    [
        {}, {"bucket": 3}, {"bucket": [3, 1]}, {"bucket": [0, 9]}, {"bucket": [1, -1]}, {"bucket": [1, 7]},
        {"bucket": [4, 4]}, {"bucket": ["1", 1]}, {"bucket": [1, 1.5]},
    ],
)  # fmt: skip
def test_announcement_that_cannot_be_of_the_bucket_is_refused(message: dict[str, object]) -> None:
    words = torch.zeros(10, dtype=torch.int16)
    with pytest.raises((KeyError, TypeError, ValueError)):
        PairSlices()._announced(words, message)
    for width, count in ((1, 6), (2, 4), (4, 3), (1, 0)):
        found = PairSlices()._announced(words, {"bucket": [width, count]})
        assert found is not None
        assert len(found.data) == count * (width + 2)
    assert PairSlices()._announced(words, {"bucket": [0, 10]}) is None


@contextmanager
def exporting_half() -> Iterator[tuple["subprocess.Popen[str]", WeightManifest]]:
    command = [sys.executable, "-m", "tests.trainer.weights.served.half_exporter"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = bytes.fromhex(process.stdout.readline())
            yield process, msgspec.msgpack.decode(line, type=WeightManifest)
        finally:
            process.kill()


def test_trainer_that_is_killed_between_two_changes_leaves_what_is_live() -> None:
    shapes = half_exporter.SHAPES
    engine = EngineRank({name: [whole(shape)] for name, shape in shapes.items()}, shapes)
    with closing(engine.staging), exporting_half() as (process, manifest), ThreadPoolExecutor() as pool:
        engine.fetch(manifest)
        assert engine.holds(half_exporter.tensors(1))
        fetching = pool.submit(engine.fetch, provisional_manifest(manifest, 2))
        wanted = half_exporter.tensors(2)
        came = half_exporter.HALF[:4]  # a receiver queues the others
        wait_until(
            lambda: all(torch.equal(engine.copy[name, whole(shapes[name])], wanted[name]) for name in came)
        )
        assert 0 < read(engine) < sum(manifest.buckets) / 50
        process.kill()
        process.wait()
        with pytest.raises(WeightError, match=r"disconnected|closed|reset|peer"):
            fetching.result(DEADLINE_S)
        assert engine.staging.staged is None
        with closing(half_exporter.trainer()) as successor:
            engine.fetch(successor.publish("e2", 2, wanted))
            assert engine.holds(wanted)


@pytest.mark.parametrize(
    "gpu", [pytest.param(None, marks=slow_unless_changed(*WEIGHTS)), pytest.param(1, marks=TWO_GPUS)]
)
def test_engine_that_is_killed_between_two_changes_harms_no_other(gpu: int | None) -> None:
    shapes = {f"t{i}": (SIZE,) for i in range(COUNT)}
    boxes = {name: [(0, whole(shape))] for name, shape in shapes.items()}
    with ExitStack() as stack:
        transport = "nccl" if gpu is None else f"nccl:{gpu}"
        ranks = stack.enter_context(trainer_ranks(boxes, shapes, 1, transport, delta=True))
        survivor, victim = (stack.enter_context(started(gpu)) for _ in range(2))
        tensors = {name: torch.full(shape, 1.0) for name, shape in shapes.items()}
        manifest = ranks.publish("e1", 1, tensors)
        for one in (survivor, victim):
            one.serve(manifest)
        tensors = {
            name: tensor.clone().index_fill_(0, torch.arange(9), 2.0) for name, tensor in tensors.items()
        }
        ranks.draft("e1", 2)
        sender, making = ranks.senders[0], Making(tensors.items())
        with ThreadPoolExecutor() as pool:
            filling = pool.submit(sender.fill, "e1", 2, making)
            making.let(COUNT // 2)
            for one in (survivor, victim):
                one.tell("stage", provisional_manifest(manifest, 2))
            wait_until(lambda: sender._server._slots._value == MAX_RECEIVERS - 2)
            victim.process.kill()
            making.let()
            second = sender.collect([filling.result(DEADLINE_S)], base_model="")
        sender.serve_or_discard(True)
        assert survivor.answer() == {"staged": 2}
        assert survivor.ask("commit", second) == {"served": 2}
        assert survivor.ask("digest") == {"digest": digest_of(tensors)}
        survivor.serve(ranks.publish("e1", 3, tensors))
