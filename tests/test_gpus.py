"""Tests what is left out, or refused, where there is no GPU, and which GPU a process has."""

import pytest

from tests.gpus import gpu_of, visible_gpus, without_enough_gpus


@pytest.fixture
def items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Two tests, of which the second needs a GPU."""
    parent = request.node.parent
    made = [pytest.Function.from_parent(parent, name=f"test_{name}", callobj=lambda: None) for name in "ab"]
    made[1].add_marker(pytest.mark.gpu)
    return [*made]


@pytest.mark.parametrize("expression", ["", "not slow"])
def test_tests_that_need_a_gpu_are_left_out_where_there_is_none(
    items: list[pytest.Item], expression: str
) -> None:
    assert without_enough_gpus(items[:1], expression) == []
    assert without_enough_gpus(items, expression) == ([] if visible_gpus() else items[1:])


@pytest.mark.parametrize("expression", ["gpu", "gpu and not slow"])
def test_asking_for_them_is_refused_where_there_is_none(items: list[pytest.Item], expression: str) -> None:
    if visible_gpus():
        assert without_enough_gpus(items, expression) == []
        return
    with pytest.raises(pytest.UsageError, match=f"-m '{expression}' selects 1 tests that need a GPU"):
        without_enough_gpus(items, expression)


@pytest.mark.parametrize(
    ("worker", "gpus", "expected"),
    [
        ("", ["0", "1"], ""),
        ("gw1", [], ""),
        ("gw0", ["4", "7"], "4"),
        ("gw1", ["4", "7"], "7"),
        ("gw2", ["4", "7"], "4"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(worker: str, gpus: list[str], expected: str) -> None:
    assert gpu_of(worker, gpus) == expected
