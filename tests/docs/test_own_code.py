"""Runs docs/own_code.md as it is written: every part of a small run is the user's."""

import json
import re
from pathlib import Path

from tests.docs.pages import follow


def test_a_run_of_ones_own_code_is_trained_as_written(tmp_path: Path) -> None:
    printed = follow("own_code.md", tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "mine/own/metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(0 < step["reward_mean"] < 1 for step in steps)
    assert all(step["skipped"] == "" for step in steps)
    assert re.search(r"my_loss:Reinforce on a made batch: 24 samples of 3 groups", printed)
    assert re.search(r"my_algorithm:Squashed on step 2 of mine/own: \d+ samples", printed)
    assert printed.count("differences from grpo, at most: advantages ") == 2
    assert re.search(r"\d\d passed", printed)
    assert re.search(r"steps 3 .*violations 0", printed)
