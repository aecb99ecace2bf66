"""Tests what is selected where there is no GPU."""

import pytest

from tests.gpus import visible_gpus

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """Two tests, of which one needs a GPU, under the hook of ours."""
    pytester.makeini("[pytest]\nmarkers =\n    gpu\n    slow\n")
    pytester.makeconftest("from tests.gpus import leave_out_gpu_tests as pytest_collection_modifyitems")
    pytester.makepyfile("import pytest\n\n@pytest.mark.gpu\ndef test_a(): pass\n\ndef test_b(): pass\n")
    return pytester


@pytest.mark.parametrize("expression", ["", "not slow"])
def test_tests_that_need_a_gpu_are_left_out_where_there_is_none(
    suite: pytest.Pytester, expression: str
) -> None:
    left_out = 0 if visible_gpus() else 1

    suite.runpytest_inprocess("-m", expression).assert_outcomes(passed=2 - left_out, deselected=left_out)


def test_asking_for_them_is_refused_where_there_is_none(suite: pytest.Pytester) -> None:
    result = suite.runpytest_inprocess("-m", "gpu")
    if visible_gpus():
        result.assert_outcomes(passed=1, deselected=1)
    else:
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*-m 'gpu' selects 1 tests that need a GPU, and torch sees none here"])
