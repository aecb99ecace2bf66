"""An agent of many turns, in a process of its own, that kills processes of its run at given calls, each once.

LONG_EPISODE_KILLS is a directory with a file for each kill, such as `ingest-7`: the ingest after call 7 and
the dice after it, whose throws the file beside it counts.
"""

import json
import os
import random
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TURNS = int(os.environ.get("LONG_EPISODE_TURNS", "20"))
COMMANDS = {"ingest": "services.ingest", "ledger": "-server"}
POLL_S = 0.05


def solve(task: dict[str, Any]) -> float:
    """Talk for as many turns, and kill on the way."""
    messages = list(task["messages"])
    for turn in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urllib.request.urlopen(f"{task['url']}/chat/completions", body) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        thrown = _thrown(f"{task['url']}/results/turn%20{turn}")
        for what in ("ingest", "ledger", "worker", "harness"):
            _kill_at(what, turn)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"{thrown}="}]
    return float(len(messages[1]["content"]) % 2)


def _thrown(url: str) -> int:
    """Throw dice, unless it is recorded what they showed."""
    try:
        with urllib.request.urlopen(url) as known:
            return int(json.load(known))
    except urllib.error.HTTPError as missing:
        if missing.code != 404:
            raise
    thrown = random.randrange(1, 7)
    with Path(f"{os.environ['LONG_EPISODE_KILLS']}.thrown").open("a") as file:
        file.write(f"{thrown}\n")
    with urllib.request.urlopen(urllib.request.Request(url, str(thrown).encode(), method="PUT")) as recorded:
        return int(json.load(recorded))


def _kill_at(what: str, turn: int) -> None:
    try:
        (Path(os.environ["LONG_EPISODE_KILLS"]) / f"{what}-{turn}").unlink()
    except FileNotFoundError:
        return
    worker = os.getppid()
    if what in COMMANDS:
        while not (found := _children(_parent(worker), COMMANDS[what])):
            time.sleep(POLL_S)  # it is being started again
        os.kill(found[0], signal.SIGKILL)
    else:
        os.kill({"worker": worker, "harness": os.getpid()}[what], signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _children(parent: int, word: str) -> list[int]:
    """Return the children of a process that have a word in their command lines."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word in (entry / "cmdline").read_text() and _parent(int(entry.name)) == parent:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def main() -> None:
    """Serve one sample, or each line of standard input."""
    if "TETHER_TASK" in os.environ:
        task = json.loads(Path(os.environ["TETHER_TASK"]).read_text())
        reward = solve({**task, "url": os.environ["OPENAI_BASE_URL"]})
        Path(os.environ["TETHER_OUTCOME"]).write_text(json.dumps({"reward": reward}))
        return
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps({"key": task["key"], "reward": solve(task)}), flush=True)


if __name__ == "__main__":
    main()
