"""A supervisor for the tests to kill: `python -m tests.services.launcher.child_parent LOG` keeps one child
running, which was a spare, and another spare."""

import asyncio
import os
import sys
from pathlib import Path

from services.launcher import spare
from services.launcher.child import ServiceSpec, SupervisedProcess
from tests.services.launcher.patient_spares import PROGRAM, PatientSpares, kept_spares


async def main(log: Path) -> None:
    """Run until killed."""
    spare.REPLACE_DELAY_S = 0.0
    spares = PatientSpares(log.parent)
    environ = {name: os.environ[name] for name in ("BEHAVIOUR", "ROLL", "PYTHONPATH")}
    async with kept_spares(spares):
        spec = ServiceSpec("orphan", PROGRAM, environ)
        await SupervisedProcess(spec, log, restarts=0, spares=spares).keep_running()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
