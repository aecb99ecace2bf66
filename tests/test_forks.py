"""The plugin runs each test once in some process, and says so if a process did not."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import os, signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def note(name):
    with (HERE / name).open("a") as file:
        print(os.getpid(), file=file)


note("collected")


@pytest.fixture(scope="module")
def shared():
    note("set-up")
    yield
    note("torn-down")


@pytest.mark.parametrize("number", range(5))
def test_shared(shared, number):
    note("shared")


@pytest.mark.parametrize("number", range(40))
def test_alone(number):
    note("alone")


def test_fails():
    print("a word of the test")
    assert 1 == 2


def test_is_left_out():
    pytest.skip("for a reason")
"""
DIES = "\n\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def place(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> pytest.Pytester:
    pytester.syspathinsert(request.config.rootpath)
    pytester.makeini("[pytest]\naddopts = -p tests.forks --forks 2 -p no:cacheprovider")
    return pytester


def lines(place: pytest.Pytester, name: str) -> list[str]:
    return (place.path / name).read_text().split()


def test_tests_run_once_each_in_processes_that_did_not_collect(place: pytest.Pytester) -> None:
    place.makepyfile(test_them=TESTS)
    result = place.runpytest_subprocess("-rs")
    result.assert_outcomes(passed=45, failed=1, skipped=1)
    result.stdout.fnmatch_lines(["*a word of the test*", "SKIPPED *for a reason"])
    (parent,) = lines(place, "collected")
    assert len(lines(place, "alone")) == 40
    assert parent not in lines(place, "alone")


def test_tests_that_share_a_fixture_run_in_one_process(place: pytest.Pytester) -> None:
    place.makepyfile(test_them=TESTS)
    place.runpytest_subprocess()
    (process,) = lines(place, "set-up")
    assert lines(place, "shared") == [process] * 5
    assert lines(place, "torn-down") == [process]


def test_process_that_dies_fails_its_test_and_the_others_run(place: pytest.Pytester) -> None:
    place.makepyfile(test_them=TESTS + DIES)
    result = place.runpytest_subprocess()
    result.assert_outcomes(passed=45, failed=2, skipped=1)
    result.stdout.fnmatch_lines(["*its process ended before it did; exit codes of all processes: *-9*"])


def test_first_failure_ends_all_processes_if_asked(place: pytest.Pytester) -> None:
    place.makepyfile(
        test_them="""
        import pytest

        @pytest.mark.parametrize("number", range(500))
        def test_fails(number):
            assert number < 0
        """
    )
    result = place.runpytest_subprocess("-x")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes()["failed"] < 100


def test_session_teardown_that_fails_fails_the_session(place: pytest.Pytester) -> None:
    place.makepyfile(
        test_them="""
        import pytest

        @pytest.fixture(scope="session", autouse=True)
        def kept():
            yield
            raise OSError("not closed")

        def test_passes(): pass
        """
    )
    result = place.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stderr.fnmatch_lines(["*not closed*"])
    result.stdout.fnmatch_lines(["*exit codes of the processes of tests*"])


def test_files_that_cannot_be_collected_fail_the_session(place: pytest.Pytester) -> None:
    place.makepyfile(test_them="import nothing_of_this_name")
    assert place.runpytest_subprocess().ret == pytest.ExitCode.INTERRUPTED
