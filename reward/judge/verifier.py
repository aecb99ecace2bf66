"""Scores with a judge at an OpenAI-style URL, with one request per response or per group."""

from collections.abc import Sequence

from reward.group import ResponseGroup
from reward.judge.client import JudgeClient
from reward.judge.config import Options, check_options, read_key
from reward.judge.question import GROUP_PLACEHOLDERS, make_question, template_fields
from reward.judge.reading import make_reader
from reward.verifiers.base import AwaitedVerifier, Notes

__all__ = ["Judge", "Options", "needed_fields"]


def needed_fields(options: Options) -> list[str]:
    """Return the metadata fields that the templates require."""
    return sorted(template_fields(options) - GROUP_PLACEHOLDERS)


class Judge(AwaitedVerifier):
    """Verifier that scores with an LLM judge."""

    def __init__(self, options: Options) -> None:
        """Validate the options. Sends no request.

        Raises:
            SettingsError: an option is invalid, or the key is missing.
        """
        check_options(options)
        self._question = make_question(options)
        self._client = JudgeClient(options, read_key(options))
        self.at_once = self._question.whole
        self._read, parse_file = make_reader(options, self.at_once)
        self.file = self._question.file or parse_file
        self.max_running = options.max_requests

    async def answer(self, group: ResponseGroup, samples: Sequence[int], notes: Notes) -> list[float]:
        """Return the scores of `samples`.

        Raises:
            RewardError: the judge returned no score. The message names the judge's URL.
            Exception: any exception of a user's function.
        """
        if self.at_once:
            scores = await self._ask(group, 0, len(group.responses), notes)
            return [scores[i] for i in samples]
        return [(await self._ask(group, i, 1, notes))[0] for i in samples]

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _ask(self, group: ResponseGroup, i: int, n: int, notes: Notes) -> list[float]:
        messages = self._question.messages(group, i)
        return await self._client.ask(messages, lambda text: self._read(text, n), notes)
