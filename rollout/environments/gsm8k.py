"""Plays GSM8K: a word problem with one number as the answer, and a calculator that the model may call.

The prompt's `answer` is a number, or a solution of the data set, which ends with `#### 72`. The reward is 1
if the model's last turn gives that number, else 0.
"""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated

from msgspec import Meta

from protocol.errors import SettingsError
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.environments.tools import Options as ToolOptions
from rollout.environments.tools import Tools

NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+"
LAST_NUMBER = re.compile(NUMBER, re.ASCII)
MARKED = re.compile(rf"####\s*({NUMBER})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `gsm8k`."""

    calculator: bool = True
    """Whether ```calculator blocks are answered. If not, there is one turn."""
    max_calls: Annotated[int, Meta(ge=0, le=10**4)] = 4
    """Calls of the calculator in one episode."""
    turn_tokens: Annotated[int, Meta(ge=0, le=10**7)] = 0
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


def number_in(text: str, strict: bool) -> Decimal | None:
    """Return the last number after `####`; without that mark the last number, unless `strict`."""
    found = MARKED.findall(text) or ([] if strict else LAST_NUMBER.findall(text))
    try:
        return Decimal(re.sub(r"[$,]", "", found[-1])) if found else None
    except InvalidOperation:
        return None


def make(options: Options) -> EpisodeEnvironment:
    """Return the environment."""
    return EpisodeEnvironment(Gsm8k(options).play)
