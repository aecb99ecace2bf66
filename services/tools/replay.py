"""Rebuilds the batch of a past step from event log and archive (`tether replay`), without services.

Under torchrun (`python -m services.tools.replay D K [SETTING ...]`) every rank of the trainer repeats the
steps from the nearest checkpoint to K, and repeats K under the given settings.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from protocol.errors import SettingsError, TetherError
from protocol.host.prctl import die_with_parent
from services.runtime.errors import configure_logging
from services.runtime.training import build_models
from services.settings.checks import check_settings
from services.settings.load import FILE, run_settings
from services.settings.sections import Settings
from services.tools.recorded.run import RecordedRun
from trainer.algorithms.registry import make_algorithm
from trainer.execution.commands import (
    CopyWeightsCommand,
    DigestWeightsCommand,
    ExitCommand,
    FinishSaveCommand,
    KeepReferenceCommand,
    RestoreCommand,
    SaveCommand,
)
from trainer.execution.executor import Executor
from trainer.execution.state_writer import CHECKPOINT
from trainer.ranks.launch import result_of_ranks
from trainer.step.train_command import TrainCommand, plan_command
from trainer.storage.checkpoints import Checkpoint, Checkpoints

OVERRIDABLE_SETTINGS = (
    "algorithm.",
    "trainer.recompute_logprobs",
    "trainer.epochs_per_batch",
    "trainer.num_mini_batches",
)
"""Prefixes of the settings that may change in a repeated step: they do not affect its sampled batch."""
COMPARED = ("loss", "grad_norm", "entropy", "clip_fraction", "ratio_mean")
"""Measurements shown for a step that is repeated under other settings."""
LOSS_TOLERANCE = 1e-4
"""Allowed difference of a repeated loss, relative to the larger of the recorded loss and 1.

The order of sums on a GPU may vary.
"""


def replay(recorded: RecordedRun, step: int) -> dict[str, Any]:
    """Rebuild the batch of a step and compare it with the trained batch.

    Returns:
        Facts for `tether replay --json`; `equal` says whether digest and trained tokens match the log.

    Raises:
        SettingsError: there is no such step, or its records have been removed.
        TetherError: a record is damaged.
    """
    logged, command = recorded.step(step), recorded.command(step)
    plan = plan_command(command, make_algorithm(recorded.settings_of(step).algorithm))
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


def retrain(
    recorded: RecordedRun, step: int, start: Checkpoint | None, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Repeat the recorded steps from a checkpoint to `step`; called on rank 0, which leads all ranks.

    Args:
        recorded: the recorded run.
        step: last step to repeat.
        start: checkpoint to start from; None: the initial model.
        overrides: settings under which the last step is repeated once more, from the same weights.

    Returns:
        Facts for `tether replay --train --json`; `equal` says whether the loss matches the recorded loss
        within `LOSS_TOLERANCE`.

    Raises:
        SettingsError: a step's records have been removed, or the checkpoint is damaged or of another layout.
    """
    settings, compared = recorded.settings_of(step), dict[str, Any]()
    with TemporaryDirectory(prefix="replay.") as state:
        with leading(settings) as executor:
            first = _repeat(executor, recorded, step, start)
            if overrides:
                save_state(executor, state)
                compared["repeated"] = _measured(executor, recorded.command(step))
                loss = compared["repeated"]["loss"]
            else:
                loss = executor.train(recorded.command(step))[1].loss
            weights = executor.lead(DigestWeightsCommand(settings.engine.dtype))
        if overrides:
            other = _repeat_with_overrides(recorded, step, state, overrides)
            compared |= {"other": other, "set": list(overrides)}
    report, recorded_weights = recorded.report(step), recorded.step(step).record.digest
    if overrides:
        compared["recorded"] = {name: report.get(name) for name in COMPARED}
    return {
        **compared,
        "from_version": first,
        "steps": step + 1 - first,
        "loss": loss,
        "recorded_loss": report.get("loss"),
        "weights_digest": str(weights),
        "recorded_weights_digest": str(recorded_weights),
        "weights_equal": weights == recorded_weights,
        "equal": "loss" in report and _is_same_loss(loss, report["loss"]),
    }


def _repeat(executor: Executor, recorded: RecordedRun, step: int, start: Checkpoint | None) -> int:
    """Repeat the steps before `step` from a checkpoint or the initial model; return the start version."""
    first = start.version if start else 0
    if start is not None:
        start.verify()
        executor.lead(RestoreCommand(str(start.directory)))
    for number in range(first, step):
        executor.train(recorded.command(number))
    return first


def _repeat_with_overrides(
    recorded: RecordedRun, step: int, state: str, overrides: Sequence[str]
) -> dict[str, Any]:
    """Repeat a step from a saved state under other settings; return its measurements."""
    other = overridden_settings(recorded.settings_of(step), overrides, recorded.file_of(step))
    with leading(other) as executor:
        executor.lead(RestoreCommand(state))
        return _measured(executor, recorded.command(step, other))


