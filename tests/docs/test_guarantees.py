"""Tests that docs/guarantees.md names tests that exist, and says how they did when they last ran."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, program

REPORT = """\
<testsuites><testsuite name="0123abcd" timestamp="2026-11-26T13:48:53.220237+00:00">
<testcase classname="tests.services.bus.test_peers" name="test_a"/>
<testcase classname="tests.services.bus.test_peers.TestOf" name="test_b"><failure/></testcase>
<testcase classname="tests.services.bus.test_delivery" name="test_c"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_every_promise_names_tests_that_exist_or_a_command() -> None:
    rows = list(program("guarantees").rows((DOCS / "guarantees.md").read_text()))
    assert len(rows) > 100
    without = [cells for _, cells, files in rows if not files and "python -m" not in cells[2]]
    assert without == []
    assert all((DOCS.parent / file).is_file() for _, _, files in rows for file in files)


def test_page_is_what_the_records_say() -> None:
    guarantees, page = program("guarantees"), (DOCS / "guarantees.md").read_text()
    assert guarantees.render(page, guarantees.load()["runs"]) == page, "run `python docs/guarantees.py`"


def test_a_test_that_is_gone_is_named() -> None:
    page = "| promise | under | test that shows it |\n|---|---|---|\n| a | | `tests/test_gone.py` |\n"
    with pytest.raises(LookupError, match=r"tests/test_gone\.py does not exist"):
        list(program("guarantees").rows(page))


def test_report_of_a_suite_becomes_counts_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "pytest.xml").write_text(REPORT)
    guarantees = program("guarantees")
    found = guarantees.read_report(tmp_path / "pytest.xml")
    peers, delivery = "tests/services/bus/test_peers.py", "tests/services/bus/test_delivery.py"
    assert found[peers] == {
        "date": "2026-11-26T13:48:53+00:00", "commit": "0123abcd", "passed": 1, "failed": 1, "skipped": 0
    }  # fmt: skip
    runs = {file: {"pytest": run} for file, run in found.items()}
    assert guarantees.last_run([peers], runs) == "2026-11-26, 1 passed, 1 failed"
    assert guarantees.last_run([peers, "tests/other.py"], runs).endswith("; no record of 1 of 2 files")
    assert guarantees.last_run(["tests/other.py"], runs) == "no record"
    assert guarantees.last_run([], runs) == "by hand"
    assert delivery in found
