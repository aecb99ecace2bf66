"""Plays GSM8K: word problems with a numeric answer; the model may call a calculator.

The prompt's `answer` is a number, or a solution ending in `#### 72` as in the data set. The reward is 1 if
the model's last turn gives the number, else 0.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.environments.tools import Options as ToolOptions
from rollout.environments.tools import Tools

MINUS = re.compile(r"\u2212|(?<!\d)\u2013(?=[\d$.])", re.ASCII)
"""Unicode minus, or an en dash used as a minus; between digits an en dash denotes a range."""
NUMBER = re.compile(
    r"((?:(?<!\d)-)?)\\?(?:[$\u20ac\u00a3\u00a5](-?))?"
    r"((?:\d|\.\d)(?:[\d.,/]|\u2013(?=\d))*+(?:[eE][-+]?\d+)?+)",
    re.ASCII,
)
"""A number with all its characters, such as 1,234.5, 1/2 or 1e6; 10-5 is two numbers without a sign."""
MARKED = re.compile(rf"####[\s*_]*{NUMBER.pattern}((?:-\d)?)", re.ASCII)
"""A number after the `####` mark, and the rest of a range, if any."""
VALUE = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:[eE][-+]?\d{1,2}|/\d{1,99})?", re.ASCII)
"""Accepted number formats; 1,5 and dash ranges are rejected."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `gsm8k`."""

    calculator: bool = True
    """Whether ```calculator blocks are answered. False: the episode has one turn."""
    max_calls: Annotated[int, Interval(ge=0, le=10**4)] = 4
    """Maximum calculator calls per episode."""
    turn_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Maximum sampled tokens per turn. 0: `sampling.max_tokens`."""
    strict: bool = False
    """Accept only a number after `####`. False: without the mark, use the last number."""


class Gsm8k:
    """Player of one problem per episode."""

    def __init__(self, options: Options) -> None:
        self._strict = options.strict
        calls = options.max_calls if options.calculator else 0
        self._tools = Tools(
            ToolOptions(tools=("calculator",), max_calls=calls, turn_tokens=options.turn_tokens)
        )

    async def play(self, episode: Episode) -> float:
        """Play one problem.

        Raises:
            SettingsError: the prompt has no number as its answer.
        """
        right = number_in(str(episode.metadata.get("answer", "")), strict=False)
        if right is None:
            raise SettingsError(
                f"prompt {episode.prompt.index}: gsm8k needs a number as the answer, or a solution that ends "
                "with '#### NUMBER'"
            )
        episode.reward = 0.0
        answer = await self._tools.answer(episode)
        return float(number_in(answer, self._strict) == right)


def number_in(text: str, strict: bool) -> Fraction | None:
    """Return the last number after `####`; without the mark, the last number unless `strict`.

    Numbers in an unsupported format, such as 1,5 or a range, give None and are never parsed in part.
    """
    text = MINUS.sub("-", text)
    numbers = MARKED.findall(text) or [(*number, "") for number in ([] if strict else NUMBER.findall(text))]
    if not numbers:
        return None
    sign, second_sign, digits, rest = numbers[-1]
    digits = digits.rstrip(".,/")
    if rest or not VALUE.fullmatch(digits) or not any(map(str.isdigit, digits)):
        return None
    try:
        return Fraction((sign or second_sign) + digits.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def make(options: Options) -> EpisodeEnvironment:
    """Return the environment."""
    return EpisodeEnvironment(Gsm8k(options).play)
