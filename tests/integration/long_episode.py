"""An agent of many turns that kills its rollout worker at given calls, each once."""

import os
import random
import signal
from pathlib import Path

from aiohttp import ClientSession

from rollout.environments.session import Task

TURNS = 20


async def solve(task: Task) -> float:
    """Talk and throw dice for 20 turns; with LONG_EPISODE_KILLS=DIRECTORY of files named by calls, die at
    each once."""
    messages = [{"role": "user", "content": task.prompt.text}]
    async with ClientSession() as client:
        for turn in range(TURNS):
            async with client.post(
                f"{task.url}/chat/completions", json={"model": "policy", "messages": messages}
            ) as answer:
                said = (await answer.json())["choices"][0]["message"]
            thrown = await task.once(f"turn {turn}", _throw)
            _die_at(turn)
            messages += [
                {"role": "assistant", "content": said["content"]},
                {"role": "user", "content": f"{thrown}="},
            ]
    return float(len(messages[1]["content"]) % 2)


async def _throw() -> int:
    return random.randrange(1, 7)


def _die_at(turn: int) -> None:
    try:
        (Path(os.environ["LONG_EPISODE_KILLS"]) / str(turn)).unlink()
    except (KeyError, FileNotFoundError):
        return
    os.kill(os.getpid(), signal.SIGKILL)
