"""Starts the processes of a run, scales them during the run, and stops them in order."""

import asyncio
import os
from collections.abc import Awaitable, Callable

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import TetherError
from protocol.topics import Role
from services.launcher.child import ServiceSpec, SupervisedProcess
from services.launcher.credentials import withheld_from
from services.launcher.spare import Spares
from services.settings.engine_pool import pool_variables
from services.settings.load import FILE
from services.settings.processes import (
    gpu_variables,
    rollout_variables,
)
from services.settings.sections import Settings

STOP_ORDER = (
    Role.ROLLOUT,
    Role.REWARD,
    Role.TRAINER,
    Role.EVALUATION,
    Role.INGEST,
    Role.MONITOR,
    Role.TRACKING,
)
SHARED_STOP_ORDER = (Role.TRAINER, *(role for role in STOP_ORDER if role is not Role.TRAINER))
"""Order with transport `shared`: the trainer first, because it computes with an engine's memory."""
DRAIN_S = {
    Role.ROLLOUT: 20.0,
    Role.REWARD: 15.0,
    Role.TRAINER: 60.0,
    Role.EVALUATION: 5.0,
    Role.INGEST: 15.0,
    Role.MONITOR: 15.0,
}
"""Minimum seconds for a process to drain before it is killed; see `Fleet.drain_s`."""
DRAIN_MARGIN_S = {Role.ROLLOUT: 10.0, Role.REWARD: 5.0}
"""Seconds beyond `rollout.drain_s` for these processes to release their work before they are killed."""
FLUSH_MARGIN_S = 5.0
"""Seconds beyond `tracking.flush_s` before a tracking process is killed."""
OPTIONAL = (Role.EVALUATION, Role.MONITOR, Role.TRACKING)
"""Services without which the run continues."""
SCALABLE = (Role.ROLLOUT, Role.REWARD)
ROLES_WITH_SPARES = (Role.TRAINER, Role.ROLLOUT, Role.REWARD, Role.INGEST)
"""Roles with spares, since the run waits for them. A trainer of several ranks has none, because torchrun
starts the ranks."""


