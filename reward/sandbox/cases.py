"""Parses the tests of a prompt, and scores sandboxed code with them.

For calls and programs, the sandbox returns plain values as JSON text. The values are compared in this
process, not in the sandbox, so the code's objects and changes to its interpreter cannot affect the
comparison.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from protocol.errors import RewardError
from reward.sandbox.runner import Limits, Verdict, run_calls, run_programs, run_tests

KINDS = "Python text, or a list of {call, args, kwargs, returns} or of {stdin, stdout}"


class CallCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test that calls a function of the code."""

    call: str
    """Expression of the function, such as `f` or `Solution().f`."""
    returns: Any
    """Expected return value in JSON form: lists instead of tuples, strings as keys."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class ProgramCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test that runs the code as a program."""

    stdout: str
    """Expected output. White space at line ends and trailing empty lines are ignored."""
    stdin: str = ""


Cases = list[str] | list[CallCase] | list[ProgramCase]


def read_cases(tests: object, field: str) -> Cases:
    """Return the tests in the metadata.

    Raises:
        RewardError: the tests are of no known kind, or of several kinds. The message names `field`.
    """
    tests = [tests] if isinstance(tests, (str, Mapping)) else tests
    if not isinstance(tests, list) or not tests:
        raise RewardError(f"the field {field!r} must be {KINDS}")
    try:
        if all(isinstance(test, str) for test in tests):
            return tests
        if all(isinstance(test, Mapping) and "call" in test for test in tests):
            return msgspec.convert(tests, list[CallCase])
        return msgspec.convert(tests, list[ProgramCase])
    except msgspec.ValidationError as error:
        raise RewardError(f"the field {field!r} must be {KINDS}: {error}") from None


def judge(code: str, cases: Cases, limits: Limits, tolerance: float) -> tuple[int, Verdict]:
    """Run the code with the tests; return the number of passed tests and the sandbox's report.

    Raises:
        RewardError: the sandbox cannot be set up.
    """
    calls = [case for case in cases if isinstance(case, CallCase)]
    programs = [case for case in cases if isinstance(case, ProgramCase)]
    if calls:
        verdict = run_calls(code, [(case.call, case.args, case.kwargs) for case in calls], limits)
        return sum(
            _equal(_plain(case.returns), _parsed(verdict.outputs.get(i)), tolerance)
            for i, case in enumerate(calls)
        ), verdict
    if programs:
        verdict = run_programs(code, [case.stdin for case in programs], limits)
        return sum(
            _same_text(case.stdout, _parsed(verdict.outputs.get(i))) for i, case in enumerate(programs)
        ), verdict
    verdict = run_tests(code, [case for case in cases if isinstance(case, str)], limits)
    return len(verdict.passed), verdict


class _Nothing:
    """Marker for a missing output; equal to no plain value."""


def _parsed(output: str | None) -> Any:
    """Return the value of JSON text. The sandboxed code may have forged the text."""
    if output is None:
        return _Nothing
    try:
        return json.loads(output)
    except (ValueError, RecursionError):
        return _Nothing


def _plain(value: Any) -> Any:
    """Return an expected value in JSON form. The value may contain tuples and non-string keys."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise RewardError(f"a test returns what JSON cannot hold: {error}") from None


def _equal(expected: Any, value: Any, tolerance: float) -> bool:
    """Compare plain values. Two numbers may differ by `tolerance` if at least one is a float."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(_equal(a, b, tolerance) for a, b in zip(expected, value, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and value.keys() == expected.keys()
            and all(_equal(expected[key], value[key], tolerance) for key in expected)
        )
    if isinstance(expected, bool) or isinstance(value, bool) or not isinstance(expected, (int, float)):
        return type(expected) is type(value) and bool(expected == value)
    if isinstance(expected, float) or isinstance(value, float):
        return isinstance(value, (int, float)) and _close(expected, value, tolerance)
    return isinstance(value, int) and expected == value


def _close(expected: float, value: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, value, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer too large for a float
        return False


def _same_text(expected: str, printed: Any) -> bool:
    return isinstance(printed, str) and _lines(expected) == _lines(printed)


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
