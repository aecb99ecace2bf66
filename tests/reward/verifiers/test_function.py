"""Tests the user's own function: what it is given, what it may return, and what is refused at the start."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import RewardError, SettingsError
from reward.group import ResponseGroup
from reward.verifiers.function import Options, UserFunction, load_function

DOCS = Path(__file__).parents[3] / "docs/rewards.md"
GROUP = ResponseGroup("2 + 2 =", ["4", "5"], {"answer": "4"}, [1, 2], ["stop", "length"])

Load = Callable[..., UserFunction]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Write a module `own_reward` and load a function of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded: list[UserFunction] = []

    def write_and_load(code: str, path: str = "own_reward:score", timeout_s: float = 60.0) -> UserFunction:
        (tmp_path / "own_reward.py").write_text(code)
        loaded.append(load_function(Options(path), timeout_s))
        return loaded[-1]

    yield write_and_load
    for function in loaded:
        function.close()
    sys.modules.pop("own_reward", None)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def score(response, metadata): return response == metadata['answer']", [1, 0]),
        ("def score(*, response, token_count): return token_count", [1, 2]),
        ("def score(response, prompt, scale=0.5): return scale * len(prompt)", [3.5, 3.5]),
        ("def score(response, finish_reason): return finish_reason == 'stop'", [1, 0]),
        ("def score(**given): return len(given)", None),
        ("def score(response, **given): return len(given)", [4, 4]),
        ("def score(responses, token_counts): return [len(responses), token_counts[1]]", [2, 2]),
        ("def score(responses, metadata, prompt, finish_reasons): return (1, "
            "finish_reasons[1] == 'stop')", [1, 0]),
        ("async def score(response): return float(response)", [4, 5]),
        ("async def score(responses): return [float(text) for text in responses]", [4, 5]),
        ("class Scorer:\n    async def __call__(self, response): return 1\nscore = Scorer()", [1, 1]),
    ],
)  # fmt: skip
def test_a_function_gets_the_parameters_that_it_names(
    load: Load, code: str, expected: list[float] | None
) -> None:
    if expected is None:
        with pytest.raises(SettingsError, match="`response`"):
            load(code)
    else:
        assert load(code).score(GROUP, [0, 1]) == expected


def test_samples_of_an_asynchronous_function_are_scored_at_the_same_time(load: Load) -> None:
    code = (
        "import asyncio\nmet = asyncio.Barrier(2)\nasync def score(response):\n"
        "    await met.wait()\n    return 1"
    )
    function = load(code)
    assert function.at_once
    assert function.score(GROUP, [0, 1]) == [1, 1]


def test_a_slow_sample_of_an_asynchronous_function_has_no_score_and_the_others_have(load: Load) -> None:
    code = (
        "import asyncio\nasync def score(response):\n"
        "    await asyncio.sleep(3600 * (response == '5'))\n    return 1"
    )
    assert load(code, timeout_s=0.2).score(GROUP, [0, 1]) == [1, None]


def test_a_time_limit_of_the_function_itself_is_its_own_error(load: Load) -> None:
    code = (
        "import asyncio\nasync def score(response):\n    async with asyncio.timeout(0):\n"
        "        await asyncio.sleep(9)"
    )
    with pytest.raises(TimeoutError):
        load(code).score(GROUP, [0])


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ("float('nan')", "nan"),
        ("float('-inf')", "-inf"),
        ("None", "NoneType"),
        ("'1'", "'1'"),
        ("[1.0]", "list"),
        ("1j", "complex"),
        ("10**400", "1000"),
        ("type('Number', (), {'__float__': lambda self: 1.0})()", "Number"),
    ],
)
def test_a_result_that_is_no_score_is_refused_and_names_the_function(
    load: Load, returned: str, shown: str
) -> None:
    with pytest.raises(RewardError, match=rf"own_reward:score returned {shown}.*own_reward\.py"):
        load(f"def score(response): return {returned}").score(GROUP, [0])
    with pytest.raises(RewardError, match=rf"own_reward:score returned {shown}"):
        load(f"def score(responses): return [1, {returned}]").score(GROUP, [0, 1])


@pytest.mark.parametrize(
    ("returned", "shown"), [("[1.0]", "1 scores"), ("1.0", "float"), ("None", "NoneType")]
)
def test_a_group_needs_as_many_scores_as_responses(load: Load, returned: str, shown: str) -> None:
    with pytest.raises(RewardError, match=f"returned {shown} for 2 responses"):
        load(f"def score(responses): return {returned}").score(GROUP, [0, 1])


@pytest.mark.parametrize(
    ("code", "path", "why"),
    [
        ("", "own_reward", "'own_reward' is not MODULE:FUNCTION"),
        ("", "no_reward:score", r"there is no no_reward\.py in .*run\.modules or PYTHONPATH"),
        ("def scores(response): ...", "own_reward:score", r"own_reward\.py has no 'score'; "
            "did you mean 'scores'"),
        ("score = 3", "own_reward:score", r"own_reward:score in .*own_reward\.py is not a function"),
        ("def score(text): ...", "own_reward:score", r"own_reward\.py must take a parameter `response`"),
        ("def score(response, responses): ...", "own_reward:score", "`responses`"),
        ("def score(response, answer): ...", "own_reward:score", "no parameter 'answer'; use one of"),
        ("def score(response, token_counts=()): ...", "own_reward:score", "did you mean 'token_count'"),
        ("def score(response, /): ...", "own_reward:score", "positional-only"),
        ("import no_such_thing", "own_reward:score", r"own_reward\.py:1: No module named 'no_such_thing'"),
        ("x = 1\nx / 0", "own_reward:score", r"own_reward\.py:2: ZeroDivisionError"),
        ("def score(:", "own_reward:score", r"own_reward\.py:1: SyntaxError"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_at_the_start_and_names_the_file(
    load: Load, code: str, path: str, why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        load(code, path)


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_documented_functions_run_as_they_are_written(load: Load) -> None:
    scores: list[Any] = []
    for code in examples():
        scores.append(load(code, "own_reward:score").score(GROUP, [0, 1]))
        sys.modules.pop("own_reward")
    assert len(scores) == 3
    assert scores[0] == [1.0, 0.0]
    assert all(math.isfinite(score) for group in scores for score in group)


def test_an_exception_of_one_sample_ends_the_others(load: Load) -> None:
    code = (
        "import asyncio\nasync def score(response):\n"
        "    if response == '4': raise ValueError('four')\n    await asyncio.sleep(3600)"
    )
    with pytest.raises(ValueError, match="four"):
        load(code).score(GROUP, [0, 1])
