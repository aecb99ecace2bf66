"""A task set and a harness of the package `verifiers`."""

import asyncio
import json
import urllib.request

import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult


class AnswerData(vf.TaskData):
    answer: str


class AnswerTask(vf.Task[AnswerData]):
    @vf.reward(weight=0.5)
    async def has_answer(self, trace: vf.Trace) -> float:
        if self.data.answer == "raise":
            raise ValueError("no such answer")
        return float(self.data.answer == "4")

    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AnswerTaskset(vf.Taskset[AnswerTask, vf.TasksetConfig]):
    def load(self):
        return []


class TwoTurns(vf.Harness[HarnessConfig]):
    """Asks twice in one dialogue, within the server's process."""

    APPENDS_SYSTEM_PROMPT = False
    SUPPORTS_MCP = False
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        messages = [{"role": "user", "content": data.prompt}]
        for _turn in range(2):
            answer = await asyncio.to_thread(ask, endpoint, secret, ctx.model, messages)
            messages += [answer, {"role": "user", "content": "more"}]
        return ProgramResult(0, "", "")


def ask(endpoint, secret, model, messages):
    body = json.dumps({"model": model, "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/chat/completions", body, headers)) as got:
        return json.load(got)["choices"][0]["message"]


__all__ = ["AnswerTaskset", "TwoTurns"]
