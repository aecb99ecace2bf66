"""Tests which groups are trained: by their rewards, or as a function of the user says."""

from pathlib import Path

import msgspec
import pytest

from protocol.errors import SettingsError
from protocol.messages import ScoredRollout
from protocol.tensors import Array
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.config import AlgorithmConfig
from trainer.data.group_filter import ARGUMENTS, group_filter

MODULE = """
seen = []

def spread(*, rewards, metadata):
    return metadata["level"] > 1 and max(rewards) - min(rewards) >= 0.5

def all_of_it(rewards, components, prompt, responses, metadata, token_counts, finish_reasons, versions):
    seen.append(dict(locals()))
    return True

def raises(metadata):
    return metadata["anwser"]

def number(rewards):
    return sum(rewards)

def other(reward):
    return True
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_filter_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_filter_of_test"


def group(*rewards: float, level: int = 2) -> ScoredRollout:
    samples = [
        SampleSpec([5] * (n + 1), [n // 2] * (n + 1), reward=r, finish="stop") for n, r in enumerate(rewards)
    ]
    message = scored(GroupSpec(group=7, samples=samples))
    rollout = msgspec.structs.replace(
        message.rollout, metadata=msgspec.Raw(msgspec.msgpack.encode({"level": level})), prompt_text="1+1="
    )
    components = {"exact": Array.of(rewards, "float32")}
    return msgspec.structs.replace(message, rollout=rollout, components=components)


def own(path: str) -> AlgorithmConfig:
    return AlgorithmConfig(filter_groups=True, group_filter=path)


def test_groups_are_kept_by_their_rewards_where_they_are_filtered() -> None:
    assert group_filter(AlgorithmConfig())(group(1.0, 1.0))
    keeps = group_filter(AlgorithmConfig(filter_groups=True))
    assert [keeps(group(1.0, 1.0)), keeps(group(1.0, 0.0))] == [False, True]


def test_a_filter_of_the_user_decides(module: str) -> None:
    keeps = group_filter(own(f"{module}:spread"))
    assert [keeps(group(1.0, 0.0)), keeps(group(1.0, 0.75)), keeps(group(1.0, 0.0, level=1))] == [
        True, False, False,
    ]  # fmt: skip


def test_a_filter_of_the_user_is_given_the_arguments_that_it_names(module: str) -> None:
    group_filter(own(f"{module}:all_of_it"))(group(1.0, 0.0, 0.5))
    (seen,) = __import__(module).seen
    assert seen == {
        "rewards": [1.0, 0.0, 0.5], "components": {"exact": [1.0, 0.0, 0.5]}, "prompt": "1+1=",
        "responses": [""] * 3, "metadata": {"level": 2}, "token_counts": [1, 2, 3],
        "finish_reasons": ["stop"] * 3, "versions": [0, 1],
    }  # fmt: skip
    assert tuple(seen) == ARGUMENTS


def test_branches_are_counted_with_their_sample(module: str) -> None:
    __import__(module).seen.clear()
    rows = [SampleSpec([5, 6], [0, 0]), SampleSpec([7], [0])]
    group_filter(own(f"{module}:all_of_it"))(
        scored(GroupSpec(samples=rows, branches=[(0, -1, 0), (0, 0, 1)]))
    )
    assert __import__(module).seen[0]["token_counts"] == [3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"raised for group 7 at .*own_filter_of_test.py:12: KeyError: 'anwser'"),
        ("number", r"returned float \(1.0\), not a bool"),
    ],
)
def test_a_filter_of_the_user_that_fails_is_refused(module: str, name: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        group_filter(own(f"{module}:{name}"))(group(1.0, 0.0))


def test_a_filter_of_the_user_with_other_parameters_is_refused(module: str) -> None:
    with pytest.raises(SettingsError, match=r"there is no parameter 'reward'; did you mean 'rewards'\?"):
        group_filter(own(f"{module}:other"))
