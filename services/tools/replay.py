"""Rebuilds the batch of a past step from event log and archive (`tether replay`), without a running service.

Under torchrun (`python -m services.tools.replay D K`) every rank of the trainer repeats the steps from the
nearest checkpoint up to K.
"""

import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.host.parent_death import die_with_parent
from services.ledger.event_log.archiver import FILE
from services.ledger.event_log.reader import LoggedStep, committed_steps, read_events
from services.ledger.interface import Taken
from services.run_record.steps import read_steps
from services.runtime.errors import configure_logging
from services.runtime.training import build_models, train_command
from services.runtime.user_modules import add_user_modules
from services.settings.load import run_settings
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm
from trainer.execution.commands import DigestWeightsCommand, ExitCommand, KeepReferenceCommand, RestoreCommand
from trainer.execution.executor import Executor
from trainer.ranks.launch import result_of_ranks
from trainer.step.train_command import TrainCommand, plan_command
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoint, Checkpoints
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords

LOSS_TOLERANCE = 1e-4
"""Allowed difference of a repeated loss, relative to the larger of the recorded one and 1.

Sums on a GPU are not always made in one order."""


class RecordedRun:
    """The steps of a run, live or finished, as its directory records them."""

    def __init__(self, settings: Settings, steps: range) -> None:
        """Read the event log.

        Args:
            settings: those of the run.
            steps: the steps that will be asked for.

        Raises:
            SettingsError: there is no log, or events are missing in it.
        """
        self.settings = settings
        add_user_modules(settings)
        self._steps = committed_steps(read_events(settings.run_dir / FILE), steps)
        self._archive = Archive(settings.run_dir / "archive")

    def step(self, step: int) -> LoggedStep:
        """Return what the log records of a step.

        Raises:
            SettingsError: the step was never made, or a rewind abandoned it.
        """
        if step not in self._steps:
            raise SettingsError(
                f"step {step} is not in the log of {self.settings.run_dir}: it was not made yet, or a rewind "
                "abandoned it"
            )
        return self._steps[step]

    def command(self, step: int) -> TrainCommand:
        """Return the command that the trainer ran for a step, with its records.

        Raises:
            SettingsError: a record is neither in the spool nor in the archive; names the likely cause.
        """
        groups = self.step(step).record.groups
        keys = [(group.group, group.token) for group in groups]
        try:
            records = self._records(step, keys)
        except MissingRecords as missing:
            held = self._archive.steps()
            raise SettingsError(
                f"step {step} cannot be built again: {missing}. "
                f"The archive holds {f'steps {held[0]} to {held[-1]}' if held else 'no step'}; "
                "trainer.archive_mb limits its size"
            ) from None
        return train_command(self.settings, Taken(step, groups), records)

    def _records(self, step: int, keys: list[tuple[int, str]]) -> list[bytes]:
        """Read records from the spool, else from the archive.

        In this order no step is missed that a live trainer moves from one to the other meanwhile.
        """
        path = self.settings.run_dir / "spool.sqlite"
        causes = {}
        if path.is_file():
            with closing(Spool(path, read_only=True)) as spool:
                try:
                    return spool.get_many(keys)
                except MissingRecords as error:
                    causes = error.causes
        try:
            return self._archive.get(step, keys)
        except MissingRecords as error:
            raise MissingRecords(causes or error.causes) from None

    def report(self, step: int) -> dict[str, Any]:
        """Return the step's line in metrics.jsonl; empty if there is none of its epoch."""
        epoch = self.step(step).record.epoch
        lines = read_steps(self.settings.run_dir / "metrics.jsonl")
        return next((line for line in lines if (line["step"], line["epoch"]) == (step, epoch)), {})


def replay(recorded: RecordedRun, step: int) -> dict[str, Any]:
    """Build the batch of a step again and compare it with the trained one.

    Returns:
        Facts as `tether replay --json` prints them; `equal` says whether digest and trained tokens match the
        log.

    Raises:
        SettingsError: there is no such step, or its records have been removed.
        TetherError: a record is damaged.
    """
    logged, command = recorded.step(step), recorded.command(step)
    plan = plan_command(command, make_algorithm(recorded.settings.algorithm))
    recorded_digest = recorded.report(step).get("batch_digest", "")
    counts = {group: {v: n for v, n in versions.items() if n} for group, versions in logged.trained.items()}
    return {
        "step": step,
        "epoch": logged.record.epoch,
        "groups": [
            {
                "group": group.group,
                "token": group.token,
                "version": group.version,
                "deadline": group.deadline,
                "bound": group.max_staleness,
                "sampled_tokens": {str(v): n for v, n in group.counts.items()},
                "trained_tokens": {str(v): n for v, n in plan.trained_counts[group.group].items()},
            }
            for group in logged.record.groups
        ],
        "samples": len(plan.samples),
        "trained_tokens": plan.stats.trained_tokens,
        "masked_tokens": plan.stats.masked_tokens,
        "lag_max": plan.stats.lag_max,
        "bound": max(group.max_staleness for group in logged.record.groups),
        "digest": plan.digest,
        "recorded_digest": recorded_digest,
        "tokens_equal": plan.trained_counts == counts,
        "equal": plan.trained_counts == counts and plan.digest == recorded_digest,
    }


