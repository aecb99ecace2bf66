"""The GPUs of this machine that tests may use, and what becomes of tests that need one elsewhere."""

import os
import re

import pytest


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    import torch  # a run of tests that need no GPU is not to wait for it

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def leave_out_gpu_tests(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests with the mark `gpu` where there is no GPU.

    Raises:
        pytest.UsageError: `-m` asks for them.
    """
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted or visible_gpus():
        return
    if "gpu" in re.findall(r"\w+", config.option.markexpr):
        raise pytest.UsageError(
            f"-m {config.option.markexpr!r} selects {len(wanted)} tests that need a GPU, "
            "and torch sees none here"
        )
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=wanted)