def overridden_settings(settings: Settings, overrides: Sequence[str], name: str = FILE) -> Settings:
    """Return the settings in a run's file `name` with overrides for a repeated step.

    Raises:
        SettingsError: an override is not allowed for a repeated step, or conflicts with other settings.
    """
    for override in overrides:
        if not override.startswith(OVERRIDABLE_SETTINGS):
            raise SettingsError(
                f"--set {override}: a step is made again from the samples that it had, under another "
                f"[algorithm], or {', '.join(OVERRIDABLE_SETTINGS[1:])}"
            )
    overridden = run_settings(settings.run_dir, overrides, name)
    check_settings(overridden)
    return overridden


@contextmanager
def leading(settings: Settings) -> Iterator[Executor]:
    """Lead a run's models on every rank, including the reference; the ranks exit with the block."""
    executor = Executor(build_models(settings.together))
    try:
        if settings.algorithm.kl_coef > 0:
            executor.lead(KeepReferenceCommand())
        yield executor
        executor.lead(ExitCommand())
    finally:
        executor.close()


def save_state(executor: Executor, directory: str) -> None:
    """Write the state of all ranks to a directory; called on rank 0. Raises TetherError."""
    executor.lead(SaveCommand(directory))
    executor.await_part()
    if failure := executor.lead(FinishSaveCommand()):
        raise TetherError(failure[CHECKPOINT])


def _measured(executor: Executor, command: TrainCommand) -> dict[str, float | None]:
    """Make a step; return its measurements and the L2 norm of the change of the published weights."""
    before = {name: tensor.clone() for name, tensor in executor.lead(CopyWeightsCommand("float32")).items()}
    stats = executor.train(command)[1]
    after = executor.lead(CopyWeightsCommand("float32"))
    square = sum(float((after[name].double() - old.double()).square().sum()) for name, old in before.items())
    return {**{name: getattr(stats, name) for name in COMPARED}, "update_norm": math.sqrt(square)}


def _is_same_loss(loss: float | None, recorded: float | None) -> bool:
    """Compare two losses; the loss of a step without trained tokens is None."""
    if loss is None or recorded is None:
        return loss is recorded
    return abs(loss - recorded) <= LOSS_TOLERANCE * max(1.0, abs(recorded))


def nearest_checkpoint(settings: Settings, step: int) -> Checkpoint | None:
    """Return the newest checkpoint from which `step` can be repeated; None: the initial model."""
    checkpoints = [
        point
        for point in Checkpoints(settings.run_dir / "checkpoints", keep=1).complete()
        if point.version <= step
    ]
    return checkpoints[-1] if checkpoints else None


def replay_step(
    settings: Settings, step: int, *, train: bool, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the complete report of `tether replay` on a step.

    Args:
        settings: settings of the run.
        step: step to replay.
        train: whether to add the results of `retrain`, on as many ranks as the trainer has.
        overrides: settings under which `retrain` repeats the step once more.

    Raises:
        SettingsError: the step cannot be rebuilt or repeated.
        TetherError: a record is damaged, or a rank failed.
    """
    if overrides:
        if not train:
            raise SettingsError("--set says under which settings a step is made again: add --train")
        overridden_settings(settings, overrides)  # fails before anything is loaded
    start = nearest_checkpoint(settings, step)
    first = (start.version if start else 0) if train else step
    recorded = RecordedRun(settings, range(first, step + 1))
    facts = replay(recorded, step)
    if train and (ranks := recorded.settings_of(step).parallel.world_size) > 1:
        run_dir = str(settings.run_dir)
        facts["train"] = result_of_ranks(ranks, "services.tools.replay", run_dir, str(step), *overrides)
    elif train:
        facts["train"] = retrain(recorded, step, start, overrides)
    return facts


def render_replay(facts: dict[str, Any]) -> str:
    """Format the result of `replay_step`."""
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
            *_compared(train),
        ]
    return "\n".join(lines)


def _compared(train: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines that compare the measurements of a step with those under other settings."""
    if "other" not in train:
        return
    yield f"made again with {', '.join(train['set'])}:"
    yield f"{'':16}{'recorded':>14}{'repeated':>14}{'with these':>14}"
    for name in (*COMPARED, "update_norm"):
        values = (train[kind].get(name) for kind in ("recorded", "repeated", "other"))
        cells = ("-" if value is None else f"{value:.6g}" for value in values)
        yield f"{name:16}" + "".join(f"{cell:>14}" for cell in cells)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    """Run one rank of `retrain` under torchrun: rank 0 prints the result as JSON, other ranks follow."""
    die_with_parent(signal.SIGKILL)
    settings, step, overrides = run_settings(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3:]
    configure_logging(f"replay.{os.environ['RANK']}")
    if os.environ["RANK"] != "0":
        recorded = RecordedRun(settings, range(step, step + 1))
        others = [overridden_settings(settings, overrides, recorded.file_of(step))] if overrides else []
        for followed in (recorded.settings_of(step), *others):
            executor = Executor(build_models(followed.together))
            executor.follow()
            executor.close()
        return
    start = nearest_checkpoint(settings, step)
    recorded = RecordedRun(settings, range(start.version if start else 0, step + 1))
    print(json.dumps(retrain(recorded, step, start, overrides)), flush=True)


if __name__ == "__main__":
    main()
