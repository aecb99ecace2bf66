"""Scores the response's code by running the prompt's tests on it in a sandbox."""

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from reward.sandbox.cases import judge, read_cases
from reward.sandbox.runner import NEEDED, Limits
from reward.verifiers.fenced_blocks import last_block
from reward.verifiers.registry import required

PYTHON = ("python", "py", "python3", "py3")
"""Names of the language of a block."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `python_tests`."""

    key: str = "tests"
    """Field of the metadata with the tests, of one of three kinds.

    A list of `{call = "f", args = [2], kwargs = {}, returns = 4}`: a function of the code is called, and the
    return value is compared outside the sandbox. A list of `{stdin = "2\\n", stdout = "4\\n"}`: the code runs
    as a program for each input, and the output is compared outside. Python text, or a list of such texts: the
    text runs in the interpreter of the code, and passes if it does not raise. Malicious code can forge this
    last kind.
    """
    prelude: str = ""
    """Field of the metadata with code to run before the response's code; empty: none."""
    partial: bool = False
    """Score the fraction of passed tests, instead of 1 if all pass and 0 otherwise."""
    tolerance: Annotated[float, Interval(ge=0, le=1)] = 1e-9
    """Absolute and relative tolerance for a returned number if one of the two numbers is a float."""
    limits: Limits = field(default_factory=Limits)
    """Limits of the sandbox."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Run the last Python ``` block of the response, or the whole response without a block, with the tests.

    Tests that do not run because the code failed, hung or exceeded a limit count as failed.

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
    """Print, once per worker, the kinds of isolation that this machine lacks."""
    missing = sorted(NEEDED - isolation)
    if missing:
        print(f"sandbox.weak missing={','.join(missing)} (see docs/security.md)", file=sys.stderr, flush=True)
