"""A supervisor for the tests to kill: `python -m tests.services.child_parent LOG` keeps one child running."""

import asyncio
import sys
from pathlib import Path

from services.children import Child, ServiceSpec

if __name__ == "__main__":
    asyncio.run(Child(ServiceSpec("orphan", "tests.services.child_program", {}), Path(sys.argv[1]), restarts=0).keep_running())
