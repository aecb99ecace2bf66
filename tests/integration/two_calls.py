"""An agent that asks twice."""

import aiohttp

from rollout.environments.session import Task


async def solve(task: Task) -> float:
    """Ask, and ask again with the answer."""
    messages = [{"role": "user", "content": task.prompt.text}]
    async with aiohttp.ClientSession() as client:
        for _ in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 4}
            async with client.post(f"{task.url}/chat/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "1"}]
    return float(len(messages[1]["content"]))
