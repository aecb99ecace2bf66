"""Spares for tests in which every process that is started was a spare."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from services.launcher.session import ServiceProcess
from services.launcher.spare import Spares

PROGRAM = "tests.services.launcher.child_program"


class PatientSpares(Spares):
    """Spares that `take` waits for."""

    async def take(
        self,
        name: str,
        module: str,
        environ: Mapping[str, str],
        log_path: Path,
        withheld: frozenset[str] = frozenset(),
    ) -> ServiceProcess | None:
        self.add(name, module, environ, withheld)
        while True:
            if process := await super().take(name, module, environ, log_path, withheld):
                return process
            await asyncio.sleep(0.01)


@asynccontextmanager
async def kept_spares(spares: Spares) -> AsyncIterator[None]:
    """Keep spares for the block."""

    async def begun() -> None:
        pass

    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(spares.run(begun))
        yield
        keeping.cancel()
