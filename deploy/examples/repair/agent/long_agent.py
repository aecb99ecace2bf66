"""Repairs a file as `plain_agent` does, with a helper and a history that stays short; runs in a sandbox.

A helper looks at the file first, in a dialogue of its own; the agent gets its last turn. When the messages
have more characters than `HISTORY`, the model is asked to summarise them, and the dialogue goes on with the
task and the summary. Each dialogue, before and after a summary, is a branch of the episode.
"""

import os

from plain_agent import TURNS, Messages, ask, converse, main

HISTORY = int(os.environ.get("REPAIR_HISTORY", "20000"))
HELPER_TURNS = int(os.environ.get("REPAIR_HELPER_TURNS", "5"))
LOOK = "Do not repair anything. Look at the file, and name its wrong line in your last turn."
SUMMARISE = "Summarise what was found out and done so far. You go on with your summary alone."


def shortened(messages: Messages) -> Messages:
    """Return the messages, or if they are too long the task with a summary of them."""
    if len(messages) == 1 or sum(len(message["content"]) for message in messages) <= HISTORY:
        return messages
    summary = ask([*messages, {"role": "user", "content": SUMMARISE}])
    task = messages[0]["content"].partition("\nSo far: ")[0]
    return [{"role": "user", "content": f"{task}\nSo far: {summary}"}]


def work(text: str) -> str:
    """Let a helper look at a task, and the model work on it; return its last turn."""
    report = converse(f"{text}\n{LOOK}", HELPER_TURNS, shortened)
    return converse(f"{text}\nA helper says: {report}", TURNS, shortened)


if __name__ == "__main__":
    main(work)
