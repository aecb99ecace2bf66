"""Repeats a recorded run (`tether rerun`), with its event log as the schedule.

Log and records contain the groups of each step and the version of each token. So tokens are sampled again
under the same versions, with commits between the same tokens. A fork trains the recorded groups from a
version on, under other settings.
"""

import asyncio
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.codec import encode_payload
from protocol.errors import SettingsError, TetherError
from protocol.host.atomic_file import directory_written_aside, write_atomically
from protocol.messages import ScoredRollout
from reward.score import score_rollout
from reward.workers.pool import ScorePool
from services.ledger.event_log import hash_chain
from services.ledger.event_log.archiver import FILE as LOG
from services.preflight.sampling import rerun_obstacles
from services.run_record.end import PARENT, Parent
from services.run_record.steps import FILE as STEPS
from services.run_record.steps import StepLog
from services.runtime.user_modules import add_user_modules
from services.settings.load import FILE as SETTINGS
from services.settings.load import dump_settings
from services.settings.resume import EARLIER
from services.settings.sections import Settings
from services.tools.recorded.replayed_rollouts import RolloutReplayer
from services.tools.recorded.run import RecordedRun
from services.tools.replay import leading, overridden_settings, save_state
from trainer.execution.commands import CopyWeightsCommand, DigestWeightsCommand, RestoreCommand
from trainer.execution.executor import Executor
from trainer.step.report import StepClock, measured_report
from trainer.step.train_command import TrainCommand, decode_scored
from trainer.storage.archive import Archive
from trainer.storage.hf_export import write_hf
from trainer.storage.stored import StoredMessage

MAX_STEPS = 10**9
ARCHIVE_MB = 1 << 30
"""Limit of the archive's size, large enough for all steps."""
DROPS = (
    "wasted_tokens", "dropped_groups", "dropped_by_reason", "dropped_length_mean", "dropped_length_groups",
    "filtered_groups", "filtered_tokens", "filtered_share",
)  # fmt: skip
"""Fields of a step's line about dropped groups. They are not generated again, but remain in the log."""


