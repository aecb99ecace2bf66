"""Audits the steps of a run: recomputes a share of the groups, runs sequential tests, raises alarms.

The auditor reads the run's records and the published tensors of versions. It takes no part in training: it
may lag behind or skip steps.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from protocol.rollout_view import RowView
from services.audit.alarms import Alarm, Finding
from services.audit.evidence import ALTERNATIVES, Evidence, FalseAlarms, rate_ratios
from services.audit.recompute import Recomputer, RowScores
from services.audit.records import Expectations, TrainedGroup, check_group
from services.audit.residuals import OUTLIER_RATE, NoiseFloor, Residuals
from services.audit.updates import Difference, Shadow
from services.run_record.evaluations import Evaluation
from trainer.backends.base import StepStats
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand

log = logging.getLogger("tether.audit")

FALSE_ALARM_RATE = 1e-3
"""Bound on the probability that a sequential test raises an alarm in a run without a fault."""
LEARN_ROWS = 2
"""Number of rows per version from which the noise floor is learnt."""
UNCHANGED_FAULT_STEPS = {"bfloat16": 8, "float16": 8}
"""Data type of versions -> number of consecutive unchanged steps that count as a fault, since small changes
are rounded away; 1 for float32."""
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AuditedStep:
    """Record of a committed step."""

    command: TrainCommand
    """Command of the step, with the stored records."""
    plan: StepPlan
    stats: StepStats
    digests: tuple[int, int]
    """Digests of the versions before and after the step; 0 if unknown."""
    unchanged: int = 0
    """Count from `UnchangedSteps.count_step`."""
    exported: int = 0
    """Digest of the trainer's weights after the step, in the published dtype; 0 if not computed."""


