"""Plays a game with the model: find a hidden digit in two guesses.

The model is asked "?" and answers with a digit. If that is wrong it is told how far to count on from there,
round from 9 to 0, such as "+3=", and answers again: if it had said 5, then 8 was hidden. The reward is 1
if it has found the digit, else 0. Who does not use what the first guess revealed finds two digits of ten.

Reads a task from each line of standard input and answers it by a line, so that `openai` is imported once for
many samples: that takes a second of a processor, a game some milliseconds.
"""

import json
import sys
from typing import Any

from openai import OpenAI


def play(client: OpenAI, task: dict[str, Any]) -> float:
    """Play one game, and return the reward."""
    hidden, messages = task["metadata"]["answer"], task["messages"]
    first = ask(client, messages)
    if first == hidden or not first.isdigit():
        return float(first == hidden)
    told = f"+{(int(hidden) - int(first)) % 10}="
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": told}]
    return float(ask(client, messages) == hidden)


def ask(client: OpenAI, messages: list[dict[str, str]]) -> str:
    """Return the model's answer."""
    answer = client.chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


def main() -> None:
    """Answer every line of standard input."""
    connections = OpenAI(base_url="http://127.0.0.1", api_key="of each session")
    for line in sys.stdin:
        task = json.loads(line)
        client = connections.with_options(base_url=task["url"], api_key=task["key"])
        print(json.dumps({"key": task["key"], "reward": play(client, task)}), flush=True)


if __name__ == "__main__":
    main()
