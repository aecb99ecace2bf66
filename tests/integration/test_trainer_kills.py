"""kill -9 of the trainer at every point between take, step, publish, commit, checkpoint and take-over:
nothing is trained twice, no step is lost, and the weights that the next trainer replays have the digest that
was committed."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.gate import Spot, When
from tests.integration.trainer_place import Place, place

B, EVERY = 8, 4
CHANGED = slow_unless_changed(
    "services/trainer/", "services/ledger/", "services/ledger_recovery/", "services/run_record/",
    "trainer/storage/", "tests/integration/",
)  # fmt: skip
QUICK = ("commit is made, its answer is lost", "replayed, before it resumes")
POINTS: dict[str, tuple[Spot, ...]] = {
    "before the take": (Spot("take", When.BEFORE),),
    "taken, the answer is lost": (Spot("take", When.AFTER),),
    "taken, in the middle of the step": (Spot("take", When.ANSWERED),),
    "published, before the commit": (Spot("commit", When.BEFORE),),
    "commit is made, its answer is lost": (Spot("commit", When.AFTER),),
    "committed, before the journal has it": (Spot("commit", When.ANSWERED),),
    "before the checkpoint lets anything go": (Spot("checkpointed", When.BEFORE),),
    "after the checkpoint let it go": (Spot("checkpointed", When.AFTER),),
    "before it claims": (Spot("claim", When.BEFORE),),
    "claimed, the answer is lost": (Spot("claim", When.AFTER),),
    "replayed, before it resumes": (Spot("resume", When.BEFORE),),
    "resumed, the answer is lost": (Spot("resume", When.AFTER),),
    "resumed, before its weights are named": (Spot("publish", When.BEFORE),),
    "its weights are named, the answer is lost": (Spot("publish", When.AFTER),),
    "twice in a row": (Spot("commit", When.AFTER), Spot("resume", When.AFTER)),
}
"""What the gate holds, one trainer after the other, from some step on."""


async def finish(here: Place, steps: int) -> None:
    """Let a last trainer make the steps that are left."""
    last = await here.trainer()
    assert await last.wait() == 0, here.log(len(here.trainers) - 1).read_text()
    assert (await here.ledger.head()).version == steps


def check(run_dir: Path, steps: int, *, trainers: int) -> None:
    """Every step once on one path, every group trained once, and no trainer came to other weights than were
    committed."""
    assert [step["step"] for step in read_steps(run_dir / "metrics.jsonl")] == list(range(steps))
    result = verify(run_dir / "audit.jsonl")
    assert (result.violations, result.steps, result.trained) == ([], steps, steps * B)
    events = [json.loads(line) for line in (run_dir / "audit.jsonl").read_text().splitlines()]
    commits = [event for event in events if event["event"] == "commit"]
    assert [commit["step"] for commit in commits] == list(range(steps))
    groups = [group for commit in commits for group in commit["groups"]]
    assert len(groups) == len(set(groups)) == steps * B
    resumes = [event for event in events if event["event"] == "resume"]
    assert all(event["continued"] for event in resumes)
    digests = {0: resumes[0]["digest"], **{commit["version"]: commit["digest"] for commit in commits}}
    assert all(event["digest"] == digests[event["version"]] for event in resumes)
    assert len({event["epoch"] for event in events if event["event"] == "claim"}) <= trainers


async def survives(run_dir: Path, points: list[str]) -> None:
    """Kill a trainer at each point, some steps after the one before."""
    steps = 6 * len(points) + 2
    async with (
        asyncio.timeout(800),
        place(run_dir, f"run.steps={steps}", f"trainer.checkpoint_every={EVERY}") as here,
    ):
        for number, point in enumerate(points):
            for spot in POINTS[point]:
                await here.kill(
                    await here.held(
                        spot,
                        after_step=5 * number + 1 if spot.name in ("take", "commit", "checkpointed") else 0,
                    )
                )
        await finish(here, steps)
    check(run_dir, steps, trainers=len(here.trainers))


async def test_a_trainer_killed_around_its_commit_loses_no_step(tmp_path: Path) -> None:
    await survives(tmp_path, list(QUICK))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(3))
async def test_a_trainer_killed_at_every_point_loses_no_step(tmp_path: Path, part: int) -> None:
    await survives(tmp_path, list(POINTS)[part::3])


@pytest.mark.slow
async def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    """The trainer dies when all files are written and the manifest is not."""
    async with asyncio.timeout(800), place(tmp_path, "run.steps=11", "trainer.checkpoint_every=3") as here:
        await here.kill(await here.held(Spot("checkpointed", When.BEFORE), after_step=4))
        newest = max(tmp_path.glob("checkpoints/step_*/manifest.json"))
        newest.unlink()  # steps that the next checkpoint would cover may have been made meanwhile
        await finish(here, 11)
    version = int(newest.parent.name.removeprefix("step_"))
    assert f"replay.step step={version - 1}" in here.log(1).read_text()
    check(tmp_path, 11, trainers=2)


@CHANGED
async def test_a_checkpoint_of_an_abandoned_branch_is_passed_over(tmp_path: Path) -> None:
    """A trainer may finish a checkpoint after its successor rewound: the ledger has other weights for its
    version."""
    async with asyncio.timeout(800), place(tmp_path, "run.steps=11", "trainer.checkpoint_every=3") as here:
        await here.kill(await here.held(Spot("commit", When.BEFORE, nth=9)))
        path = tmp_path / "checkpoints/step_00000006/manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "digest": 1}))
        await finish(here, 11)
    replayed = [
        int(line.split("step=")[1]) for line in here.log(1).read_text().splitlines() if "replay.step" in line
    ]
    assert replayed == list(range(3, 1 + replayed[-1]))
    check(tmp_path, 11, trainers=2)


async def test_a_trainer_that_was_only_asleep_is_fenced(tmp_path: Path) -> None:
    """Stopped before its commit while another one takes over, it changes nothing and serves nothing when it
    wakes up."""
    async with (
        asyncio.timeout(800),
        place(tmp_path, "run.steps=12", f"trainer.checkpoint_every={EVERY}") as here,
    ):
        zombie = await here.held(Spot("commit", When.BEFORE, nth=4))
        zombie.send_signal(signal.SIGSTOP)
        version = (await here.ledger.head()).version
        other = await here.trainer(gated=False)
        await here.at_version(version + 2)
        here.gate.open()
        zombie.send_signal(signal.SIGCONT)
        assert await zombie.wait() == 1
        assert "another trainer has taken over" in here.log(0).read_text().splitlines()[-1]
        assert await other.wait() == 0, here.log(1).read_text()
    check(tmp_path, 12, trainers=2)
    events = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    first, second = (event["epoch"] for event in events if event["event"] == "claim")
    taken_over = next(
        event["seq"] for event in events if event["event"] == "claim" and event["epoch"] == second
    )
    assert not [
        event
        for event in events
        if event["seq"] > taken_over and event.get("epoch") == first and event["event"] != "lease"
    ]
