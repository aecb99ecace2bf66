"""Repairs a file with commands of the model, using only the standard library; runs in a sandbox.

A turn of the model may contain a block that begins with ```bash, which is executed; its output is the next
message. A turn with ```submit, or the last turn, ends the episode. The verifiers get the repaired file or,
for a task without a file, the model's last turn.
"""

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

TURNS = int(os.environ.get("REPAIR_TURNS", "100"))
COMMAND_S = int(os.environ.get("REPAIR_COMMAND_S", "60"))
MAX_OUTPUT_CHARACTERS = 1000
"""Maximum number of characters of an output that the model gets."""
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
RULES = "Write a command in a block that begins with ```bash, or ```submit if you are done."


def ask(messages: Messages) -> str | None:
    """Return the model's next turn; None if the episode allows no more turns."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"] or "")
    except urllib.error.HTTPError as error:
        if json.load(error)["error"]["code"] == "episode_over":
            return None
        raise


def run(command: str) -> str:
    """Run a command; return its output and exit status."""
    try:
        completed = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, errors="replace", timeout=COMMAND_S
        )
    except subprocess.TimeoutExpired:
        return f"[ended after {COMMAND_S} s]"
    output = (completed.stdout + completed.stderr)[-MAX_OUTPUT_CHARACTERS:]
    return f"{output}[exit status {completed.returncode}]"


def converse(text: str, turns: int = TURNS, shorten: Callable[[Messages], Messages] = list) -> str:
    """Let the model solve a task, its history passed to `shorten` before each turn; return its last turn."""
    messages = [{"role": "user", "content": f"{text}\n{RULES}"}]
    last_turn = ""
    for _ in range(turns):
        messages = shorten(messages)
        turn = ask(messages)
        if turn is None:
            break
        last_turn = turn
        if "```submit" in turn:
            break
        blocks = BLOCK.findall(turn)
        output = run(blocks[-1]) if blocks else f"No command found. {RULES}"
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": output}]
    return last_turn


def main(work: Callable[[str], str]) -> None:
    """Run `work` on the task in `TETHER_TASK`, and write the answer to `TETHER_OUTCOME`."""
    task: dict[str, Any] = json.loads(Path(os.environ["TETHER_TASK"]).read_text())
    outcome = Path(os.environ["TETHER_OUTCOME"]).absolute()
    for name, text in task["metadata"]["files"].items():
        Path(name).write_text(text)
    answer = work(task["text"])
    solution = Path("solution.py")
    is_answer = task["metadata"]["rung"] in ("read", "line") or not solution.is_file()
    outcome.write_text(json.dumps({"reward": None, "answer": answer if is_answer else solution.read_text()}))


if __name__ == "__main__":
    main(converse)
