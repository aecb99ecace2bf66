"""Machines of a double of a company: each a bubblewrap of its own, whose calls run as root in it."""

import itertools
import json
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.sandboxes.base import Executed, Sandbox, SandboxCommand, Start
from rollout.sandboxes.bubblewrap import BubblewrapProvider
from rollout.sandboxes.relay import Relay
from tests.contracts.sandbox_suite import CONFIG


class RootProvider(BubblewrapProvider):
    """Bubblewrap whose commands may be any user, as on a machine of one's own."""

    def _arguments(self, start: Start, relay: Relay | None) -> list[str]:
        *words, settings = super()._arguments(start, relay)
        return [*words, json.dumps({**json.loads(settings), "uid": 0, "filter": ""})]


@dataclass
class Machines:
    """Name -> what was asked for, and the machine."""

    asked: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: dict[str, Sandbox] = field(default_factory=dict)
    numbers: Any = field(default_factory=itertools.count)

    async def create(self, asked: dict[str, Any]) -> str:
        config = replace(CONFIG, memory_mb=2048, disk_mb=64, processes=512, cpu_s=10_000)
        name = f"sb-{next(self.numbers)}"
        self.asked[name] = asked
        self.running[name] = await RootProvider(config).start(Start(300))
        return name

    async def remove(self, name: str) -> bool:
        machine = self.running.pop(name, None)
        if machine is None:
            return False
        await machine.stop()
        return True

    async def run(self, name: str, command: tuple[str, ...]) -> Executed:
        return await self.running[name].exec(SandboxCommand(command, 300, 1 << 20))

    async def close(self) -> None:
        for name in list(self.running):
            await self.remove(name)
