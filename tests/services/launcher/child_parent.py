"""A supervisor for the tests to kill: `python -m tests.services.launcher.child_parent LOG` keeps one child
running."""

import asyncio
import sys
from pathlib import Path

from services.launcher.child import ServiceSpec, SupervisedProcess

if __name__ == "__main__":
    asyncio.run(
        SupervisedProcess(
            ServiceSpec("orphan", "tests.services.launcher.child_program", {}), Path(sys.argv[1]), restarts=0
        ).keep_running()
    )
