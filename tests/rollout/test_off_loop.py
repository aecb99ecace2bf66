"""Where work runs: on the event loop if it is small, in a thread if it is large."""

import threading
from typing import Any

import pytest

from rollout.off_loop import LARGE, off_loop, size_of


async def test_small_work_runs_on_the_event_loop_and_large_work_in_a_thread() -> None:
    assert await off_loop(LARGE, threading.current_thread) is threading.current_thread()
    assert await off_loop(LARGE + 1, threading.current_thread) is not threading.current_thread()


@pytest.mark.parametrize("size", [0, LARGE + 1])
async def test_error_of_the_work_is_raised(size: int) -> None:
    def fails() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await off_loop(size, fails)


@pytest.mark.parametrize(
    "value", ["x" * LARGE, {"x" * LARGE: 1}, [[["x" * LARGE]]], [1] * LARGE, [{"a": [1]}] * 300, b"x" * LARGE]
)
def test_a_value_of_many_characters_or_values_is_large(value: Any) -> None:
    assert size_of(value) > LARGE


@pytest.mark.parametrize("value", [None, "x" * 1000, {"a": ["b", 1.5, True]}, ["out", ""], object()])
def test_a_value_of_few_characters_is_small(value: Any) -> None:
    assert size_of(value) < LARGE
