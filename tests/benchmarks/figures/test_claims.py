"""Figures in documents are what the JSON in results/ says, and each JSON says where it is from."""

import datetime
import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.benchmarks.figures.claims import TABLE, Claim, claims, elements, flat, value
from tests.benchmarks.figures.documents import pages, supported_texts, unsupported
from tests.benchmarks.versions import ROOT

RECORDS = sorted((ROOT / "results").glob("*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_says_date_commit_hardware_and_command(path: Path) -> None:
    record = json.loads(path.read_text())["record"]
    assert datetime.datetime.fromisoformat(record["date"])
    assert re.search(r"\b[0-9a-f]{7,12}\b", record["commit"])
    assert "?" not in record["hardware"]
    assert record["hardware"]
    assert re.match(r"(python -m tests\.(benchmarks|trials)\.|make |tether up )", record["command"])


def test_every_claimed_text_is_in_its_page() -> None:
    wrong = [f"{claim.page} should have: {text}" for claim in claims() for text in claim.missing()]
    assert wrong == [], "run `python -m tests.benchmarks.figures`"


def test_documents_have_no_measured_figure_without_a_record() -> None:
    wrong = [found for page in pages() for found in unsupported(page, supported_texts(page))]
    assert wrong == [], "add a claim to results/figures.toml, or take the figure out"


def test_every_exception_has_its_text_and_a_reason() -> None:
    for row in tomllib.loads(TABLE.read_text())["excepted"]:
        assert flat(row["text"]) in flat((ROOT / row["page"]).read_text())
        assert row["why"]


def test_a_changed_figure_and_an_unsupported_one_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs/weights.md"
    right = Claim("docs/weights.md", "bench-gpu.json", "take {:.0f} ms", ("parts/nccl/ms/total",))
    assert right.missing() == []
    assert Claim(right.page, right.file, "take {:.1f} ms", right.values).missing() == ["take 76.1 ms"]
    assert any("76 ms" in found for found in unsupported(page, []))


def test_paths_select_elements_and_compute_with_two() -> None:
    record = {"rows": [{"way": "a", "gpus": 1, "s": 4.0}, {"way": "a", "gpus": 2, "s": 2.0}]}
    assert value(record, "rows/[way=a,gpus=2]/s") == 2.0
    assert value(record, "rows/0/s / rows/1/s") == 2.0
    assert value(record, "rows/0/s * 100") == 400.0
    assert [row["s"] for row in elements(record, "rows[way=a]")] == [4.0, 2.0]
    with pytest.raises(LookupError, match=r"rows/\[way=b\]/s: no \[way=b\]"):
        value(record, "rows/[way=b]/s")
