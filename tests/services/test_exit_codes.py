"""What a service says, and to whoever keeps it running, when it cannot begin."""

import subprocess
import sys
from pathlib import Path

from tests.integration.command import environment
from tests.integration.loop import ROOT


def test_a_service_that_finds_no_ledger_asks_to_be_started_again(tmp_path: Path) -> None:
    """A ledger that is away for a while must not look like wrong settings: `tether up` would give the run up."""
    variables = {"TETHER_REDIS_URL": "redis://127.0.0.1:1/0", "TETHER_RUN_DIR": str(tmp_path), "TETHER_LEDGER__TIMEOUT_S": "0.2"}
    result = subprocess.run(
        [sys.executable, "-m", "services.monitor"], cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "did not answer" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
