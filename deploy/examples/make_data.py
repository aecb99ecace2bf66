"""Writes the prompts of the three-digit tasks: `python deploy/examples/make_data.py`. The same files every time."""

import json
import random
from collections.abc import Callable
from pathlib import Path

TASKS: dict[str, Callable[[str], str]] = {"max3": max, "sort3": lambda digits: "".join(sorted(digits))}
"""Directory -> the answer to three digits."""
TRAIN = 800
"""Of the 1,000 triples; the others are held out."""
SEED = 0


def write(directory: Path, answer: Callable[[str], str]) -> None:
    """Write train.jsonl and heldout.jsonl, which share no prompt."""
    triples = [f"{n:03}" for n in range(1000)]
    random.Random(SEED).shuffle(triples)
    for name, part in (("train", triples[:TRAIN]), ("heldout", triples[TRAIN:])):
        rows = [json.dumps({"prompt": f"{digits}=", "answer": answer(digits)}) for digits in part]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    for task, answer in TASKS.items():
        write(Path(__file__).parent / task, answer)
