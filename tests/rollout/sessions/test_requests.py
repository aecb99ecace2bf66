"""Limits of an answer's tokens as requests name them."""

import pytest

from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import read_chat
from rollout.sessions.sampling import SamplingRules
from tests.rollout.sessions.serving import USER


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_the_limit_has_an_older_name_and_a_newer_one(fields: dict[str, int], limit: int | None) -> None:
    assert read_chat({"messages": [USER], **fields}, rules=SamplingRules()).max_tokens == limit


def test_two_limits_are_refused() -> None:
    body = {"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6}
    with pytest.raises(RequestRefused, match="max_tokens and max_completion_tokens differ: give one"):
        read_chat(body, rules=SamplingRules())
