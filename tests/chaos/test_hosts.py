"""The loop on several hosts, where the machine permits network namespaces."""

import subprocess
import sys

import pytest

from tests.chaos.hosts import NOT_PERMITTED
from tests.integration.command import environment
from tests.integration.loop import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_across_hosts_survives_cut_links() -> None:
    program = [sys.executable, "-m", "tests.chaos.hosts"]
    finished = subprocess.run(
        program, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    if finished.returncode == NOT_PERMITTED:
        pytest.skip("this machine permits no network namespaces")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "violations=0"
