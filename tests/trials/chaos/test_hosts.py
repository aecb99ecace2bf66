"""Runs across hosts, each in a network namespace. Needs a user that may make them."""

import subprocess
import sys

import pytest

from tests.integration.command import environment
from tests.integration.loop import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", ["hosts", "trainer_hosts", "strangers"])
def test_a_run_across_hosts_keeps_its_promises(program: str) -> None:
    """Cut links; the loss of each host of the trainer; weights that a stranger asks for.

    Exit code 77 says that this user may not make network namespaces.
    """
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.trials.chaos.{program}"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1] == "violations=0"