@dataclass(slots=True)
class UnchangedSteps:
    """Counter of consecutive steps that changed no weight although they should have. Must see every step."""

    dtype: str
    """Data type of versions."""
    count: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether there are more such steps than rounding explains."""
        return self.count >= UNCHANGED_FAULT_STEPS.get(self.dtype, 1)

    def count_step(self, stats: StepStats, digests: tuple[int, int], *, learns: bool) -> int:
        """Return the number of consecutive unchanged steps, including this one.

        Args:
            stats: measurements of the step.
            digests: digests of the versions before and after the step; 0 if unknown.
            learns: whether the step's learning rate is above 0.
        """
        idle = digests[0] == digests[1] and not stats.skipped and learns and bool(stats.grad_norm)
        self.count = self.count + 1 if digests[0] and idle else 0
        return self.count


def is_audited(group: int, share: float) -> bool:
    """Return whether a group is audited: always the same groups, about a `share` of all."""
    return xxhash.xxh3_64_intdigest(b"audit %d" % group) < share * 2**64


class Auditor:
    """State of an audit: evidence, and reported alarms."""

    def __init__(
        self,
        recomputer: tuple[Recomputer, Recomputer] | None,
        *,
        share: float,
        dtype: str,
        expectations: Expectations,
        shadow: Shadow | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start without evidence.

        Args:
            recomputer: models in float32 and in the comparison dtype; None: no log-probability is recomputed.
            share: share of the groups to audit, 0 to 1.
            dtype: dtype of the engines.
            expectations: parties that recompute records.
            shadow: repeats the steps; None: steps are not repeated.
            stopped: returns whether to end early; called before each group and row.
        """
        self._models, self._share, self._shadow = recomputer, share, shadow
        self._expectations = expectations
        self._dtype, self._stopped = dtype, stopped
        self._false_alarms = FalseAlarms(FALSE_ALARM_RATE)
        self.residuals = Residuals(self._false_alarms, NoiseFloor(), dtype, are_draws=expectations.are_draws)
        self._updates: dict[str, Evidence] = {}
        self._reported = set[tuple[str, str]]()
        self.rows_left_out = 0
        """Number of rows that were skipped because their pass would need too much memory."""
        self.row_s = 0.0
        """Processor time of the last version's first row, including loading its tensors, seconds."""

    @property
    def recomputes(self) -> bool:
        """Whether log-probabilities are recomputed."""
        return self._models is not None

    def set_models(self, models: tuple[Recomputer, Recomputer] | None) -> None:
        """Set the models that recompute log-probabilities; None disables recomputation."""
        self._models = models

    def audit(self, step: AuditedStep, versions: Mapping[int, Tensors]) -> list[Alarm]:
        """Audit a step; return the alarms that were not reported before.

        Args:
            step: step to audit; steps arrive in order, and some may be missing.
            versions: published tensors of the versions that are still held.
        """
        number = step.plan.step
        groups = TrainedGroup.select(step.plan, step.command, lambda group: is_audited(group, self._share))
        alarms = [*self._contradictions(step)]
        for group in groups:
            if self._stopped():
                return alarms
            alarms += [
                alarm
                for finding in check_group(group, self._expectations)
                if (alarm := self._alarm_from(finding, number))
            ]
        if self._models is not None:
            self._recompute(number, groups, versions)
            alarms += self.residuals.alarms(number)
        if self._shadow is not None:
            alarms += self._compare(step, versions)
        return alarms

    def _contradictions(self, step: AuditedStep) -> Iterator[Alarm]:
        """Yield the alarms that follow from digests."""
        number = step.plan.step
        if step.exported and step.exported != step.digests[1]:
            where, detail = (
                {"version": str(number + 1)},
                f"published version {number + 1} is not the trainer's",
            )
            yield from self._yield_if_new("published", Alarm("published", number, number, where, detail))
        if UnchangedSteps(self._dtype, step.unchanged).is_fault:
            detail = f"version {number + 1} is bit for bit version {number}, though its gradient was not 0"
            since, where = number + 1 - step.unchanged, {"version": str(number + 1)}
            yield from self._yield_if_new("no_op", Alarm("no_op", number, since, where, detail))

    def _alarm_from(self, finding: Finding, step: int) -> Alarm | None:
        origin = finding.origin
        where = {"engine": origin.engine} | ({"scorer": origin.scorer} if finding.check == "reward" else {})
        alarm = Alarm(
            finding.check, step, step, where, finding.detail, group=origin.group, sample=origin.sample
        )
        return next(self._yield_if_new(f"{finding.check} {origin.engine}", alarm), None)

    def filter_new(self, alarms: Iterable[Alarm]) -> list[Alarm]:
        """Return the alarms that were not reported before."""
        return [
            new for alarm in alarms for new in self._yield_if_new(str(sorted(alarm.where.items())), alarm)
        ]

    def _yield_if_new(self, key: str, alarm: Alarm) -> Iterator[Alarm]:
        if (alarm.check, key) not in self._reported:
            self._reported.add((alarm.check, key))
            yield alarm

    def _recompute(self, step: int, groups: Sequence[TrainedGroup], versions: Mapping[int, Tensors]) -> None:
        """Recompute the rows of groups under every held version that sampled some of their tokens."""
        assert self._models is not None
        model, comparison = self._models
        for version in sorted(
            {int(v) for g in groups for row in g.view.rows for v in row.versions[row.sampled]}
        ):
            if version not in versions or self._stopped():
                continue
            began, learnt_rows = time.thread_time(), 0
            model.serve(versions[version])
            comparison.serve(versions[version])
            for group in groups:
                temperature, scores = group.plan.temperature, dict[int, RowScores]()
                for number, row in enumerate(group.view.rows):
                    if self._stopped():
                        break
                    if version not in row.versions[row.sampled] or not self._fits(group, row):
                        continue
                    scores[number] = model.score(group.view.prompt, row, temperature)
                    if learnt_rows < LEARN_ROWS:
                        learnt_rows += 1
                        rounded = comparison.score(group.view.prompt, row, temperature, powers=False)
                        self.residuals.noise.learn(self._dtype, rounded, scores[number])
                        self.row_s = time.thread_time() - began if learnt_rows == 1 else self.row_s
                if scores:
                    self.residuals.add(step, group, version, scores)

    def _fits(self, group: TrainedGroup, row: RowView) -> bool:
        """Return whether a row's passes fit into memory; count the skipped rows, and log the first."""
        assert self._models is not None
        if all(model.fits(group.view.prompt, row) for model in self._models):
            return True
        if not self.rows_left_out:
            tokens = len(group.view.prompt) + len(row.context) + len(row.tokens)
            log.warning("audit.row_left_out group=%d tokens=%d", group.view.group, tokens)
        self.rows_left_out += 1
        return False

    def _compare(self, step: AuditedStep, versions: Mapping[int, Tensors]) -> Iterator[Alarm]:
        """Repeat the step; yield the numbers and tensors whose differences exceed rounding."""
        assert self._shadow is not None
        number = step.plan.step
        differences = list(
            self._shadow.follow(step.command, step.stats, versions.get(number), versions.get(number + 1))
        )
        tensors = [one for one in differences if one.name not in ("loss", "gradient norm")]
        wrong = [one for one in tensors if not one.relative <= self._shadow.limit]
        for name, some in (
            ("loss", [one for one in differences if one.name == "loss"]),
            ("gradient", [one for one in differences if one.name == "gradient norm"]),
            ("update", [max(tensors, key=lambda one: one.relative)] if tensors else []),
        ):
            evidence = self._updates.setdefault(name, Evidence(len(ALTERNATIVES)))
            for one in some:
                hit = not one.relative <= self._shadow.limit
                evidence.add(number, rate_ratios(int(hit), 1, OUTLIER_RATE))
            if some and evidence.log >= self._false_alarms.limit(name):
                where = _tensor_names(wrong, tensors) if name == "update" else {}
                chance = math.exp(-min(evidence.log, 700.0))
                detail = _detail(name, some[0])
                alarm = Alarm(name, number, evidence.since, where, detail, chance)
                yield from self._yield_if_new(name, alarm)


def wrong_versions(lines: Iterable[Evaluation], digests: Mapping[int, int]) -> Iterator[Alarm]:
    """Yield the evaluations that scored other weights than those of their version.

    Args:
        lines: lines of eval.jsonl.
        digests: version -> digest of its weights, for known versions.
    """
    for line in lines:
        expected = digests.get(line.version)
        if expected is not None and line.digest and line.digest != f"{expected:016x}":
            where = {"set": line.set, "version": str(line.version)}
            detail = f"weights of digest {line.digest} were scored as version {line.version}"
            yield Alarm("evaluation", line.version, line.version, where, detail)


def _detail(name: str, difference: Difference) -> str:
    return (
        f"the {name} differs from the stored batch's: {difference.name} is {difference.relative:.2g} off, "
        f"and {difference.ratio:.3g} times as large"
    )


def _tensor_names(wrong: Sequence[Difference], differences: Sequence[Difference]) -> dict[str, str]:
    """Return the names of the tensors whose update differs, or "all"."""
    if len(wrong) == len(differences):
        return {"tensors": "all"}
    return {"tensors": " ".join(sorted(one.name for one in wrong)[:4]) + (" ..." if len(wrong) > 4 else "")}
