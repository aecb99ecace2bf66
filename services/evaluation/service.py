"""Runs `python -m services.evaluation`: scores versions on the held-out sets during the run.

Consumes: the trainer's snapshots in RUN_DIR/evaluation. Produces: eval.jsonl and the best checkpoint. Waits
for: the run in the ledger, snapshots. No process waits for it, except `tether up` for a limited time at the
end of a run.
"""

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path

from protocol.errors import PoisonedError, SettingsError, WeightError
from protocol.messages import WeightManifest
from protocol.topics import Role
from rollout.prompts.base import Prompt
from rollout.prompts.registry import make_source
from services.evaluation.best import BestCheckpoint
from services.evaluation.scoring import Scorer, evaluation_of, open_scorer
from services.observability.busy import BusyMeter
from services.run_record.evaluations import (
    SKIP_MARK,
    SNAPSHOTS,
    append_evaluation,
    describe_evaluation,
    due_versions,
    fallen_scores,
    read_evaluations,
    unscored_versions,
)
from services.runtime.main import service_main
from services.runtime.process import Process
from services.runtime.prompt_stream import check_stream
from services.runtime.user_modules import add_user_modules
from services.runtime.writing import retry_until_written
from services.settings.evaluation import BestScore, HeldOutSets, best_score, eval_engine, read_sets
from trainer.weights.version_directories import read_manifests

Key = tuple[int, str, str]
"""Version, digest and set, which are scored together once."""


def read_snapshots(run_dir: Path) -> list[WeightManifest]:
    """Return the manifests of the snapshots on disk, by version; newer epochs last."""
    return sorted(read_manifests(run_dir / SNAPSHOTS), key=attrgetter("version"))


def remove_snapshot(manifest: WeightManifest) -> None:
    """Remove a snapshot, even if the trainer is removing it at the same time."""
    shutil.rmtree(manifest.location, ignore_errors=True)


def mark_skipped(manifest: WeightManifest) -> None:
    """Mark a snapshot as skipped, for the end of the run."""
    with contextlib.suppress(OSError):  # being removed
        (Path(manifest.location) / SKIP_MARK).touch()


def remove_skip_marks(run_dir: Path) -> None:
    """Remove all marks of `mark_skipped`, so that all snapshots are tried again."""
    for path in (run_dir / SNAPSHOTS).glob(f"v*/{SKIP_MARK}"):
        path.unlink(missing_ok=True)


def score_keys(manifest: WeightManifest, sets: Collection[str]) -> list[Key]:
    """Return the keys of a version, one per set."""
    return [(manifest.version, f"{manifest.digest:016x}", name) for name in sets]


def is_scored(manifest: WeightManifest, scored: Collection[Key], sets: Collection[str]) -> bool:
    """Return whether a version was scored on every set."""
    return all(key in scored for key in score_keys(manifest, sets))


def next_snapshot(
    snapshots: Sequence[WeightManifest], scored: Collection[Key], sets: Collection[str]
) -> WeightManifest | None:
    """Return the snapshot to score next: a partly scored one, then version 0, then the newest; or None.

    Args:
        snapshots: existing snapshots, by version.
        scored: keys with a line in eval.jsonl.
        sets: names of the held-out sets.
    """
    unscored = [snapshot for snapshot in snapshots if not is_scored(snapshot, scored, sets)]
    partly_scored = [s for s in unscored if any(key in scored for key in score_keys(s, sets))]
    first = [s for s in unscored if s.version == 0]
    return next(iter([*partly_scored, *first, *unscored[-1:]]), None)


log = logging.getLogger("tether.evaluation")

POLL_S = 0.5
"""Seconds between two searches for a snapshot."""
RETRY_S = 5.0
"""Seconds before a failed staging is retried."""
ATTEMPTS = 3
"""Maximum number of attempts to stage a snapshot; then it is skipped, so that others can be scored."""


async def serve(process: Process) -> None:
    """Score versions until the process is stopped. An incompletely scored version gets no line.

    Raises:
        SettingsError: there are no held-out prompts, the prompts of `[prompts]` are not the run's, or the
            settings do not allow engine or verifiers.
        EngineError: the engine has ended.
        PoisonedError: the engine may hold mixed weights.
    """
    settings = process.settings
    if not settings.eval.every:
        raise SettingsError("setting eval.every: 0, so the trainer writes no versions to score; set it")
    add_user_modules(settings)
    source = await asyncio.to_thread(make_source, settings.prompts)
    if not await check_stream(process, source):
        return
    sets = await asyncio.to_thread(read_sets, settings, source)
    process.info["engine"] = eval_engine(settings).name
    async with asyncio.TaskGroup() as tasks:
        work = tasks.create_task(_work(process, sets), name="evaluation")
        await process.stop.wait()
        work.cancel()


async def _work(process: Process, sets: HeldOutSets) -> None:
    settings = process.settings
    async with contextlib.AsyncExitStack() as stack:
        with process.waiting("engine start"):
            opening = open_scorer(settings, process.incarnation, settings.lora)
            scorer = await stack.enter_async_context(opening)
            await process.ready("engine")
        await Evaluator(process, scorer, sets).evaluate_loop()


