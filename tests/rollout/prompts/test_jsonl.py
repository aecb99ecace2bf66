"""Tests what files of lines may have."""

from pathlib import Path

from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n', encoding="utf-8-sig")
    assert make_source(PromptConfig(path=str(path))).at(0).text == "x"
