"""Reads a program's report about its sample."""

from dataclasses import dataclass
from typing import Any

MAX_ANSWER = 1 << 20
"""Characters of an answer."""


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text that verifiers score in the place of the model's last answer."""

    text: str


Outcome = float | AnswerText | None
"""The reward of a sample; else verifiers score it, by an answer or by the model's last one."""


def outcome_of(fields: Any) -> Outcome:
    """Return the outcome that a program reports.

    Raises:
        ValueError: it is no object with a `reward` that is a number, or null, in which case an `answer` that
            is a text is read, too.
    """
    try:
        reward = fields["reward"]
        if reward is not None:
            return float(reward)
        answer = fields.get("answer")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f'the outcome is not {{"reward": NUMBER}}: {error!r}'[:300]) from None
    if answer is None:
        return None
    if not isinstance(answer, str) or len(answer) > MAX_ANSWER:
        raise ValueError(f"the outcome's answer is no text of at most {MAX_ANSWER} characters")
    return AnswerText(answer)
