"""An agent whose sessions wait for each other, so that all of them are open at once."""

import asyncio

import aiohttp

from rollout.environments.session import Task

CROWD = 2000
"""Sessions that wait for each other."""
_open = 0
_together: asyncio.Event | None = None
most = 0
"""Sessions that were open at once, the most."""


async def solve(task: Task) -> float:
    """Call, wait until everybody has called, and call again over the same connection."""
    global _open, _together, most
    if _together is None:
        _together = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=None)
    messages = [{"role": "user", "content": task.prompt.text}]
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for turn in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 4}
            async with client.post(f"{task.url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "1"}]
            if turn == 0:
                _open += 1
                most = max(most, _open)
                if most == CROWD:
                    _together.set()
                await _together.wait()
    _open -= 1
    return float(len(messages))
