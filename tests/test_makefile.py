"""Each target that the Makefile names does something."""

import re
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[1] / "Makefile").read_text()


def test_every_phony_target_has_a_recipe() -> None:
    named = re.findall(r"^\.PHONY: (.*)$", TEXT, re.MULTILINE)
    made = dict(re.findall(r"^([\w-]+):(.*(?:\n\t.*)*)", TEXT, re.MULTILINE))
    assert {target for line in named for target in line.split() if not made.get(target, "").strip()} == set()
