"""Runs a user's agent as a coroutine of the rollout worker; the agent calls the model at a URL.

async def solve(task: Task) -> float | None:
    client = AsyncOpenAI(base_url=task.url, api_key=task.key)
    answer = await client.chat.completions.create(model="policy", messages=task.as_json()["messages"])
    return 1.0 if task.prompt.metadata["answer"] in answer.choices[0].message.content else 0.0
"""

import inspect
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.user_code import import_attribute, returned_number
from rollout.environments.session import SessionEnvironment, SessionOptions, Task

WHAT = "setting environment.options.function"


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `agent`."""

    function: str = ""
    """Coroutine function as `MODULE:FUNCTION`. It is called with the task and returns the reward, or None to
    let verifiers score the sample."""


class Agent(SessionEnvironment):
    """Environment that calls the agent function once per sample."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._path = options.function
        self._function, self._file = import_attribute(self._path, WHAT)
        if not inspect.iscoroutinefunction(self._function):
            raise SettingsError(
                f"{WHAT}: {self._path} in {self._file} is not asynchronous; write `async def`"
            )

    async def act(self, task: Task) -> float | None:
        """Return the reward that the function computes for a task.

        Raises:
            ValueError: the result is not a reward; the message names the function and its file.
            Exception: any exception of the function.
        """
        reward = await self._function(task)
        try:
            return None if reward is None else returned_number(reward)
        except ValueError as shown:
            raise ValueError(
                f"{self._path} returned {shown} ({self._file}); a reward is a finite float, int, bool or None"
            ) from None


make = Agent
