"""The GPUs of this machine that tests may use, and what becomes of tests that need one elsewhere."""

import os
import re
from collections.abc import Sequence

import pytest


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    import torch  # a run of tests that need no GPU is not to wait for it

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def without_a_gpu(items: Sequence[pytest.Item], expression: str) -> list[pytest.Item]:
    """Return those of the selected tests to leave out, as they need a GPU and there is none.

    Raises:
        pytest.UsageError: the expression of `-m` asks for them.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or visible_gpus():
        return []
    if "gpu" in re.findall(r"\w+", expression):
        raise pytest.UsageError(
            f"-m {expression!r} selects {len(marked)} tests that need a GPU, and torch sees none here"
        )
    return marked
