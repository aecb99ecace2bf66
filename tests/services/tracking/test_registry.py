"""Runs the contract of trackers with the real libraries: tensorboard here, others in their environment."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from services.settings.tracking import SPANS, Kind
from services.tracking.registry import TRACKERS
from tests.contracts import tracker_suite
from tests.integration.loop import ROOT


def tracking_python() -> str:
    """The interpreter that has wandb, mlflow and trackio: TRACKING_PYTHON, or that of the environment beside
    this one that `make test-slow` builds."""
    beside = Path(sys.prefix).with_name(f"{Path(sys.prefix).name}-tracking") / "bin" / "python"
    return os.environ.get("TRACKING_PYTHON") or str(beside)


def test_every_kind_has_a_tracker_and_a_reader() -> None:
    assert set(get_args(Kind)) == set(TRACKERS) == {*tracker_suite.READERS, SPANS}


@pytest.mark.parametrize("holds", tracker_suite.PROPERTIES, ids=lambda check: check.__name__)
def test_contract_holds_for_tensorboard(tmp_path: Path, holds: Callable[..., Any]) -> None:
    holds("tensorboard", tmp_path, tracker_suite.read_tensorboard)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_contract_holds_for_other_libraries(tmp_path: Path, kind: str) -> None:
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    result = subprocess.run(
        [tracking_python(), "-m", "tests.contracts.tracker_suite", kind, str(tmp_path)],
        cwd=ROOT,
        env={**kept, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": holds\n") == len(tracker_suite.PROPERTIES)
