"""Passes a program its session and files, and parses its report about the sample."""

import json
from dataclasses import dataclass
from typing import Any

MAX_ANSWER = 1 << 20
"""Maximum length of an answer, characters."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text that verifiers score instead of the model's last answer."""

    text: str


Outcome = float | AnswerText | None
"""Reward of a sample; otherwise verifiers score it, by an `AnswerText` or by the model's last answer."""


def variables_of(url: str, key: str, task: str, outcome: str) -> dict[str, str]:
    """Return the environment variables with a program's session URL, API key and files."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "TETHER_TASK": task,
        "TETHER_OUTCOME": outcome,
    }


def written_outcome(data: bytes | None) -> Outcome:
    """Return the outcome in a file; None if there is no file.

    Raises:
        ValueError: the file is not JSON, or see `outcome_of`.
    """
    try:
        fields = None if data is None else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise no_outcome(error) from None
    return None if data is None else outcome_of(fields)


def no_outcome(error: Exception) -> ValueError:
    """Return the error for an invalid or unreadable outcome."""
    return ValueError(f'the outcome is not {{"reward": NUMBER}}: {error!r}'[:300])


def outcome_of(fields: Any) -> Outcome:
    """Return the outcome that a program reports.

    Raises:
        ValueError: the report is not an object with `reward`: a number, or null with an optional text
            `answer`.
    """
    try:
        reward = fields["reward"]
        if reward is not None:
            return float(reward)
        answer = fields.get("answer")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise no_outcome(error) from None
    if answer is None:
        return None
    if not isinstance(answer, str) or len(answer) > MAX_ANSWER:
        raise ValueError(f"the outcome's answer is not a text of at most {MAX_ANSWER} characters")
    return AnswerText(answer)
