"""Repairs a file as `plain_agent`, with a helper and a short history; runs in a sandbox.

First a helper inspects the file in a separate dialogue; the agent gets the helper's last turn. When the
messages exceed `HISTORY` characters, the model summarizes them, and the dialogue continues with the task and
the summary. Each dialogue, before and after a summary, is a branch of the episode.
"""

import os

from plain_agent import TURNS, Messages, ask, converse, main

HISTORY = int(os.environ.get("REPAIR_HISTORY", "20000"))
HELPER_TURNS = int(os.environ.get("REPAIR_HELPER_TURNS", "5"))
LOOK = "Do not repair anything. Look at the file, and name its wrong line in your last turn."
SUMMARISE = "Summarise what was found out and done so far. You go on with your summary alone."


def shortened(messages: Messages) -> Messages:
    """Return the messages; if they are too long, the task with a summary of them."""
    if len(messages) == 1 or sum(len(message["content"]) for message in messages) <= HISTORY:
        return messages
    summary = ask([*messages, {"role": "user", "content": SUMMARISE}])
    task = messages[0]["content"].partition("\nSo far: ")[0]
    return [{"role": "user", "content": f"{task}\nSo far: {summary}"}]


def work(text: str) -> str:
    """Let a helper inspect a task, then let the model solve it; return the model's last turn."""
    report = converse(f"{text}\n{LOOK}", HELPER_TURNS, shortened)
    return converse(f"{text}\nA helper says: {report}", TURNS, shortened)


if __name__ == "__main__":
    main(work)