def retrain(recorded: RecordedRun, step: int, start: Checkpoint | None) -> dict[str, Any]:
    """Repeat the recorded steps from a checkpoint up to `step`, on every rank; called on rank 0.

    Args:
        recorded: the run.
        step: the last step to repeat.
        start: where from; None is the initial model.

    Returns:
        Facts as `tether replay --train --json` prints them; `equal` says whether the loss is the recorded one
        within `LOSS_TOLERANCE`.

    Raises:
        SettingsError: a step's records are not there any more, or the checkpoint is damaged or of another
            layout.
    """
    settings = recorded.settings
    first = start.version if start else 0
    executor = Executor(build_models(settings))
    try:
        if settings.algorithm.kl_coef > 0:
            executor.lead(KeepReferenceCommand())
        if start is not None:
            start.verify()
            executor.lead(RestoreCommand(str(start.directory)))
        loss = [executor.train(recorded.command(number))[1].loss for number in range(first, step + 1)][-1]
        weights = executor.lead(DigestWeightsCommand(settings.engine.dtype))
        executor.lead(ExitCommand())
    finally:
        executor.close()
    report, recorded_weights = recorded.report(step), recorded.step(step).record.digest
    return {
        "from_version": first,
        "steps": step + 1 - first,
        "loss": loss,
        "recorded_loss": report.get("loss"),
        "weights_digest": str(weights),
        "recorded_weights_digest": str(recorded_weights),
        "weights_equal": weights == recorded_weights,
        "equal": "loss" in report and _is_same_loss(loss, report["loss"]),
    }


def _is_same_loss(loss: float | None, recorded: float | None) -> bool:
    """Compare two losses; a step without a trained token has None."""
    if loss is None or recorded is None:
        return loss is recorded
    return abs(loss - recorded) <= LOSS_TOLERANCE * max(1.0, abs(recorded))


def nearest_checkpoint(settings: Settings, step: int) -> Checkpoint | None:
    """Return the newest checkpoint from which `step` can be repeated; None if that is the initial model."""
    checkpoints = [
        point
        for point in Checkpoints(settings.run_dir / "checkpoints", keep=1).complete()
        if point.version <= step
    ]
    return checkpoints[-1] if checkpoints else None


def replay_step(settings: Settings, step: int, *, train: bool) -> dict[str, Any]:
    """Return everything that `tether replay` reports of a step.

    Args:
        settings: those of the run.
        step: the step.
        train: whether to add `retrain`'s results, on as many ranks as the trainer has.

    Raises:
        SettingsError: the step cannot be built again, or not be repeated.
        TetherError: a record is damaged, or a rank failed.
    """
    start = nearest_checkpoint(settings, step)
    first = (start.version if start else 0) if train else step
    recorded = RecordedRun(settings, range(first, step + 1))
    facts = replay(recorded, step)
    if train and settings.parallel.world_size > 1:
        ranks, run_dir = settings.parallel.world_size, str(settings.run_dir)
        facts["train"] = result_of_ranks(ranks, "services.tools.replay", run_dir, str(step))
    elif train:
        facts["train"] = retrain(recorded, step, start)
    return facts


def render_replay(facts: dict[str, Any]) -> str:
    """Return what `replay_step` found, as lines for people."""
    groups, digest, recorded = facts["groups"], facts["digest"], facts["recorded_digest"]
    lines = [
        f"step {facts['step']} of epoch {facts['epoch']}: {len(groups)} groups, {facts['samples']} samples",
        f"tokens: {facts['trained_tokens']} trained, {facts['masked_tokens']} masked; "
        f"lag {facts['lag_max']} of {facts['bound']} at most",
        "groups: " + ", ".join(f"{group['group']} (version {group['version']})" for group in groups),
        f"trained tokens of each group and version as in the log: {_yes(facts['tokens_equal'])}",
        f"digest {digest}, recorded {recorded or 'none'}, equal {_yes(digest == recorded)}",
    ]
    if "train" in facts:
        train = facts["train"]
        lines += [
            f"repeated {train['steps']} steps from version {train['from_version']}: loss {train['loss']!r}, "
            f"recorded {train['recorded_loss']!r}, equal {_yes(train['equal'])}",
            f"weights {train['weights_digest']}, recorded {train['recorded_weights_digest']}, "
            f"equal {_yes(train['weights_equal'])}",
        ]
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    """Be one rank of `retrain` under torchrun: rank 0 prints its result as JSON, the others follow it."""
    die_with_parent(signal.SIGKILL)
    settings, step = run_settings(Path(sys.argv[1])), int(sys.argv[2])
    configure_logging(f"replay.{os.environ['RANK']}")
    if os.environ["RANK"] != "0":
        executor = Executor(build_models(settings))
        executor.follow()
        executor.close()
        return
    start = nearest_checkpoint(settings, step)
    recorded = RecordedRun(settings, range(start.version if start else 0, step + 1))
    print(json.dumps(retrain(recorded, step, start)), flush=True)


if __name__ == "__main__":
    main()
