"""Chooses the kernels of tests of attention."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from trainer.config import AttentionBackend
from trainer.layers.attention.kernels import FUSED, Kernel, choose_backend
from trainer.layers.attention.terms import LIBRARIES, TORCH_FLASH_IMPLS

Choose = Callable[[AttentionBackend], None]


@pytest.fixture
def chosen() -> Iterator[Choose]:
    """Chooses a backend for this process; the default is back after the test."""
    yield choose_backend
    choose_backend("auto")


@pytest.fixture(params=["torch", *TORCH_FLASH_IMPLS])
def fused(request: pytest.FixtureRequest, chosen: Choose) -> Kernel:
    """Kernel behind torch's operators: its own, and each of the libraries that are installed."""
    name: AttentionBackend = request.param
    if name in LIBRARIES and find_spec(LIBRARIES[name]) is None:
        pytest.skip(f"no module {LIBRARIES[name]} here")
    chosen(name)
    return FUSED[name]
