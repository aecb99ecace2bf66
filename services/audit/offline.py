"""Recomputes a run's records from its directory, for `tether verify --numerics`.

The reference backend repeats the steps from the initial model. If its weights equal a version bit for bit,
that version's log-probabilities are recomputed, too. Exported versions are always available.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.registry import make_source
from services.audit.alarms import Alarm
from services.audit.auditor import AuditedStep, Auditor, Tensors, UnchangedSteps, wrong_versions
from services.audit.live import alarm_line, build_expectations, is_learning
from services.audit.recompute import recomputers
from services.audit.second_worker import Rewards, second_worker
from services.audit.updates import Shadow
from services.ledger.event_log.reader import LoggedStep
from services.run_record.evaluations import read_evaluations
from services.runtime.user_modules import add_user_modules
from services.settings.sections import Settings
from trainer.algorithms.registry import make_algorithm
from trainer.backends.base import StepStats
from trainer.step.train_command import TrainCommand, plan_command

STEPS = 10**9
HEAD_DIGESTS = "versions: their digests cover the head that engine.draft_lr trained, which is not made again"


class RecordedSteps(Protocol):
    """Steps of a run as recorded in its directory, see `services.tools.replay`."""

    settings: Settings

    def settings_of(self, step: int) -> Settings:
        """Return the settings under which a step was made."""

    def first_change(self) -> tuple[int, str] | None:
        """Return the first step whose settings differ from earlier steps, and the changes."""

    def step(self, step: int) -> LoggedStep:
        """Return the log's record of a step. Raises SettingsError if there is none."""

    def command(self, step: int) -> TrainCommand:
        """Return the command of a step, with its records. Raises SettingsError if they are missing."""

    def report(self, step: int) -> Mapping[str, Any]:
        """Return the step's line in metrics.jsonl; empty without one."""


@dataclass(slots=True)
class Numerics:
    """Results of auditing a run from its directory."""

    steps: int = 0
    """Number of repeated steps."""
    exact: int = 0
    """Number of steps after which the reference backend's weights equal the version bit for bit."""
    tokens: int = 0
    """Number of sampled tokens in the steps."""
    rows_left_out: int = 0
    """Number of rows whose log-probabilities were not recomputed for lack of memory."""
    stop_reason: str = ""
    """Why the next step could not be read or repeated; empty if all were."""
    not_compared_reason: str = ""
    """Why no version can be exact; empty if one can."""
    alarms: list[Alarm] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """Return the results for `tether verify --numerics --json`."""
        return {
            "numerics_steps": self.steps,
            "numerics_exact": self.exact,
            "numerics_tokens": self.tokens,
            **({"numerics_rows_left_out": self.rows_left_out} if self.rows_left_out else {}),
            **({"numerics_not_held": self.stop_reason} if self.stop_reason else {}),
            **({"numerics_not_compared": self.not_compared_reason} if self.not_compared_reason else {}),
            "alarms": [alarm_line(alarm) for alarm in self.alarms],
        }


def audit_recorded(recorded: RecordedSteps) -> Numerics:
    """Recompute all records of a run.

    Raises:
        SettingsError: the run, its model or its prompts cannot be read.
    """
    return asyncio.run(_audit(recorded))


async def _audit(recorded: RecordedSteps) -> Numerics:
    settings = next(map(recorded.settings_of, _logged_steps(recorded)), recorded.settings)
    async with second_worker(settings.reward, add_user_modules(settings)) as rewards:
        return await asyncio.to_thread(_audit_steps, recorded, settings, rewards)


def _audit_steps(recorded: RecordedSteps, settings: Settings, rewards: Rewards) -> Numerics:
    shadow, algorithm, results = Shadow(settings), make_algorithm(settings.algorithm), Numerics()
    dtype, digests = settings.engine.dtype, {}
    results.not_compared_reason = HEAD_DIGESTS if settings.engine.trained_head else ""
    exact = shadow.tensors()
    unchanged = UnchangedSteps(dtype)
    auditor = Auditor(
        recomputers(settings) if exact else None,
        share=1.0,
        dtype=dtype,
        expectations=build_expectations(settings, rewards),
        shadow=shadow,
    )
    known: dict[int, Tensors] = {0: _cast(exact, dtype)} if exact else {}
    change = recorded.first_change()
    for step in _logged_steps(recorded):
        if change is not None and step == change[0]:
            results.stop_reason = f"steps from {step} on were made under other settings: {change[1]}"
            break
        try:
            command = recorded.command(step)
        except SettingsError as error:
            results.stop_reason = str(error)
            break
        plan, report = plan_command(command, algorithm), recorded.report(step)
        digests[step + 1] = recorded.step(step).record.digest
        if report.get("batch_digest", plan.digest) != plan.digest:
            results.alarms.append(Alarm("batch", step, step, {}, "the stored batch is not the trained one"))
        stats = StepStats(
            trained_tokens=int(report.get("trained_tokens", 0)),
            skipped=report.get("skipped", ""),
            loss=report.get("loss"),
            grad_norm=report.get("grad_norm"),
        )
        pair = digests.get(step, 0), digests[step + 1]
        if (export := _export(settings, step + 1)) is not None:
            known[step + 1] = export
        recent = {version: tensors for version, tensors in known.items() if version > step - 8}
        unchanged.count_step(stats, pair, learns=is_learning(settings, step))
        results.alarms += auditor.audit(AuditedStep(command, plan, stats, pair, unchanged.count), recent)
        if exact and shadow.digest(dtype) == digests[step + 1]:
            results.exact += 1
            known[step + 1] = _cast(shadow.tensors(), dtype)
        known.pop(step - 8, None)
        results.steps += 1
        results.tokens += sum(int(sample.sampled.sum()) for sample in plan.samples)
    results.rows_left_out = auditor.rows_left_out
    results.alarms += _evaluations(settings, digests)
    shadow.close()
    return results


def _logged_steps(recorded: RecordedSteps) -> Iterator[int]:
    """Yield the numbers of the logged steps, from 0."""
    for step in range(STEPS):
        try:
            recorded.step(step)
        except SettingsError:
            return
        yield step


def _export(settings: Settings, version: int) -> Tensors | None:
    """Return the tensors of an exported version in the engines' dtype; None if it was not exported."""
    files = (settings.run_dir / "exports" / f"step_{version:08d}").glob("*.safetensors")
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
    return _cast(tensors, settings.engine.dtype) if tensors else None


def _cast(tensors: Tensors, dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def _evaluations(settings: Settings, digests: dict[int, int]) -> Iterator[Alarm]:
    lines = list(read_evaluations(settings.run_dir))
    yield from wrong_versions(lines, digests)
    if not lines and not settings.prompts.held_out:
        return
    source = make_source(settings.prompts)
    sets = held_out_sets(source, settings.prompts, settings.eval.sets, STEPS)
    texts = {name: [prompt.question for prompt in prompts] for name, prompts in sets.items()}
    yield from shared_prompts(texts, set(source.trained_texts()))


def shared_prompts(held_out: Mapping[str, Collection[str]], trained: Collection[str]) -> Iterator[Alarm]:
    """Yield an alarm per evaluation set that contains trained prompts.

    Args:
        held_out: set -> questions of its prompts.
        trained: questions of the trained prompts.
    """
    known = frozenset(trained)
    for name, texts in held_out.items():
        if shared := sorted(known.intersection(texts)):
            detail = f"{len(shared)} prompts that are scored are trained, too, the first is "
            detail += f"{shared[0][:40]!r}"
            yield Alarm("evaluation", 0, 0, {"set": name}, detail)
