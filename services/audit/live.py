"""Audits a run while it is on, in a thread of the trainer, and keeps the alarms in RUN_DIR/alarms.jsonl.

One published version is held at a time: it is mapped when it is published, until every group that it may
have sampled is trained, and then the next one is. So tokens of all lags are recomputed, of some versions.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.errors import TetherError
from protocol.host.memory import memory_available
from protocol.messages import WeightManifest
from rollout.engines.base import KvPolicy
from rollout.render import Renderer
from services.audit.alarms import Alarm
from services.audit.auditor import BETTER, AuditedStep, Auditor, Tensors, is_audited
from services.audit.recompute import Recomputer
from services.audit.records import Again
from services.audit.versions import READ, read_version
from services.settings.sections import Settings
from trainer.backends.base import StepStats
from trainer.functional.learning_rate import learning_rate
from trainer.step.plan import StepPlan
from trainer.step.train_command import TrainCommand

log = logging.getLogger("tether.audit")

FILE = "alarms.jsonl"
"""In the run directory, a line for each alarm."""
MOST_WAITING = 2
"""Versions to read and steps to audit that may wait."""
MEMORY_SHARE = 0.25
"""Part of the host's free memory that the models of an audit may take."""
MODEL_BYTES = 12
"""Bytes of a parameter: float32, and the data type beside it, at most float64."""
ONE_TURN = ("single_turn",)
"""Environments whose samples end as the engine ended them."""
PLAIN_TURNS = (*ONE_TURN, "gsm8k", "guess_number", "tools", "textarena")
"""Environments all of whose turns are trained."""


def again_of(settings: Settings, stop_token_ids: frozenset[int]) -> Again:
    """Return the checks that records alone allow, where the run's settings leave no other reading of them."""
    name = settings.environment.name
    plain_end = name in ONE_TURN and not settings.render.stop
    return Again(
        stop_token_ids=stop_token_ids if plain_end else frozenset(),
        whole_turns=name in PLAIN_TURNS and settings.environment.sampling != "context",
        algorithm=settings.algorithm,
    )


def is_learning(settings: Settings, step: int) -> bool:
    """Return whether a step's learning rate is above 0, and its loss trains the policy."""
    updates = step * settings.trainer.epochs_per_batch * settings.trainer.num_mini_batches
    warm = settings.needs_critic and step < settings.critic.critic_warmup_steps
    return not warm and learning_rate(settings.optimizer, updates) > 0


def recomputers(settings: Settings, parameters: int) -> tuple[Recomputer, Recomputer] | None:
    """Load the models that recompute log-probabilities.

    None if the host lacks the memory for them, or `engine.kv` = keep has tokens rest on older versions' KV.
    """
    if settings.engine.kv is KvPolicy.KEEP:
        return None
    free = memory_available()
    if parameters * MODEL_BYTES > MEMORY_SHARE * free:
        log.warning("audit.no_recompute parameters=%d free_mb=%d", parameters, free >> 20)
        return None
    kinds = torch.float32, BETTER[settings.engine.dtype]
    first, second = (Recomputer(settings.model_dir, kind, settings.lora) for kind in kinds)
    return first, second


class LiveAudit:
    """The audit of a running trainer. `hold`, `observe` and `take_alarms` return at once."""

    def __init__(self, settings: Settings) -> None:
        """Begin without a version."""
        self._settings = settings
        self._share = settings.audit.share
        self._path = settings.run_dir / FILE
        self._work: asyncio.Queue[AuditedStep | WeightManifest] = asyncio.Queue(MOST_WAITING)
        """Left by `audit_loop`; of a full one the next step, or version, is not audited."""
        self._held: tuple[int, Tensors] | None = None
        self._epoch = ""
        """Epoch of the version that is held."""
        self._auditor: Auditor | None = None
        self._loaded = False
        """Whether it was tried to load the models."""
        self._alarms: list[Alarm] = []

    def hold(self, manifest: WeightManifest) -> None:
        """Hold a version that was published, unless another one is held whose groups may still be trained."""
        last = -1
        if self._held is not None and self._epoch == manifest.epoch:
            last = self._held[0] + self._settings.bound.max_staleness
        if self._share and manifest.transport in READ and manifest.version > last and not self._work.full():
            self._work.put_nowait(manifest)

    def observe(
        self, command: TrainCommand, plan: StepPlan, stats: StepStats, digests: tuple[int, int]
    ) -> None:
        """Have a committed step audited, unless it has no audited group or an earlier step is being audited.

        Args:
            command: with the stored records.
            plan, stats: of the step.
            digests: of the versions before and after it.
        """
        audited = any(is_audited(group, self._share) for group in plan.trained_counts)
        unchanged = digests[0] == digests[1] and not stats.skipped
        if self._share and (audited or unchanged) and not self._work.full():
            self._work.put_nowait(AuditedStep(command, plan, stats, digests))

    def take_alarms(self) -> tuple[Alarm, ...]:
        """Return the alarms since the last call."""
        found, self._alarms = tuple(self._alarms), []
        return found

    async def audit_loop(self) -> None:
        """Audit the steps that were observed, until cancelled."""
        while True:
            work = await self._work.get()
            try:
                found = await asyncio.to_thread(self._carry_out, work)
            except (TetherError, RuntimeError, ValueError, OSError) as error:  # an audit never ends a run
                log.warning("audit.failed error=%r", error)
                continue
            for alarm in found:
                log.error("audit.alarm %s", alarm.sentence())
            self._alarms += found

    def _carry_out(self, work: AuditedStep | WeightManifest) -> list[Alarm]:
        if isinstance(work, AuditedStep):
            return self._audit(work, dict([self._held]) if self._held else {})
        self._epoch = work.epoch
        self._held = work.version, read_version(work, self._settings.weights.timeout_s)
        return []

    def _audit(self, step: AuditedStep, held: dict[int, Tensors]) -> list[Alarm]:
        if self._auditor is None:
            share, dtype = self._share, self._settings.engine.dtype
            again = again_of(self._settings, stop_tokens(self._settings))
            self._auditor = Auditor(None, share=share, dtype=dtype, again=again)
        if held and not self._loaded:
            self._loaded = True
            parameters = sum(tensor.numel() for tensors in held.values() for tensor in tensors.values())
            self._auditor.recompute_with(recomputers(self._settings, parameters))
        learns = is_learning(self._settings, step.plan.step)
        found = self._auditor.audit(dataclasses.replace(step, learns=learns), held)
        append_alarms(self._path, found)
        return found


def stop_tokens(settings: Settings) -> frozenset[int]:
    """Return the tokens that end a sample. Raises SettingsError."""
    return frozenset(Renderer(settings.model_dir, settings.rendering).stop_token_ids)


def append_alarms(path: Path, alarms: Sequence[Alarm]) -> None:
    """Append alarms to a file, a JSON object a line. Raises OSError."""
    if alarms:
        with path.open("ab") as file:
            file.writelines(msgspec.json.encode(line_of(alarm)) + b"\n" for alarm in alarms)


def line_of(alarm: Alarm) -> dict[str, Any]:
    """Return an alarm as a line of alarms.jsonl."""
    fields = {**dataclasses.asdict(alarm), "where": dict(alarm.where)}
    return {**fields, "reproduction": alarm.reproduction, "sentence": alarm.sentence()}
