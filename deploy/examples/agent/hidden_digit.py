"""Plays a game with the model: find a hidden digit in two guesses.

The model gets "?" and answers with a digit. After a wrong guess the model gets the distance to count on,
modulo 10, such as "+3=", and answers again: after a guess of 5 the hidden digit is 8. The reward is 1 if the
model finds the digit, else 0. A model that ignores the first answer finds two digits of ten.

Reads a task from each line of standard input and answers with a line. So `openai`, whose import takes a
second of processor time, is imported once for many samples.
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