class Evaluator:
    """Scores the snapshots of a run, one at a time."""

    def __init__(self, process: Process, scorer: Scorer, sets: HeldOutSets) -> None:
        """Store the arguments; `sets` must not be empty."""
        self._process = process
        self._settings = process.settings
        self._run_dir = process.settings.run_dir
        self._scorer = scorer
        self._sets = sets
        choice = best_score(self._settings.eval)
        self._best = BestCheckpoint(self._settings, BestScore(choice.set or next(iter(sets)), choice.metric))
        self._failed: Counter[str] = Counter()
        """Directory of a snapshot -> number of failed attempts to stage it."""
        self._meter = BusyMeter()
        process.on_heartbeat.append(lambda: process.info.update(busy_s=round(self._meter.seconds(), 3)))

    async def evaluate_loop(self) -> None:
        """Score snapshots as they arrive, until cancelled."""
        await asyncio.to_thread(remove_skip_marks, self._run_dir)
        await asyncio.to_thread(self._best.publish)
        while True:
            snapshot = await asyncio.to_thread(self._next)
            if snapshot is None:
                await asyncio.sleep(POLL_S)
                continue
            try:
                await self._scorer.serve(snapshot)
            except PoisonedError:
                raise
            except WeightError as error:
                if not Path(snapshot.location).is_dir():  # removed by the trainer in favour of a newer one
                    continue
                self._note_failed(snapshot, error)
                await asyncio.sleep(RETRY_S)
                continue
            with self._meter.working():
                await self._evaluate(snapshot)

    def _next(self) -> WeightManifest | None:
        """Return the snapshot to score next; remove scored snapshots."""
        scored = {evaluation.key for evaluation in read_evaluations(self._run_dir)}
        snapshots = self._snapshots()
        for snapshot in snapshots:
            if is_scored(snapshot, scored, self._sets):
                remove_snapshot(snapshot)
        return next_snapshot(snapshots, scored, self._sets)

    def _snapshots(self) -> list[WeightManifest]:
        """Return the snapshots on disk, without the skipped ones."""
        return [s for s in read_snapshots(self._run_dir) if self._failed[s.location] < ATTEMPTS]

    def _note_failed(self, snapshot: WeightManifest, error: WeightError) -> None:
        self._process.metrics.count("weights.failed")
        log.warning("weights.failed version=%d error=%s", snapshot.version, error)
        self._failed[snapshot.location] += 1
        if self._failed[snapshot.location] == ATTEMPTS:
            self._process.metrics.count("evaluation.left_out")
            log.error(
                "evaluation.left_out snapshot=%s attempts=%d error=%s", snapshot.location, ATTEMPTS, error
            )
            mark_skipped(snapshot)

    async def _evaluate(self, snapshot: WeightManifest) -> None:
        """Score the served version on the sets without a line."""
        scored = {evaluation.key for evaluation in read_evaluations(self._run_dir)}
        for key, (name, prompts) in zip(score_keys(snapshot, self._sets), self._sets.items(), strict=True):
            if key not in scored:
                with self._process.working(f"version {snapshot.version} on {name}"):
                    await self._evaluate_set(snapshot, name, prompts)
        self._note_skipped(snapshot.version)

    async def _evaluate_set(self, snapshot: WeightManifest, name: str, prompts: Sequence[Prompt]) -> None:
        scores = await self._scorer.score(prompts)
        evaluation = evaluation_of(self._settings, snapshot, name, scores)
        await asyncio.to_thread(self._best.keep, evaluation, snapshot)
        await retry_until_written(self._process, partial(append_evaluation, self._run_dir, evaluation))
        await retry_until_written(self._process, self._best.publish)
        self._process.metrics.count("evaluation.scored")
        self._process.metrics.seconds.labels("evaluation").observe(evaluation.seconds)
        log.info("evaluation.scored %s", describe_evaluation(evaluation))
        for row, text in await asyncio.to_thread(fallen_scores, self._run_dir):
            if row == evaluation:
                self._process.metrics.count("evaluation.fallen")
                log.warning("evaluation.fallen %s", text)

    def _note_skipped(self, version: int) -> None:
        """Count the due versions before `version` that have no scores and will not get any."""
        rows = list(read_evaluations(self._run_dir))
        due = due_versions(self._settings.eval.every, min(row.version for row in rows), version)
        waiting = {snapshot.version for snapshot in self._snapshots()}
        skipped = [v for v in unscored_versions(rows, due) if v not in waiting]
        if len(skipped) > self._process.info.get("skipped", 0):
            log.warning("evaluation.skipped versions=%s reason=slower than eval.every", skipped[-20:])
        self._process.info["skipped"] = len(skipped)


def main() -> None:
    """Run `python -m services.evaluation`."""
    service_main(Role.EVALUATION, serve)
