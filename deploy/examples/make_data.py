"""Writes the prompts of the three-digit tasks and of the agents, reproducibly.

usage: python deploy/examples/make_data.py
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

TASKS: dict[str, Callable[[str], str]] = {"max3": max, "sort3": lambda digits: "".join(sorted(digits))}
"""Directory -> function from three digits to the answer."""
SEED = 0


def write(directory: Path, answer: Callable[[str], str]) -> None:
    """Write prompts.jsonl: all 1,000 triples, shuffled. Configurations hold out the last 200."""
    triples = [f"{n:03}" for n in range(1000)]
    random.Random(SEED).shuffle(triples)
    rows = [json.dumps({"prompt": f"{digits}=", "answer": answer(digits)}) for digits in triples]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def write_games(directory: Path) -> None:
    """Write prompts.jsonl: the same question for each possible hidden digit."""
    rows = [json.dumps({"prompt": "?", "answer": str(digit)}) for digit in range(10)]
    (directory / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def write_sums(directory: Path) -> None:
    """Write sums.jsonl: 160 calculations with two numbers, each after the same example of tool use.

    Configurations hold out the last 32.
    """
    draw = random.Random(SEED)
    example = [("user", "34 + 58"), *_calculated("34 + 58", "92")]
    rows = []
    for i in range(160):
        low, high = sorted(draw.sample(range(100, 1000), 2))
        operation = "+-*"[i % 3]
        answer = {"+": high + low, "-": high - low, "*": high * low}[operation]
        dialogue = [*example, ("user", f"{high} {operation} {low}")]
        messages = [{"role": role, "content": content} for role, content in dialogue]
        rows.append(json.dumps({"prompt": messages, "answer": str(answer)}))
    (directory / "sums.jsonl").write_text("\n".join(rows) + "\n")


def _calculated(expression: str, value: str) -> list[tuple[str, str]]:
    """Return the messages of a calculation with the tool `calculator`."""
    return [
        ("assistant", f"```calculator\n{expression}\n```"),
        ("user", f"```output\n{value}\n```"),
        ("assistant", value),
    ]


if __name__ == "__main__":
    for task, answer in TASKS.items():
        write(Path(__file__).parent / task, answer)
    write_games(Path(__file__).parent / "agent")
    write_sums(Path(__file__).parent / "agent")
