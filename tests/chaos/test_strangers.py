"""Weights that go from host to host, where the machine permits network namespaces."""

import subprocess
import sys

import pytest

from tests.integration.command import environment
from tests.integration.loop import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_on_another_host_get_weights_that_a_stranger_is_refused() -> None:
    """Needs a user that may make network namespaces; exit code 77 says that this one may not."""
    program = [sys.executable, "-m", "tests.chaos.strangers"]
    finished = subprocess.run(
        program, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "violations=0"
