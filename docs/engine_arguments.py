"""Writes the tables of refused engine arguments into docs/engines.md: `python docs/engine_arguments.py`."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from protocol.choices import load  # noqa: E402
from rollout.engines.registry import ENGINES  # noqa: E402

PATH = ROOT / "docs/engines.md"
BLOCK = "<!-- refused by {name} -->\n"
END = "<!-- end -->\n"


def render(page: str) -> str:
    """Return the page with the tables as the code has them."""
    for name in ENGINES.having("arguments"):
        table = _table(load(ENGINES[name].arguments).REFUSED)
        begin = re.escape(BLOCK.format(name=name))
        found = re.compile(f"({begin})(.*?)({re.escape(END)})", re.DOTALL)
        if not found.search(page):
            raise SystemExit(f"{PATH}: no block {BLOCK.format(name=name).strip()}")
        page = found.sub(lambda match, table=table: f"{match[1]}\n{table}\n{match[3]}", page)
    return page


def _table(refused: Mapping[str, str]) -> str:
    """Return a table in Markdown: each reason once, with its arguments."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(reason, []).append(f"`{name}`")
    rows = "".join(f"| {', '.join(found)} | {reason} |\n" for reason, found in names.items())
    return f"| argument | refused, because |\n|---|---|\n{rows}"


if __name__ == "__main__":
    PATH.write_text(render(PATH.read_text()))
    print(f"wrote {PATH}")