def rerun(
    settings: Settings, to: int | None, directory: Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Repeat a run up to a version; with overrides, continue as a fork on the recorded groups.

    Args:
        settings: settings of the run.
        to: last version to repeat; None: the last version of the run.
        directory: directory of the new run, which must not exist.
        overrides: settings of the fork, as allowed by `tether replay`.

    Returns:
        `steps` (repeated), `forked` (steps), `equal` (number of repeated steps that ended with the recorded
        weights), and `run_dir`.

    Raises:
        SettingsError: the run cannot be repeated; the message says why.
        TetherError: another token was generated; nothing is written.
    """
    without_seeds = () if settings.run.deterministic else ("its samples have no seeds (run.deterministic)",)
    for reason in (*without_seeds, *rerun_obstacles(settings)):
        raise SettingsError(f"{settings.run_dir} cannot be made again: {reason}")
    if directory.exists():
        raise SettingsError(f"{directory} is there already: give another --run-dir")
    recorded = RecordedRun(settings, range(MAX_STEPS))
    to, end = _last_versions(recorded, to, is_fork=bool(overrides))
    recorded.settings = settings = _settings_up_to(recorded, end)
    forked = overridden_settings(settings, overrides, recorded.file_of(0)) if overrides else settings
    target = dataclasses.replace(forked, run=dataclasses.replace(forked.run, dir=str(directory.absolute())))
    with directory_written_aside(directory) as draft:
        dump_settings(target, draft / SETTINGS)
        if overrides and to:  # settings of the steps before the fork
            until = EARLIER.replace("*", str(recorded.step(to - 1).sequence))
            dump_settings(dataclasses.replace(settings, run=target.run), draft / until)
        parent = Parent(str(settings.run_dir), to, tuple(overrides))
        write_atomically(draft / PARENT, msgspec.json.encode(parent))
        if settings.model.scratch is not None and not settings.model.path:
            shutil.copytree(settings.model_dir, draft / settings.model_dir.name)
        making = Rerun(recorded, draft)
        asyncio.run(making.make(to, end, forked))
    return {
        "run_dir": str(directory),
        "steps": to,
        "forked": len(making.digests) - to,
        "equal": sum(making.digests[step] == recorded.step(step).record.digest for step in range(to)),
    }


def _last_versions(recorded: RecordedRun, to: int | None, *, is_fork: bool) -> tuple[int, int]:
    """Return the last version to repeat, by default the run's last one, and the new run's last version.

    Raises:
        SettingsError: the run has no such version, or the new run would have no step.
    """
    run_dir, made = recorded.settings.run_dir, len(recorded.steps)
    if not made:
        raise SettingsError(f"{run_dir} cannot be made again: no step of it is in its log")
    to, first = made if to is None else to, 0 if is_fork else 1
    if not first <= to <= made:
        raise SettingsError(f"--to {to}: give a version from {first} to {made} of {run_dir}")
    return to, made if is_fork else to


def _settings_up_to(recorded: RecordedRun, end: int) -> Settings:
    """Return the common settings of all steps up to version `end`.

    Raises:
        SettingsError: the settings changed earlier; the message says which and where.
    """
    change = recorded.first_change()
    if change is not None and end > change[0]:
        raise SettingsError(
            f"{recorded.settings.run_dir} cannot be made again beyond version {change[0]}, nor be forked: "
            f"later steps were made under other settings: {change[1]}"
        )
    return recorded.settings_of(0)


class Rerun:
    """Repetition of a run in a directory."""

    def __init__(self, recorded: RecordedRun, directory: Path) -> None:
        """Start without a step."""
        self._recorded, self._directory = recorded, directory
        self._settings = recorded.settings
        self._archive = Archive(directory / "archive", ARCHIVE_MB)
        self._lines, self._clock = StepLog(directory / STEPS), StepClock()
        self._versions = dict[int, dict[str, torch.Tensor]]()
        self.digests = list[int]()
        """Digest of the weights after each step."""

    async def make(self, to: int, end: int, fork_settings: Settings) -> None:
        """Repeat the steps up to version `to`, and train the recorded steps up to `end` as the fork."""
        settings = self._settings
        replayer = RolloutReplayer(settings, self._versions.__getitem__)
        with leading(settings) as executor:
            async with ScorePool(settings.reward, add_user_modules(settings)) as pool:
                self._clock.lap()  # loading the models is no part of a step
                for step in range(to):
                    self._store_version(executor, step)
                    with self._clock.part("wait"):
                        records = [await self._scored(replayer, one, pool) for one in self._groups(step)]
                    command = self._recorded.command(step)
                    command = msgspec.structs.replace(
                        command, records=[encode_payload(one) for one in records]
                    )
                    await asyncio.to_thread(self._train, executor, settings, command)
            await asyncio.to_thread(self._fork, executor, to, end, fork_settings)
        self._write_log(end)

    def _groups(self, step: int) -> list[ScoredRollout]:
        return [decode_scored(record) for record in self._recorded.command(step).records]

    def _store_version(self, executor: Executor, version: int) -> None:
        """Store the newest version, and drop versions under which no token remains to be sampled."""
        tensors = executor.lead(CopyWeightsCommand(self._settings.engine.dtype))
        self._versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}
        later = [step for step in self._recorded.steps if step >= version]
        used = {
            v for step in later for group in self._recorded.step(step).record.groups for v in group.counts
        }
        for old in self._versions.keys() - used - {version}:
            del self._versions[old]

    async def _scored(
        self, replayer: RolloutReplayer, recorded: ScoredRollout, pool: ScorePool
    ) -> ScoredRollout:
        rollout = await asyncio.to_thread(replayer.replay, recorded.rollout)
        scored = await score_rollout(rollout, pool, recorded.scorer)
        if not isinstance(scored, ScoredRollout):
            raise TetherError(f"group {rollout.group} could not be scored again: {scored.error}")
        return scored

    def _train(self, executor: Executor, settings: Settings, command: TrainCommand) -> None:
        """Make a step; write its records and its line of metrics.jsonl."""
        torch.set_num_threads(settings.trainer.threads)
        with self._clock.part("train"):
            plan, stats = executor.train(command)
        self.digests.append(executor.lead(DigestWeightsCommand(settings.engine.dtype)))
        record = self._recorded.step(command.step).record
        keys = [(group.group, group.token) for group in record.groups]
        self._archive.put(
            command.step,
            [StoredMessage.received(*key, data) for key, data in zip(keys, command.records, strict=True)],
        )
        report = measured_report(
            plan, stats, epoch=record.epoch, groups=len(record.groups), times=self._clock.lap()
        )
        recorded = self._recorded.report(command.step)
        drops = {name: recorded[name] for name in DROPS if name in recorded}
        self._lines.append(msgspec.structs.replace(report, **drops))

    def _fork(self, executor: Executor, to: int, end: int, fork_settings: Settings) -> None:
        """Train the recorded groups of the steps from `to` on as the fork, and export the last version."""
        if to == end:
            self._export(executor, end)
            return
        with tempfile.TemporaryDirectory(prefix="rerun.") as state:
            save_state(executor, state)
            with leading(fork_settings) as forked:
                forked.lead(RestoreCommand(state))
                self._clock.lap()
                for step in range(to, end):
                    self._train(forked, fork_settings, self._recorded.command(step, fork_settings))
                self._export(forked, end)

    def _export(self, executor: Executor, version: int) -> None:
        tensors = executor.lead(CopyWeightsCommand(self._settings.trainer.dtype))
        target = self._directory / "exports" / f"step_{version:08}"
        write_hf(iter(tensors.items()), target, self._settings.model_dir)

    def _write_log(self, end: int) -> None:
        """Write the run's event log up to a version, with the new digests."""
        made = {
            (step, self._recorded.step(step).record.epoch): str(self.digests[step]) for step in range(end)
        }
        bodies = list[bytes]()
        with (self._settings.run_dir / LOG).open("rb") as lines:
            for line in lines:
                event = json.loads(line)
                event.pop(hash_chain.LINK, None)
                if event["event"] == "commit" and (key := (event["step"], event["epoch"])) in made:
                    event["digest"] = made.pop(key)
                bodies.append(json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())
                if not made:
                    break
        hash_chain.append(self._directory / LOG, bodies)


def render_rerun(facts: Mapping[str, Any]) -> str:
    """Format the result of `rerun`."""
    lines = [f"{facts['steps']} steps generated and trained again; {facts['equal']} ended with equal weights"]
    if facts["forked"]:
        lines.append(f"{facts['forked']} steps trained on the recorded samples under other settings")
    return "\n".join([*lines, f"the run is in {facts['run_dir']}"])
