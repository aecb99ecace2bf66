"""Death (kill -9) of a trainer rank or an engine in the middle of a transfer of slices."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec
import pytest

from protocol.messages import WeightManifest
from tests.changes import WEIGHTS, slow_unless_changed
from tests.gpus import TWO_GPUS
from tests.trainer.weights.engines import ROOT, started
from tests.trainer.weights.receiver import COUNT
from tests.trainer.weights.served.rank_process import made_of, tensors
from trainer.weights.part_layout import PartReport

pytestmark = slow_unless_changed(*WEIGHTS)


@contextmanager
def rank_1(transport: str) -> Iterator[tuple["subprocess.Popen[str]", list[PartReport]]]:
    """The second of two ranks as a process, which serves version 2, and its reports of versions 1 and 2."""
    command = [sys.executable, "-m", "tests.trainer.weights.served.rank_process", transport, "1", "2"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            yield process, [msgspec.msgpack.decode(bytes.fromhex(line), type=PartReport) for line in lines]
        finally:
            process.kill()


@pytest.fixture(
    params=[
        "ipc",
        "nccl",
        pytest.param("ipc:0", marks=pytest.mark.gpu),
        pytest.param("ipc:1", marks=TWO_GPUS),
    ]
)
def transport(request: pytest.FixtureRequest) -> str:
    """The trainer's ranks are on the first GPU, the engines on GPU N of "ipc:N"."""
    return str(request.param)


def gpu_of(transport: str) -> int | None:
    _, _, gpu = transport.partition(":")
    return int(gpu) if gpu else None


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_rank_that_is_killed_in_the_middle_leaves_the_engine_as_it_was(
    stack: ExitStack, transport: str
) -> None:
    engine = stack.enter_context(started(gpu_of(transport)))
    ranks = stack.enter_context(closing(made_of(transport, 2)))
    process, reports = stack.enter_context(rank_1(transport))
    manifests: list[WeightManifest] = []
    for version, report in zip((1, 2), reports, strict=True):
        own = ranks.senders[0].fill("e1", version, ranks.pieces(0, tensors(version)))
        manifests.append(ranks.senders[0].collect([own, report], base_model=""))
        ranks.senders[0].serve_or_discard(True)
    engine.serve(manifests[1])
    live = engine.ask("digest")
    engine.tell("wait", manifests[1])
    assert engine.answer() == {"came": COUNT // 2}
    process.kill()
    process.wait()
    engine.tell("go")
    assert "not complete within" not in str(engine.answer()["error"])
    assert "error" in engine.ask("stage", manifests[1])
    assert engine.ask("digest") == live
    successors = stack.enter_context(closing(made_of(transport, 2)))
    engine.serve(successors.publish("e2", 3, tensors(3)))


def test_engine_that_is_killed_in_the_middle_harms_no_other(stack: ExitStack, transport: str) -> None:
    survivor, victim = (
        stack.enter_context(started(gpu_of(transport))),
        stack.enter_context(started(gpu_of(transport))),
    )
    ranks = stack.enter_context(closing(made_of(transport, 2)))
    manifest = ranks.publish("e1", 1, tensors(1))
    assert victim.ask("hang", manifest) == {"came": COUNT // 2}
    survivor.tell("stage", manifest)
    victim.process.kill()
    assert survivor.answer() == {"staged": 1}
    for version in (2, 3, 4):
        survivor.serve(ranks.publish("e1", version, tensors(version)))
