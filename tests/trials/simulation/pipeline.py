"""Pipelines calls to a server, in the order in which they were made."""

from collections.abc import Coroutine, Generator, Sequence
from typing import Any

import redis

from protocol.errors import Reason, Refused
from services.ledger.redis.scripts import Script, script
from tests.contracts.ledger_rig import SCRIPTS

MOST = 256
"""Calls that wait for each other."""


class _Answer:
    """Awaited by a call that has been made; `value` is set when the call is resumed."""

    value: Any = None

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self.value


class Pipeline:
    """Takes the place of `RedisLedger`'s connection.

    A call made by `begin` waits for `flush`, which checks its result.
    """

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        for name in SCRIPTS:
            self._client.script_load(script(name).body)
        self._commands: list[tuple[Any, ...]] = []
        self._answers: list[_Answer | None] = []
        self._calls: list[tuple[str, Coroutine[Any, Any, Any], Any]] = []

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Any]) -> list[Any]:
        answer = _Answer()
        self._commands.append(("EVALSHA", script.sha, len(keys), *keys, *arguments))
        self._answers.append(answer)
        found = await answer
        if found[0] == b"refused":
            raise Refused(Reason(found[1].decode()), found[2].decode())
        return list(found[1:])

    async def command(self, *words: Any) -> Any:
        """Run a plain command, after all earlier ones."""
        self.flush()
        return self._client.execute_command(*words)

    def later(self, *words: Any) -> None:
        """Queue a plain command whose answer is not needed."""
        self._commands.append(words)
        self._answers.append(None)

    def begin(self, label: str, call: Coroutine[Any, Any, Any], expected: Any) -> None:
        """Make a call whose result must be `expected`: a value, or a refusal of the same reason."""
        call.send(None)
        self._calls.append((label, call, expected))
        if len(self._calls) >= MOST:
            self.flush()

    def flush(self) -> None:
        """Send the queued calls, and check their results."""
        batch = self._client.pipeline(transaction=False)
        for words in self._commands:
            batch.execute_command(*words)
        found = batch.execute()
        for answer, value in zip(self._answers, found, strict=True):
            if answer is not None:
                answer.value = value
        calls, self._commands, self._answers, self._calls = self._calls, [], [], []
        for label, call, expected in calls:
            answered = _finish(call)
            same = (
                answered.reason == expected.reason if _refusals(answered, expected) else answered == expected
            )
            assert same, f"{label}: {expected} in memory, {answered} on the server"

    async def close(self) -> None:
        self._client.close()


def _refusals(*values: Any) -> bool:
    return all(isinstance(value, Refused) for value in values)


def _finish(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the value or refusal of a call whose answer has arrived."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value
    except Refused as refusal:
        return refusal
    raise AssertionError("a call asks the server twice")
