"""Writes the prompts of the three-digit tasks and of the agent's game, the same files every time.

usage: python deploy/examples/make_data.py
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

TASKS: dict[str, Callable[[str], str]] = {"max3": max, "sort3": lambda digits: "".join(sorted(digits))}
"""Directory -> the answer to three digits."""
SEED = 0


def write(directory: Path, answer: Callable[[str], str]) -> None:
    """Write prompts.jsonl: all 1,000 triples, shuffled. Configurations hold the last 200 out."""
    triples = [f"{n:03}" for n in range(1000)]
    random.Random(SEED).shuffle(triples)
    rows = [json.dumps({"prompt": f"{digits}=", "answer": answer(digits)}) for digits in triples]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def write_games(directory: Path) -> None:
    """Write prompts.jsonl: the same question for each digit that may be hidden."""
    rows = [json.dumps({"prompt": "?", "answer": str(digit)}) for digit in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    for task, answer in TASKS.items():
        write(Path(__file__).parent / task, answer)
    write_games(Path(__file__).parent / "agent")
