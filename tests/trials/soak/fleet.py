"""Runs many rollout and reward workers in one process.

    python -m tests.trials.soak.fleet NAME ROLLOUTS REWARDS

They are the real services, each a task with a `Process`, sockets and an engine of its own. Reads the settings
as a service does, runs until SIGTERM, and writes RUN_DIR/census/NAME.jsonl: the number of objects in the
process over time.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from protocol.topics import Role
from services import reward, rollout
from services.runtime.errors import configure_logging
from services.runtime.process import Process, open_process
from services.settings.load import load_settings
from services.settings.sections import Settings
from tests.trials.soak.census import census

CENSUS_S = 30.0
SERVE = {Role.ROLLOUT: rollout.serve, Role.REWARD: reward.serve}


class Fleet:
    """Workers of one process."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._settings, self._name = settings, name
        self._processes: dict[Role, list[Process]] = {role: [] for role in SERVE}

    async def run(self, rollouts: int, rewards: int) -> None:
        """Run until SIGTERM; then stop the rollout workers, and when they have drained the reward workers."""
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with asyncio.TaskGroup() as tasks:
            started: dict[Role, list[asyncio.Task[None]]] = {role: [] for role in SERVE}
            for role, count in ((Role.REWARD, rewards), (Role.ROLLOUT, rollouts)):
                for index in range(count):
                    up = asyncio.Event()
                    started[role].append(
                        tasks.create_task(self._work(role, f"{role}.{self._name}.{index}", SERVE[role], up))
                    )
                    await (
                        up.wait()
                    )  # one at a time: loading a tokenizer patches transformers for the whole process
                    if stop.is_set():
                        break
            gc.collect()
            # looking again and again through all that is loaded stops every worker here at once, for a second
            gc.freeze()
            counting = tasks.create_task(self._census_loop())
            await stop.wait()
            counting.cancel()
            for role in (Role.ROLLOUT, Role.REWARD):
                for process in self._processes[role]:
                    process.stop.set()
                if started[role]:
                    await asyncio.wait(started[role])

    async def _work(
        self, role: Role, name: str, serve: Callable[[Process], Coroutine[Any, Any, None]], up: asyncio.Event
    ) -> None:
        async with open_process(role, self._settings, name) as process:
            self._processes[role].append(process)
            async with asyncio.TaskGroup() as tasks:
                heartbeat = tasks.create_task(process.heartbeat_loop())
                waiting = tasks.create_task(_set_when_up(process, up))
                await serve(process)
                heartbeat.cancel()
                waiting.cancel()

    async def _census_loop(self) -> None:
        directory = self._settings.run_dir / "census"
        await asyncio.to_thread(directory.mkdir, exist_ok=True)
        with open(directory / f"{self._name}.jsonl", "a", buffering=1) as file:
            while True:
                json.dump({"time": time.time(), "tasks": len(asyncio.all_tasks()), **census()}, file)
                file.write("\n")
                await asyncio.sleep(CENSUS_S)


async def _set_when_up(process: Process, up: asyncio.Event) -> None:
    """Set an event once a rollout worker has registered its engine, or a reward worker its endpoint."""
    while not {"engine", "endpoints"} & set(process.info):  # noqa: ASYNC110 (info is a plain dict)
        await asyncio.sleep(0.005)
    up.set()


def main() -> None:
    """Run a fleet as the arguments say."""
    name, rollouts, rewards = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["TETHER_INSTANCE"] = name
    configure_logging(name)
    uvloop.run(Fleet(load_settings(), name).run(rollouts, rewards))


if __name__ == "__main__":
    main()
