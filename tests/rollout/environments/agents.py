"""Agents for tests, as a user would write them."""

from openai import AsyncOpenAI

from rollout.sessions.environment import Task


async def plays(task: Task) -> float:
    """Asks twice in one dialogue, then once more with a rewritten history."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        messages = task.as_json()["messages"]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
        summary = {"role": "user", "content": f"{task.prompt.text}: so far"}
        await client.chat.completions.create(model="policy", messages=[summary])
    return float(task.prompt.metadata["answer"])


async def unscored(task: Task) -> None:
    """Asks once, and leaves the score to verifiers."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        await client.completions.create(model="policy", prompt=task.prompt.text, max_tokens=3)


async def silent(task: Task) -> float:
    """Never asks the model."""
    return 1.0


def not_asynchronous(task: Task) -> float:
    return 1.0
