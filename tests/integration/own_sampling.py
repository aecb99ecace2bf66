"""An agent that asks for sampling of its own, by the clients of OpenAI and Anthropic."""

from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rollout.environments.session import Task

CALLS = 4


async def solve(task: Task) -> float:
    """Draft twice, greedily and at a low temperature; answer by the run's own sampling."""
    assert task.url.startswith("https://127.0.0.2:")
    messages: Any = [{"role": "user", "content": task.prompt.text}]
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        drafts = await client.chat.completions.create(
            model="policy", messages=messages, n=2, temperature=0.5, max_tokens=4, stop=["7"]
        )
        messages += [drafts.choices[1].message, {"role": "user", "content": "1"}]
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        messages += [answer.choices[0].message, {"role": "user", "content": "2"}]
    async with AsyncAnthropic(base_url=task.url.removesuffix("/v1"), api_key=task.key) as other:
        await other.messages.create(
            model="policy",
            messages=[{"role": m["role"], "content": m["content"]} for m in (messages[0], messages[4])],
            max_tokens=4,
            extra_body={"temperature": 0},
        )
    return float(sum(map(int, filter(str.isdigit, answer.choices[0].message.content or ""))))
