"""Tests the record of token versions at scheduler steps."""

from rollout.engines.multi_process.token_versions import TokenVersions


def test_request_is_marked_at_its_first_step_after_a_change() -> None:
    marks = TokenVersions(1)
    marks.step([("a", 0)])
    marks.step([("a", 1)])
    marks.switch(2)
    marks.step([("b", 0)])  # "a" was preempted
    marks.step([("a", 2), ("b", 1)])
    marks.switch(3)
    marks.step([("b", 2)], finished=["a"])
    assert marks.of("a") == [(0, 1), (2, 2)]
    assert marks.of("b") == [(0, 2), (2, 3)]
    assert marks.of("c") == []
