"""Plays GSM8K: a word problem with one number as the answer, and a calculator that the model may call.

The prompt's `answer` is a number, or a solution of the data set, which ends with `#### 72`. The reward is 1
if the model's last turn gives that number, else 0.
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
"""Unicode's minus, and an en dash that stands for one; between digits the dash means a range."""
NUMBER = re.compile(
    r"((?:(?<!\d)-)?)\\?(?:[$\u20ac\u00a3\u00a5](-?))?"
    r"((?:\d|\.\d)(?:[\d.,/]|\u2013(?=\d))*+(?:[eE][-+]?\d+)?+)",
    re.ASCII,
)
"""A number with everything that belongs to it, such as 1,234.5, 1/2 or 1e6; 10-5 is two, without a sign."""
MARKED = re.compile(rf"####[\s*_]*{NUMBER.pattern}((?:-\d)?)", re.ASCII)
"""A number after the mark, and the rest of a range if it is one."""
VALUE = re.compile(r"(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*)?(?:[eE][-+]?\d{1,2}|/\d{1,99})?", re.ASCII)
"""The forms that are read; 1,5 and a range such as 3 to 5 written with a dash are not read."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `gsm8k`."""

    calculator: bool = True
    """Whether ```calculator blocks are answered. If not, there is one turn."""
    max_calls: Annotated[int, Interval(ge=0, le=10**4)] = 4
    """Calls of the calculator in one episode."""
    turn_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Tokens that the model may sample per turn. 0: `sampling.max_tokens`."""
    strict: bool = False
    """Read only a number after `####`. Otherwise, without such a mark, the last number counts."""


class Gsm8k:
    """Plays one problem with each episode."""

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
        said = await self._tools.answer(episode)
        return float(number_in(said, self._strict) == right)


def number_in(text: str, strict: bool) -> Fraction | None:
    """Return the last number after `####`; without that mark the last number, unless `strict`.

    A number in a form that is not read, such as 1,5 or a range, gives None and is never read in part.
    """
    text = MINUS.sub("-", text)
    found = MARKED.findall(text) or [(*number, "") for number in ([] if strict else NUMBER.findall(text))]
    if not found:
        return None
    sign, second_sign, digits, rest = found[-1]
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