class Fleet:
    """Supervised processes of a run, by role."""

    def __init__(self, settings: Settings, url: str, is_over: Callable[[], Awaitable[bool]]) -> None:
        """Prepare the processes without starting them.

        Args:
            settings: settings of the run; the processes read them from RUN_DIR/settings.json.
            url: URL of the ledger, passed in the environment because it may contain a password.
            is_over: returns whether the run is over, see `SupervisedProcess`.
        """
        self._settings = settings
        self._environ = {"TETHER_REDIS_URL": url, "TETHER_CONFIG": str(settings.run_dir / FILE)}
        self._is_over = is_over
        self.spares = Spares(settings.run_dir / "logs")
        """Processes that wait to replace dead ones."""
        self.exited = asyncio.Event()
        """Set after each exit of a process."""
        self._keeping_spares: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._failures: asyncio.Queue[TetherError] = asyncio.Queue()  # at most one per process
        counts = {
            Role.INGEST: 1,
            Role.REWARD: settings.services.rewards,
            Role.TRAINER: 1,
            Role.ROLLOUT: settings.services.rollout_workers,
        }
        if settings.monitor.enabled:
            counts[Role.MONITOR] = 1
        if settings.tracking.kind:
            counts[Role.TRACKING] = len(settings.tracking.kind)
        if settings.eval.every:
            counts[Role.EVALUATION] = 1
        self.children: dict[Role, list[SupervisedProcess]] = {
            role: [self._child(role, i) for i in range(count)] for role, count in counts.items()
        }

    @property
    def trainer(self) -> SupervisedProcess:
        """Process of the trainer."""
        return self.children[Role.TRAINER][0]

    @property
    def evaluation(self) -> SupervisedProcess | None:
        """Process that scores versions; None if evaluation is off."""
        return next(iter(self.children.get(Role.EVALUATION, [])), None)

    def drain_s(self, role: Role) -> float:
        """Return the seconds for a process of a role to drain, including margins on top of settings."""
        if role is Role.TRACKING:
            return self._settings.tracking.flush_s + FLUSH_MARGIN_S
        if role in DRAIN_MARGIN_S:
            return max(DRAIN_S[role], self._settings.rollout.drain_s + DRAIN_MARGIN_S[role])
        return DRAIN_S[role]

    def start(self, tasks: asyncio.TaskGroup, wait_started: Callable[[], Awaitable[None]]) -> None:
        """Supervise every process in a task of `tasks`; keep spares after `wait_started` has returned.

        The tasks of the processes never raise; see `failure`.
        """
        self._tasks = tasks
        self._keeping_spares = tasks.create_task(self.spares.run(wait_started), name="spares")
        for group in self.children.values():
            for child in group:
                tasks.create_task(self._keep_running(child), name=child.spec.name)

    async def failure(self) -> TetherError:
        """Wait for the first process that died too often, and return its error."""
        return await self._failures.get()

    async def scale(self, role: Role, count: int) -> None:
        """Change the number of processes of a role to `count`.

        Additional processes start at once; surplus processes, the newest, are drained. If cancelled, some may
        still drain; `stop` ends them. Has no effect on a stopping fleet.
        """
        group = self.children[role]
        while len(group) < count and self._tasks is not None and not self._stopping:
            child = self._child(role, len(group))
            group.append(child)
            self._tasks.create_task(self._keep_running(child), name=child.spec.name)
        retired = group[count:]
        async with asyncio.TaskGroup() as stops:
            for child in retired:
                stops.create_task(child.stop(self.drain_s(role)), name=f"stop-{child.spec.name}")
        del group[count:]

    async def stop(self) -> None:
        """Drain all processes, role by role. Idempotent."""
        self._end_spares()
        order = SHARED_STOP_ORDER if self._settings.weights.transport == TRANSPORT else STOP_ORDER
        for role in order:
            async with asyncio.TaskGroup() as stops:
                for child in self.children.get(role, []):
                    stops.create_task(child.stop(self.drain_s(role)), name=f"stop-{child.spec.name}")

    def kill(self) -> None:
        """Kill all processes at once."""
        self._end_spares()
        for group in self.children.values():
            for child in group:
                child.kill()

    async def _keep_running(self, child: SupervisedProcess) -> None:
        try:
            await child.keep_running()
        except TetherError as error:
            self._failures.put_nowait(error)

    def _end_spares(self) -> None:
        """Kill waiting spares and start no more processes."""
        self._stopping = True
        if self._keeping_spares is not None:
            self._keeping_spares.cancel()

    def _child(self, role: Role, index: int) -> SupervisedProcess:
        name = f"{role}.{index}" if role in SCALABLE else str(role)
        if role is Role.TRACKING:
            name = f"{role}.{self._settings.tracking.kind[index]}"
        spec = ServiceSpec(
            name,
            f"services.{role}",
            {**self._environ, **self._variables(role, index)},
            finishes=role is Role.TRAINER,
            optional=role in OPTIONAL,
            registers=role is not Role.TRACKING,
            withheld=withheld_from(role, self._settings, os.environ),
        )
        if self._has_spares(role):
            self.spares.add(spec.name, spec.module, spec.environ, spec.withheld)
        return SupervisedProcess(
            spec,
            self._settings.run_dir / "logs" / f"{name}.log",
            self._settings.services.restarts,
            self._is_over,
            self.spares,
            self.exited.set,
        )

    def _has_spares(self, role: Role) -> bool:
        ranks = self._settings.trainer_ranks if role is Role.TRAINER else 1
        return self._settings.services.spares and role in ROLES_WITH_SPARES and ranks == 1

    def _variables(self, role: Role, index: int) -> dict[str, str]:
        """Return the environment variables of this process only."""
        services = self._settings.services
        if role is Role.TRACKING:
            return {"TETHER_TRACKING__KIND": self._settings.tracking.kind[index]}
        if role is Role.ROLLOUT:
            return pool_variables(services.pool, index) | rollout_variables(
                services, self._settings.engine.tensor_parallel_size, index
            )
        gpus_by_role = {
            Role.TRAINER: services.trainer_gpus,
            Role.EVALUATION: services.eval_gpus,
            Role.REWARD: services.reward_gpus,
        }
        return gpu_variables(gpus_by_role.get(role, ""))
