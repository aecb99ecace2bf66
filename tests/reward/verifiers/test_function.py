"""Tests the user's own function: what it is given, what it may return, and what is refused at the start."""

import asyncio
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import RewardError, SettingsError
from reward.group import ResponseGroup, Verdict
from reward.verifiers.base import AwaitedVerifier, Notes
from reward.verifiers.function import AsyncUserFunction, Options, UserFunction, load_function

DOCS = Path(__file__).parents[3] / "docs/rewards.md"
GROUP = ResponseGroup(
    "2 + 2 =", ["4", "5"], {"answer": "4"}, [1, 2], ["stop", "length"],
    turns=[["3", "4"], ["4"]], contexts=[["", "more"], ["not 4"]],
)  # fmt: skip

Load = Callable[..., UserFunction | AsyncUserFunction]


def scores(
    function: UserFunction | AsyncUserFunction, samples: Sequence[int], group: ResponseGroup = GROUP
) -> list[Verdict]:
    """Return scores, of an asynchronous function by as many calls at once as the pool makes."""
    if isinstance(function, UserFunction):
        return function.score(group, samples)
    awaited: AwaitedVerifier = function

    async def each() -> list[Verdict]:
        async with asyncio.TaskGroup() as tasks:
            calls = [list(samples)] if awaited.at_once else [[i] for i in samples]
            running = [tasks.create_task(awaited.answer(group, call, Notes())) for call in calls]
        return [score for task in running for score in task.result()]

    return asyncio.run(each())


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Write a module `own_reward` and load a function of it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write_and_load(code: str, path: str = "own_reward:score") -> UserFunction | AsyncUserFunction:
        (tmp_path / "own_reward.py").write_text(code)
        return load_function(Options(path))

    yield write_and_load
    sys.modules.pop("own_reward", None)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_may_change_its_metadata(load: Load, kind: str) -> None:
    group = replace(GROUP, metadata={"tests": {"hard": [1, 2, 3]}})
    code = "score(response, metadata): metadata['tests']['hard'].pop(); return len(metadata['tests']['hard'])"
    assert scores(load(f"{kind} {code}"), [0, 1], group) == [2, 2]
    assert group.metadata == {"tests": {"hard": [1, 2, 3]}}


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
        assert scores(load(code), [0, 1]) == expected


def test_samples_of_an_asynchronous_function_are_scored_at_the_same_time(load: Load) -> None:
    code = (
        "import asyncio\nmet = asyncio.Barrier(2)\nasync def score(response):\n"
        "    await met.wait()\n    return 1"
    )
    function = load(code)
    assert not function.at_once
    assert scores(function, [0, 1]) == [1, 1]


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
        scores(load(f"def score(response): return {returned}"), [0])
    with pytest.raises(RewardError, match=rf"own_reward:score returned {shown}"):
        scores(load(f"def score(responses): return [1, {returned}]"), [0, 1])


@pytest.mark.parametrize(
    ("returned", "shown"), [("[1.0]", "1 scores"), ("1.0", "float"), ("None", "NoneType")]
)
def test_a_group_needs_as_many_scores_as_responses(load: Load, returned: str, shown: str) -> None:
    with pytest.raises(RewardError, match=f"returned {shown} for 2 responses"):
        scores(load(f"def score(responses): return {returned}"), [0, 1])


@pytest.mark.parametrize(
    ("code", "path", "why"),
    [
        ("", "own_reward", "'own_reward' is not MODULE:NAME"),
        ("", "no_reward:score", r"there is no no_reward\.py in .*run\.modules or PYTHONPATH"),
        ("def scores(response): ...", "own_reward:score", r"own_reward\.py has no 'score'; "
            "did you mean 'scores'"),
        ("score = 3", "own_reward:score", r"own_reward\.py is neither a class nor a function"),
        ("def score(text): ...", "own_reward:score", r"own_reward\.py must take a parameter `response`"),
        ("def score(response, responses): ...", "own_reward:score", "`responses`"),
        ("def score(response, answer): ...", "own_reward:score", "no parameter 'answer'; use one of"),
        ("def score(response, token_counts=()): ...", "own_reward:score", "did you mean 'token_count'"),
        ("def score(response, /): ...", "own_reward:score", "positional-only"),
        ("import no_such_thing", "own_reward:score", r"own_reward\.py:1: ModuleNotFoundError: No module"),
        ("x = 1\nx / 0", "own_reward:score", r"own_reward\.py:2: ZeroDivisionError"),
        ("def score(:", "own_reward:score", r"own_reward\.py:1: SyntaxError"),
    ],
)  # fmt: skip
def test_reward_that_cannot_be_called_is_refused_at_the_start_and_names_the_file(
    load: Load, code: str, path: str, why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        load(code, path)


def examples() -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return [code for code in blocks if "def score(" in code]


def test_the_documented_functions_run_as_they_are_written(load: Load) -> None:
    found: list[Any] = []
    for code in examples():
        found.append(scores(load(code, "own_reward:score"), [0, 1]))
        sys.modules.pop("own_reward")
    assert len(found) == 4
    assert found[0] == [1.0, 0.0]
    assert all(math.isfinite(score) for group in found[:3] for score in group)
    assert found[3] == [[0.0, 1.0], [0.0]]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def score(turns): return [len(turns)] * len(turns)", [[2, 2], [1]]),
        ("def score(*, response, turns, **more): return [float(len(more)) for turn in turns]", [[5, 5], [5]]),
        ("async def score(*, turns, contexts): return [len(said) for said in contexts]", [[0, 4], [5]]),
        ("def score(responses, turns): return [[1.0] * len(item) for item in turns]", [[1, 1], [1]]),
        ("def score(response, **given): return len(given)", [4, 4]),
    ],
)
def test_a_function_that_names_turns_scores_each(load: Load, code: str, expected: list[Any]) -> None:
    function = load(code)
    assert function.by_turn == ("turns" in code)
    assert scores(function, [0, 1]) == expected


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def score(turns): return [1.0]", r"returned 1 scores for 2 turns of sample 0 .*return a list of 2"),
        ("def score(turns): return 1.0", "returned float for 2 turns of sample 0"),
        ("def score(turns): return [1.0, float('inf')]", "returned inf"),
        ("def score(responses, turns): return [[1.0, 2.0]]", "returned 1 scores for 2 responses"),
        ("def score(responses, turns): return [1.0, 2.0]", "returned float for 2 turns of sample 0"),
    ],
)
def test_scores_that_are_not_one_for_each_turn_are_refused(load: Load, code: str, why: str) -> None:
    with pytest.raises(RewardError, match=why):
        scores(load(code), [0, 1])
