"""Evaluation while a run is on: what is scored, with which weights, and that a run does not depend on it."""

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

from services.ledger.event_log.archiver import FILE as AUDIT
from services.run_record.evaluations import BEST, SNAPSHOTS, Evaluation, read_evaluations
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import ledger_of, processes_of, tether_up, until
from tests.integration.loop import ROOT, running, settings_for

STEPS = 4
LEARNING = (
    "engine.name=hf", "trainer.backend=reference", "bound.groups_per_step=4", "sampling.samples_per_prompt=2",
    "rollout.groups_in_flight=8", "trainer.checkpoint_every=100", f"run.steps={STEPS}",
    "eval.every=2", "eval.samples=2", "eval.prompts=8",
)  # fmt: skip


async def scored(run_dir: Path, rows: int) -> list[Evaluation]:
    """The lines of eval.jsonl, once there are so many."""
    async with asyncio.timeout(300):
        while len(found := list(read_evaluations(run_dir))) < rows:  # noqa: ASYNC110 (a file is read)
            await asyncio.sleep(0.05)
    return found


async def test_every_due_version_is_scored_with_its_own_weights(tmp_path: Path) -> None:
    easy = tmp_path / "easy.jsonl"
    easy.write_text(
        "".join(json.dumps({"prompt": f"{n}" * 4 + "=", "answer": str(n)}) + "\n" for n in range(1, 6))
    )
    sets = f'eval.sets=[{{name="easy", path="{easy}"}}]'
    run_dir = tmp_path / "run"
    settings = settings_for(run_dir, "demo.toml", *LEARNING, sets, "eval.best=easy/sampled")
    async with running(settings) as live:
        rows = await scored(run_dir, 6)
        async with asyncio.timeout(60):
            while any((run_dir / SNAPSHOTS).glob("v*")):  # noqa: ASYNC110 (a folder is read)
                await asyncio.sleep(0.05)
        assert live.trained.is_set()
    assert Counter((row.version, row.set) for row in rows) == {
        (version, name): 1 for version in (0, 2, 4) for name in ("held_out", "easy")
    }
    digests = published(run_dir)
    for row in rows:
        assert row.version == 0 or int(row.digest, 16) == digests[row.version]
        assert (row.n, row.failed, row.samples) == ({"held_out": 8, "easy": 5}[row.set], 0, 2)
        assert None not in (row.greedy, row.greedy_stderr, row.sampled, row.sampled_stderr, row.truncated)
        assert set(row.pass_at_k) == {1, 2}
    best = max((row for row in rows if row.set == "easy"), key=lambda row: row.sampled or 0.0)
    assert json.loads((run_dir / BEST).read_text())["score"] == best.sampled
    assert (run_dir / "exports/best/model.safetensors").is_file()


def published(run_dir: Path) -> dict[int, int]:
    """Version -> digest of the manifest that its commit names in the event log."""
    events = [json.loads(line) for line in (run_dir / AUDIT).read_text().splitlines()]
    return {event["version"]: int(event["digest"]) for event in events if event["event"] == "commit"}


ENDLESS = (
    "run.name=demo", "run.steps=1000000", "trainer.step_s=0.02", "engine.seconds_per_token=0",
    "monitor.enabled=false", "eval.every=5", "eval.prompts=8", "eval.finish_s=1",
)  # fmt: skip


async def drain(run_dir: Path) -> None:
    async with ledger_of(run_dir) as ledger:
        await ledger.drain()


def evaluation_of(run_dir: Path) -> int | None:
    """Process id of the evaluation that lives."""
    for pid in processes_of(run_dir):
        if b"services.evaluation" in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0"):
            return pid
    return None


@slow_unless_changed(
    "services/evaluation/", "services/launcher/finishing.py", "services/trainer/snapshots.py",
)  # fmt: skip
def test_run_does_not_depend_on_its_evaluation(tmp_path: Path) -> None:
    """The evaluation is killed, continues where it was, and is stopped for good: the run ends as it would."""
    run_dir, output = tmp_path / "run", tmp_path / "up.log"
    overrides = [word for override in ENDLESS for word in ("--set", override)]
    config = str(ROOT / "deploy/configs/stragglers.toml")
    with tether_up(config, "--run-dir", str(run_dir), *overrides, output=output) as up:

        def rows() -> list[Evaluation]:
            assert up.poll() is None, output.read_text()
            return list(read_evaluations(run_dir))

        until(lambda: bool(rows()), seconds=240, what="the first evaluation")
        killed = evaluation_of(run_dir)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        before = len(rows())
        until(lambda: len(rows()) > before + 1, seconds=240, what="an evaluation after the restart")
        stopped = evaluation_of(run_dir)
        assert stopped not in (None, killed)
        os.kill(stopped, signal.SIGSTOP)
        reached = len(read_steps(run_dir / "metrics.jsonl"))
        until(
            lambda: len(read_steps(run_dir / "metrics.jsonl")) > reached + 20,
            seconds=240,
            what="steps without evaluation",
        )
        asyncio.run(drain(run_dir))
        assert up.wait(240) == 0, output.read_text()
    assert max(Counter(row.key for row in read_evaluations(run_dir)).values()) == 1
    last = read_steps(run_dir / "metrics.jsonl")[-1]["version"]
    said = output.read_text()
    assert "evaluation of version 0 on held_out: greedy" in said
    assert "up to 1 s for the evaluation of version" in said
    assert "versions were scored, not version" in said
    assert last not in {row.version for row in read_evaluations(run_dir)}
    assert len(list((run_dir / SNAPSHOTS).iterdir())) <= 3
    assert processes_of(run_dir) == []
