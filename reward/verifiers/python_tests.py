"""Scores the response's code by running the prompt's tests on it in a sandbox."""

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import RewardError
from reward.sandbox.runner import NEEDED, Limits, run_tests
from reward.verifiers.registry import required

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `python_tests`."""

    key: str = "tests"
    """Field of the metadata with the tests: Python text, or a list of such. A test passes if it does not
    raise."""
    prelude: str = ""
    """Field of the metadata with code to run before the response's; empty: none."""
    partial: bool = False
    """Score the fraction of tests that pass, instead of 1 if all do and 0 otherwise."""
    limits: Limits = field(default_factory=Limits)
    """Limits of the sandbox."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Run the last ``` block of the response, or all of it if there is none, and then the tests.

    Tests that were not run because the code failed, hung or exceeded a limit have not passed.

    Returns:
        The score, 0 to 1.

    Raises:
        RewardError: there are no tests, or the sandbox cannot be set up.
    """
    tests = required(metadata, options.key)
    tests = [tests] if isinstance(tests, str) else tests
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise RewardError(f"the field {options.key!r} must be Python text or a list of such")
    blocks = FENCE.findall(response)
    code = blocks[-1] if blocks else response
    if options.prelude:
        code = f"{required(metadata, options.prelude)}\n{code}"
    verdict = run_tests(code, tests, options.limits)
    _warn(verdict.isolation)
    passed = len(verdict.passed)
    return passed / len(tests) if options.partial else float(passed == len(tests))


@functools.cache
def _warn(isolation: frozenset[str]) -> None:
    """Print, once per worker, which kinds of isolation this machine does not offer."""
    missing = sorted(NEEDED - isolation)
    if missing:
        print(f"sandbox.weak missing={','.join(missing)} (see docs/security.md)", file=sys.stderr, flush=True)
