"""Tests that a service raises its limit of open descriptors."""

import subprocess
import sys

PROGRAM = """
import resource
from services.runtime.main import DESCRIPTORS, raise_fd_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_fd_limit()
raise_fd_limit()
soft = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
print(resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard))
"""


def test_service_raises_its_limit_of_descriptors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "True"
