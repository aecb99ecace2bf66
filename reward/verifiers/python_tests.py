"""Scores the response's code by running the prompt's tests on it in a sandbox."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from reward.sandbox.cases import judge, read_cases
from reward.sandbox.runner import NEEDED, Limits
from reward.verifiers.fenced import last_block
from reward.verifiers.registry import required

PYTHON = ("python", "py", "python3", "py3")
"""Names of the language of a block."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `python_tests`."""

    key: str = "tests"
    """Field of the metadata with the tests, of one of three kinds.

    A list of `{call = "f", args = [2], kwargs = {}, returns = 4}`: a function of the code is called, and what
    it returns is compared outside of the sandbox. A list of `{stdin = "2\\n", stdout = "4\\n"}`: the code is
    run as a program for each, and what it prints is compared outside. Python text, or a list of such: it runs
    in the interpreter of the code, and passes if it does not raise; code that aims at this can forge it.
    """
    prelude: str = ""
    """Field of the metadata with code to run before the response's; empty: none."""
    partial: bool = False
    """Score the fraction of tests that pass, instead of 1 if all do and 0 otherwise."""
    tolerance: Annotated[float, Interval(ge=0, le=1)] = 1e-9
    """Absolute and relative difference that a returned number may have if one of the two is a float."""
    limits: Limits = field(default_factory=Limits)
    """Limits of the sandbox."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Run the last ``` block of Python in the response, or all of it if there is none, with the tests.

    Tests that were not run because the code failed, hung or exceeded a limit have not passed.

    Returns:
        The score, 0 to 1.

    Raises:
        RewardError: there are no tests, or the sandbox cannot be set up.
    """
    cases = read_cases(required(metadata, options.key), options.key)
    block = last_block(response, PYTHON)
    code = response if block is None else block
    if options.prelude:
        code = f"{required(metadata, options.prelude)}\n{code}"
    passed, verdict = judge(code, cases, options.limits, options.tolerance)
    _warn(verdict.isolation)
    return passed / len(cases) if options.partial else float(passed == len(cases))


@functools.cache
def _warn(isolation: frozenset[str]) -> None:
    """Print, once per worker, which kinds of isolation this machine does not offer."""
    missing = sorted(NEEDED - isolation)
    if missing:
        print(f"sandbox.weak missing={','.join(missing)} (see docs/security.md)", file=sys.stderr, flush=True)
