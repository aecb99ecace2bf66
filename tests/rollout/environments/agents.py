"""Agents and programs for tests, as a user would write them."""

import asyncio

from openai import APIStatusError, AsyncOpenAI, BadRequestError

from rollout.environments.session import Task

ASKS = """
import json, os, pathlib, sys, urllib.error, urllib.request
task = json.loads(pathlib.Path(os.environ["TETHER_TASK"]).read_text())

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

answer = ask(task["messages"])
try:
    ask([*task["messages"], answer, {"role": "user", "content": "sure?"}])
except urllib.error.HTTPError as full:
    assert json.load(full)["error"]["code"] == "episode_over"
"""
"""A program that asks twice in one dialogue, if there is room."""

SERVES = """
import json, sys, urllib.error, urllib.request

def ask(task, messages):
    body = json.dumps({"messages": messages}).encode()
    return json.load(urllib.request.urlopen(task["url"] + "/chat/completions", body))["choices"][0]["message"]

for line in sys.stdin:
    task = json.loads(line)
    answer = ask(task, task["messages"])
    try:
        ask(task, [*task["messages"], answer, {"role": "user", "content": "sure?"}])
    except urllib.error.HTTPError as full:
        assert json.load(full)["error"]["code"] == "episode_over"
    print(json.dumps({"key": task["key"], "reward": float(task["metadata"]["answer"]) / 8}), flush=True)
"""
"""A program that does so for one task after another."""


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


async def counts(task: Task) -> float:
    """Asks twice in one dialogue of digits, and once more without the answers."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        messages = task.as_json()["messages"]
        for digit in "12":
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": f" {digit}="}]
        said = messages[-2].content or ""
        rewritten = {"role": "user", "content": f"{task.prompt.text} 3="}
        await client.chat.completions.create(model="policy", messages=[rewritten])
    return float(task.prompt.metadata["answer"] in said)


seen: dict[str, object] = {}
"""Metadata that `shows` got."""


async def shows(task: Task) -> None:
    """Notes its metadata, and asks once."""
    seen.update(task.prompt.metadata)
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        await client.chat.completions.create(model="policy", messages=task.as_json()["messages"])


async def talks(task: Task) -> None:
    """Asks twice in one dialogue, if there is room."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        messages = task.as_json()["messages"]
        for _ in range(2):
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages)
            except BadRequestError as full:
                if full.code == "episode_over":
                    break
                raise
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]


async def unscored(task: Task) -> None:
    """Asks once, and leaves the score to verifiers."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        await client.completions.create(model="policy", prompt=task.prompt.text, max_tokens=3)


released = asyncio.Event()
refused: list[int] = []


async def clings(task: Task) -> float:
    """Asks, ignores that it is cancelled, and asks again, until it is released."""
    async with AsyncOpenAI(base_url=task.url, api_key=task.key) as client:
        await client.completions.create(model="policy", prompt=task.prompt.text, max_tokens=3)
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                try:
                    await client.completions.create(model="policy", prompt=task.prompt.text)
                except APIStatusError as answer:
                    refused.append(answer.status_code)
    return 1.0


outcome: object = None


async def returns(task: Task) -> object:
    """Asks once, and returns what a test has set."""
    await unscored(task)
    return outcome


async def silent(task: Task) -> float:
    """Never asks the model."""
    return 1.0


def not_asynchronous(task: Task) -> float:
    return 1.0
