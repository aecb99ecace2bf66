"""Data and models of the form of those on the hub, as files: a few rows, a tiny random model."""

import json
import string
from pathlib import Path
from typing import Any

from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
Rows are a question, and an answer that ends with its number.
"""


CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def write_model(directory: Path) -> Path:
    """Write a random model that reads plain text, with a chat template."""
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    config = ScratchConfig(
        vocabulary=characters, hidden_size=32, intermediate_size=32, max_position_embeddings=4096
    )
    build_scratch(config, directory)
    tokenizer = directory / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "chat_template": CHAT_TEMPLATE}))
    return directory


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows of GSM8K's form: the answer is worked out, and ends with the number."""
    return [
        {
            "question": f"Ann has {i} apples and buys {i + 1}. How many has she?",
            "answer": f"{i} + {i + 1} = <<{i}+{i + 1}={2 * i + 1}>>{2 * i + 1}\n#### {2 * i + 1:,}",
        }
        for i in range(start, start + count)
    ]


def write_gsm8k(directory: Path, train: int = 20, test: int = 8) -> Path:
    """Write a directory as `openai/gsm8k` is one: two subsets, splits, Parquet files, a card."""
    for name, rows in (
        ("main/train", sums(train)),
        ("main/test", sums(test, 10**6)),
        ("socratic/train", sums(3)),
    ):
        write_parquet(directory / f"{name}-00000-of-00001.parquet", rows)
    (directory / "README.md").write_text(GSM8K_CARD)
    return directory


def math_rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Rows with the fields of MATH: a problem, a solution in LaTeX, and its answer alone."""
    return [
        {
            "problem": f"What is $\\frac{{{i}}}{{7}}$ of $7$?",
            "solution": f"$7 \\cdot \\frac{{{i}}}{{7}} = \\boxed{{{i}}}$.",
            "answer": str(i),
            "level": i % 5 + 1,
        }
        for i in range(start, start + count)
    ]


def write_math(directory: Path, train: int = 150) -> Path:
    """Write a directory with the splits `train` and `test` of MATH, without a card."""
    write_parquet(directory / "data/train-00000-of-00001.parquet", math_rows(train))
    write_parquet(directory / "data/test-00000-of-00001.parquet", math_rows(5, 10**6))
    return directory


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path
