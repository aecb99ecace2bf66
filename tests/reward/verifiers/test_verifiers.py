"""Verifiers one by one: right and wrong responses, and that no response makes them raise."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.errors import RewardError, SettingsError
from reward.group import ResponseGroup
from reward.verifiers.registry import VERIFIERS, make_verifier
from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source
from tests.changes import slow_unless_changed

pytestmark = pytest.mark.xdist_group(
    "sandbox"
)  # its tests look at what is left in the shared temporary directory

PERSON = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
ANSWER: dict[str, dict[str, Any]] = {
    "exact_match": {"answer": "42"},
    "last_integer": {"answer": "42"},
    "positions": {"answer": "42"},
    "math": {"answer": "42"},
    "json_schema": {"schema": PERSON},
    "python_tests": {"tests": ["assert f(2) == 4", "assert f(3) == 9"]},
    "reasoning_gym": {"answer": "42", "family": "chain_sum", "params": {}, "entry": {}},
}
"""Verifier -> metadata that it can score with."""


def score(name: str, response: str, metadata: Mapping[str, Any] | None = None, **options: Any) -> float:
    given = ResponseGroup(
        "question", [response], ANSWER.get(name, {}) if metadata is None else metadata, [1], ["stop"]
    )
    (value,) = make_verifier(name, options).score(given, [0])
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ("42", {}, 1.0),
        (" 42\n", {}, 1.0),
        (" 42", {"strip": False}, 0.0),
        ("4 2", {}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_exact_match_compares_whole_response(response: str, options: dict[str, Any], expected: float) -> None:
    assert score("exact_match", response, **options) == expected


def test_exact_match_may_ignore_case_and_read_another_field() -> None:
    assert score("exact_match", "STRASSE", {"word": "straße"}, key="word", ignore_case=True) == 1.0
    assert score("exact_match", "7", {"answer": 7}) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("the sum is 12.", "12", 1.0),
        ("12 or 13", "12", 0.0),
        ("5-3", "3", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is -3", "3", 0.0),
        ("1,234", "1234", 1.0),
        ("1234", "1,234", 1.0),
        ("7 or 3.5", "7", 1.0),
        ("3.5", "5", 0.0),
        ("007", "7", 1.0),
        ("-0", "0", 1.0),
        ("none", "0", 0.0),
        ("#### 1,234", "Natalia sold 48/2 = 24 clips.\n#### 1,234", 1.0),
        ("#### 72", "72.", 1.0),
        ("72.", "$72", 1.0),
        ("It costs $72.", "72.00", 1.0),
        ("72.00", "72", 1.0),
        ("72.50", "72", 0.0),
        ("a loss of -$5", "#### -5", 1.0),
        ("$5", "#### -5", 0.0),
        ("#### 1,234,567", "$1,234,567.00", 1.0),
        ("٤٢", "42", 0.0),
        ("it is \u22125", "-5", 1.0),
        ("it is \u22125", "5", 0.0),
        ("it is 5", "\u22125", 0.0),
        ("7 or 1/2", "7", 1.0),
        ("1/2", "2", 0.0),
        ("1e6", "1000000", 1.0),
        ("1e6", "6", 0.0),
        ("1,5", "5", 0.0),
        ("1,5", "15", 0.0),
        ("3\u20135", "5", 0.0),
        ("10-5", "5", 1.0),
        ("10-5", "-5", 0.0),
        ("2024-25", "25", 1.0),
        ("**72**", "72", 1.0),
        ("\u20ac72", "72", 1.0),
        ("9" * 6000, "9" * 6000, 1.0),
    ],
)
def test_last_integer_reads_last_number(response: str, answer: str, expected: float) -> None:
    assert score("last_integer", response, {"answer": answer}) == expected


@given(st.integers(), st.text(alphabet="abc .,=", max_size=20))
def test_last_integer_finds_every_integer(number: int, words: str) -> None:
    assert score("last_integer", f"{words} {number}", {"answer": str(number)}) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [("237", 1.0), ("273", 1 / 3), ("23", 2 / 3), ("2371", 3 / 4), ("", 0.0), ("1237", 0.0), (" 237 ", 1.0)],
)
def test_positions_rewards_equal_share(response: str, expected: float) -> None:
    assert score("positions", response, {"answer": "237"}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2}", "(x+1)^2", 0.0),
        ("I do not know", "3", 0.0),
        ("$\\frac{3}{4}$", "\\frac{3}{4}", 1.0),
        ("\\boxed{2^{2023}}", "2^{2022} \\cdot 2", 1.0),
        ("2", "2^{2022} \\cdot 2", 0.0),
        ("1", "x^2+1", 0.0),
        ("so $\\boxed{1}$ and $\\boxed{2}$", "\\{1, 2\\}", 1.0),
        ("\\boxed{6}, no: the final answer is $5$. I hope it is correct.", "5", 1.0),
        ("\\boxed{7}" + " and so on" * 500, "7", 1.0),
        ("it is 12345!", "12345", 1.0),
        ("$\\boxed{50}\\%$", "50\\%", 1.0),
        ("72 km/h", "72 km/h", 1.0),
    ],
)
def test_math_accepts_equal_expressions(response: str, answer: str, expected: float) -> None:
    assert score("math", response, {"answer": answer}) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"age": 3}', 1.0),
        ('{"age": -3}', 0.0),
        ('{"name": "x"}', 0.0),
        ('Sure!\n```json\n{"age": 3}\n```', 1.0),
        ('```json\n{"age": 1}\n```\n```\n{"age": "x"}\n```', 0.0),
        ('By:\n```python\nage = 3\n```\nSo:\n```json\n{"age": 3}\n```', 1.0),
        ('```json\n{"age": -3}\n```\nNo:\n~~~ json\n{"age": 3}\n~~~', 1.0),
        ('{"age": 3', 0.0),
        ('{"age": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_schema_validates_response(response: str, expected: float) -> None:
    assert score("json_schema", response) == expected


def test_json_schema_follows_no_reference_outside() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        score("json_schema", "{}", {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})


@pytest.mark.parametrize(
    ("schema", "response"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 600 + "]" * 600),
        ({"additionalProperties": {"$ref": "#"}}, '{"a": ' * 600 + "{}" + "}" * 600),
        ({"multipleOf": 0.5}, "1" + "0" * 400),
    ],
)
def test_json_schema_scores_0_what_it_cannot_check(schema: dict[str, object], response: str) -> None:
    assert score("json_schema", response, {"schema": schema}) == 0.0
    assert score("json_schema", response[:1] + response[-1:], {"schema": schema}) == 1.0


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, "{", 3, json.dumps({"minimum": "x"}), {"allOf": [{"$ref": "#"}]}]
)
def test_a_wrong_schema_is_not_a_wrong_response(schema: object) -> None:
    with pytest.raises(RewardError, match="schema is wrong"):
        score("json_schema", "{}", {"schema": schema})


SQUARE = "Here:\n```python\ndef f(x):\n    return x * x\n```\nDone."


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        (SQUARE, {}, 1.0),
        ("def f(x): return x * x", {}, 1.0),
        ("def f(x): return x + x", {}, 0.0),
        ("def f(x): return x + x", {"partial": True}, 0.5),
        ("no code at all", {"partial": True}, 0.0),
        (f"```python\nbad(\n```\n{SQUARE}", {}, 1.0),
        (f"First:\n```bash\npip install f\n```\n{SQUARE}\n```text\n4\n```", {}, 1.0),
        (f"A call of ```f``` squares. {SQUARE}", {}, 1.0),
        (SQUARE.replace("```python", "```python3 linenums"), {}, 1.0),
        (SQUARE.replace("\n", "\r\n"), {}, 1.0),
        (SQUARE.replace("```", "~~~"), {}, 1.0),
        (SQUARE.replace("```", "~~~~").replace("\n", "\r\n"), {}, 1.0),
        (SQUARE.replace("```", "~~~").replace("x * x", "x * x  # not ```2 * x```"), {}, 1.0),
        (f"~~~python\nbad(\n~~~\n{SQUARE}\n~~~text\n4\n~~~", {}, 1.0),
        (f"{SQUARE}\n~~~python\nbad(\n~~~", {}, 0.0),
        (f"~~~ not closed\n{SQUARE}", {}, 1.0),
        (SQUARE.replace("x * x", "x * x\n~~~ = 2"), {}, 0.0),
    ],
)
def test_python_tests_scores_passed_share(response: str, options: dict[str, Any], expected: float) -> None:
    assert score("python_tests", response, **options) == expected


def test_python_tests_may_have_a_prelude() -> None:
    metadata = {"tests": "assert f(4) == 2", "setup": "import math"}
    assert score("python_tests", "def f(x): return math.isqrt(x)", metadata, prelude="setup") == 1.0


@pytest.mark.parametrize(
    "tests", [[], [3], {"a": 1}, [{"call": "f", "expect": 4}], ["x", {"stdout": ""}], [{"stdout": 4}]]
)
def test_python_tests_without_tests_fail(tests: object) -> None:
    with pytest.raises(RewardError, match="field 'tests' must be Python text, or a list of"):
        score("python_tests", SQUARE, {"tests": tests})


@slow_unless_changed("reward/verifiers/", "rollout/prompts/", "deploy/locks/cpu.txt")
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # families leave their data files open
def test_reasoning_gym_gives_full_marks_to_the_right_answer_of_every_family() -> None:
    from reasoning_gym.factory import DATASETS

    from rollout.prompts.reasoning_gym import UNSTABLE

    families = tuple(sorted(DATASETS.keys() - UNSTABLE - {"composite", "acre"}))
    source = make_source(PromptConfig(source="reasoning_gym", families=families))
    scores = {}
    for i in range(len(families)):
        prompt = source.at(i)
        if prompt.metadata["answer"] is not None:  # some families have a rule and no answer
            travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt.metadata))
            scores[families[i]] = score("reasoning_gym", str(prompt.metadata["answer"]), travelled)
    assert len(scores) > 90
    assert {family: value for family, value in scores.items() if value < 0.99} == {}


def test_reasoning_gym_takes_the_answer_from_a_tag() -> None:
    assert score("reasoning_gym", "41 <answer>1</answer> <answer> 42 </answer>", tag="answer") == 1.0
    assert score("reasoning_gym", "42", tag="answer") == 0.0


def test_a_scorer_that_cannot_read_a_response_calls_it_wrong_or_fails_if_it_is_strict() -> None:
    source = make_source(PromptConfig(source="reasoning_gym", families=("prime_factorization",)))
    metadata = source.at(0).metadata
    assert score("reasoning_gym", "garbage", metadata) == 0.0
    with pytest.raises(RewardError, match="prime_factorization: ValueError"):
        score("reasoning_gym", "garbage", metadata, strict=True)
    with pytest.raises(RewardError, match="fails on the right answer too"):
        score("reasoning_gym", "garbage", {**metadata, "answer": "junk"})


def test_the_metadata_of_every_verifier_are_known() -> None:
    assert set(VERIFIERS) == {*ANSWER, "constant", "function", "judge", "reward_model"}


def test_a_constant_is_the_score_of_everything() -> None:
    assert (score("constant", "42", {}), score("constant", "", {}, value=0.5)) == (0.0, 0.5)


@pytest.mark.parametrize("name", sorted(ANSWER))
def test_missing_metadata_is_an_error_and_not_a_zero(name: str) -> None:
    with pytest.raises(RewardError, match=r"the metadata has no field '.*', but other"):
        score(name, "42", {"other": 1})


@pytest.mark.parametrize(("name", "answer"), [("last_integer", "seven"), ("math", "")])
def test_an_answer_that_cannot_be_read_is_an_error_and_not_a_zero(name: str, answer: str) -> None:
    for response in ("42", ""):
        with pytest.raises(RewardError, match="the answer"):
            score(name, response, {"answer": answer})


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("exact-match", {}, "did you mean 'exact_match'"),
        ("exact_match", {"ignorecase": True}, "did you mean 'ignore_case'"),
        ("positions", {"strip": "maybe"}, "option strip: Input should be a valid boolean"),
        ("nowhere.at_all", {}, "cannot be imported"),
    ],
)
def test_wrong_names_and_options_say_what_to_do(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_verifier(name, options)


GARBAGE = st.one_of(
    st.text(max_size=60),
    st.binary(max_size=40).map(lambda b: b.decode("utf-8", "replace")),
    st.from_regex(r"[-\d.,\\{}$()^/x=]{0,40}"),
    st.sampled_from(
        ["```python\n```", "\\boxed{", "$$", "{", "[[[[", "\x00", "9" * 5000, "1e999", "-", "\ud7ff"]
    ),
)


@pytest.mark.parametrize("name", sorted({*ANSWER, "constant"} - {"python_tests"}))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(response=GARBAGE)
def test_no_response_makes_a_verifier_raise(name: str, response: str) -> None:
    value = score(name, response)
    assert math.isfinite(value)
    assert 0 <= value <= 1


@settings(max_examples=12, deadline=None)
@given(response=GARBAGE)
def test_no_response_makes_the_sandbox_raise(response: str) -> None:
    assert score("python_tests", response) == 0.0


OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Options: ...

def score(prompt_text, response, metadata, options):
    return metadata["scores"].pop()
"""


def test_a_verifier_of_the_user_returns_numbers_and_may_change_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_verifiers").mkdir()
    (tmp_path / "own_verifiers/pops.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata: dict[str, object] = {"scores": [1, 0.5]}
    assert [score("own_verifiers.pops", "", metadata) for _ in range(2)] == [0.5, 0.5]
    for wrong, words in (("0.5", "'0.5'"), (None, "NoneType"), (math.nan, "nan")):
        with pytest.raises(RewardError, match=rf"score\(\) returned {words} \(.*pops.py\); a score is"):
            score("own_verifiers.pops", "", {"scores": [wrong]})
