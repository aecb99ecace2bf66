"""A supervisor for the tests to kill: `python -m tests.services.launcher.child_parent LOG` keeps one child running."""

import asyncio
import sys
from pathlib import Path

from services.launcher.child import Child, ServiceSpec

if __name__ == "__main__":
    asyncio.run(Child(ServiceSpec("orphan", "tests.services.launcher.child_program", {}), Path(sys.argv[1]), restarts=0).keep_running())
