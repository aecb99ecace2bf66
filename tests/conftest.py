"""Settings of all tests."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Two test processes share two cores: OpenMP's threads would spin against each other, a hundred times slower.
# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from services.runtime.main import raise_fd_limit
from tests.gpus import take_one_gpu, visible_gpus, without_enough_gpus

# A slow machine is no failure, and every run draws the same examples; others are found with `pytest
# --hypothesis-profile search`.
settings.register_profile(
    "tether", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", settings.get_profile("tether"), derandomize=False, max_examples=1000, print_blob=True
)
settings.load_profile("tether")
# as every service does: users have 1024 on many systems, and here the ends of many connections are in one
# process
raise_fd_limit()
take_one_gpu(os.environ)

WHOLE_RUNS = [Path(__file__).with_name(name) for name in ("integration", "trials", "docs")]
"""Folders of tests that take long, and come first: the quick ones at the end keep all processes at work."""


@pytest.hookimpl(trylast=True)  # what `-m` leaves out is gone then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left_out := without_enough_gpus(items, config.option.markexpr):
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: not any(item.path.is_relative_to(folder) for folder in WHOLE_RUNS))


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections of garbage, of which pytest makes some at the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for each GPU, if it is GPUs that `-m` asks for."""
    return len(visible_gpus()) or None if "gpu" in config.option.markexpr.split() else None
