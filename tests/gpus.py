"""The GPUs of this machine that tests may use, and what becomes of tests that need more than there are."""

import os
import re
from collections.abc import MutableMapping, Sequence

import pytest

from services.settings import automatic

TWO_GPUS = (pytest.mark.gpu, pytest.mark.two_gpus)
"""Marks of a test that needs a second GPU."""


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    return automatic.visible_gpus(os.environ)


def take_one_gpu(environ: MutableMapping[str, str]) -> None:
    """Leave a process of pytest-xdist one of the GPUs, before torch counts them."""
    if gpu := gpu_of(environ.get("PYTEST_XDIST_WORKER", ""), automatic.visible_gpus(environ)):
        environ["CUDA_VISIBLE_DEVICES"] = gpu


def gpu_of(worker: str, gpus: Sequence[str]) -> str:
    """Return the GPU of a process of pytest-xdist; empty for the only process, or if there is none."""
    number = re.fullmatch(r"gw(\d+)", worker)
    return gpus[int(number[1]) % len(gpus)] if number and gpus else ""


def without_enough_gpus(items: Sequence[pytest.Item], expression: str) -> list[pytest.Item]:
    """Return those of the selected tests to leave out, as they need a GPU and there is none.

    Where there is one, tests that need two are marked to be skipped.

    Raises:
        pytest.UsageError: the expression of `-m` asks for tests that need a GPU, and there is none.
    """
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return []
    if gpus := visible_gpus():
        for item in marked:
            if len(gpus) == 1 and item.get_closest_marker("two_gpus"):
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        return []
    if {"gpu", "two_gpus"} & set(re.findall(r"\w+", expression)):
        raise pytest.UsageError(
            f"-m {expression!r} selects {len(marked)} tests that need a GPU, and torch sees none here"
        )
    return marked
