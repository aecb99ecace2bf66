"""Writes the initial files of a run to a directory: settings, a reward function, prompts."""

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from protocol.errors import SettingsError

TEMPLATES = Path(__file__).parent / "templates"
"""Directory of the files to copy, without their suffix `.txt`."""
PROMPTS = "prompts.jsonl"


def write_run(directory: Path) -> Sequence[str]:
    """Write the files of a small run that learns on a CPU; return their names.

    Raises:
        SettingsError: the directory exists and is not empty, or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if found := next(directory.iterdir(), None):
            raise SettingsError(f"{directory} is not empty, it has {found.name}: give a new directory")
        files = {
            file.name.removesuffix(".txt"): file.read_text("utf-8") for file in sorted(TEMPLATES.iterdir())
        }
        files[PROMPTS] = prompts()
        for name, text in files.items():
            (directory / name).write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{directory}: {error.strerror}: give a directory that can be written") from None
    return list(files)


def prompts() -> str:
    """Return a line for each of the 1,000 triples of digits, shuffled; the answer is the largest digit."""
    triples = list(product("0123456789", repeat=3))
    random.Random(0).shuffle(triples)
    return "".join(
        json.dumps({"prompt": f"{''.join(triple)}=", "answer": max(triple)}) + "\n" for triple in triples
    )
