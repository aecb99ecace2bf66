"""Tests the comparison of ratios with the recorded ones; the benchmarks have tests of their own."""

import json
import shutil
from pathlib import Path

import pytest

from tests.benchmarks.check import RATIOS, SECTIONS, main, worse_by
from tests.benchmarks.figures.claims import find
from tests.benchmarks.versions import ROOT


@pytest.fixture
def found(tmp_path: Path) -> Path:
    for name in {ratio.file for ratio in RATIOS}:
        shutil.copy(ROOT / "results" / name, tmp_path)
    return tmp_path


def change(found: Path, index: int, factor: float) -> None:
    ratio = RATIOS[index]
    facts = json.loads((found / ratio.file).read_text())
    place, _, key = ratio.path.rpartition("/")
    find(facts, place)[key] *= factor
    (found / ratio.file).write_text(json.dumps(facts))


def test_recorded_ratios_are_as_good_as_themselves(found: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--found", str(found)]) == 0
    assert capsys.readouterr().out.count("same") == len(RATIOS)


@pytest.mark.parametrize("index", range(len(RATIOS)))
def test_ratio_that_is_worse_fails_and_one_that_is_better_does_not(
    found: Path, index: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lower = RATIOS[index].less_is_better
    change(found, index, 0.85 if lower else 1.15)
    assert main(["--found", str(found)]) == 0
    change(found, index, 1.35 if lower else 0.75)
    assert main(["--found", str(found)]) == 1
    assert "WORSE " in capsys.readouterr().out


def test_ratio_without_a_reference_on_this_machine_is_named_and_not_compared(
    found: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads((found / "bench.json").read_text())
    facts["figures"]["ledger.lifecycles_per_s"]["ratio"] = None
    (found / "bench.json").write_text(json.dumps(facts))
    assert main(["--found", str(found), "--only", "bus,ledger"]) == 0
    printed = capsys.readouterr().out
    assert "no reference" in printed
    assert "nan  figures/ledger.lifecycles_per_s" in printed
    assert printed.count("same") == 2


def test_share_counts_from_the_recorded_ratio() -> None:
    assert worse_by(2.0, 1.8, less_is_better=False) == pytest.approx(0.1)
    assert worse_by(0.30, 0.33, less_is_better=True) == pytest.approx(0.1)


def test_unknown_section_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "bus,wheels"])
    assert f"wheels: choose from {', '.join(SECTIONS)}" in capsys.readouterr().err
