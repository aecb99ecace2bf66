"""The hybrid's settings and its mismatch, without a GPU."""

from pathlib import Path

import pytest

from services.settings.checks import settings_errors
from services.settings.load import compose_settings
from tests.benchmarks.gpu_loop.run import ON_ONE_GPU
from tests.benchmarks.hybrid_loop import EXAMPLE, TINY, mismatch_of


@pytest.mark.parametrize("overrides", [ON_ONE_GPU, TINY])
def test_settings_are_accepted(overrides: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = [f"model.path={tmp_path}", *overrides]
    settings = compose_settings(str(EXAMPLE / "one_gpu.toml"), given, {})
    assert not list(settings_errors(settings))


def test_mismatch_of_each_lag_counts_every_token_once() -> None:
    reports = [
        {"mismatch": {"0": {"tokens": 1, "error_mean": 0.5, "error_max": 0.5}}},
        {"mismatch": {"10": {"tokens": 2, "error_mean": 1.0, "error_max": 4.0}}},
        {"mismatch": {"0": {"tokens": 3, "error_mean": 0.1, "error_max": 0.2}}},
    ]
    found = mismatch_of(reports)
    assert list(found) == ["0", "10"]
    assert found["0"] == pytest.approx({"tokens": 4, "error_mean": 0.2, "error_max": 0.5})
    assert found["10"] == {"tokens": 2, "error_mean": 1.0, "error_max": 4.0}
