"""Writes the column "last run" of docs/guarantees.md from the records of the test suites.

    python docs/guarantees.py [JUNIT.xml ...]

`make pytest`, `make test-slow` and `make test-gpu` leave a report in runs/junit/, with the commit as the name
of its suite; `make guarantees` calls this with all of them. What each test file did goes to
results/guarantees.json, by report, beside what other reports said before; without reports the page is
written from there.
"""

import datetime
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guarantees.md"
RECORD = ROOT / "results/guarantees.json"
HEADER = "| promise | under which assumptions | test that shows it | last run |"
RUN_BY = {
    "tests/contracts/ledger_": "tests/services/ledger/test_contract.py",
    "tests/contracts/engine_": "tests/rollout/engines/test_contract.py",
    "rollout/engines/contract/suite.py": "tests/rollout/engines/test_contract.py",
}
"""How paths of suites begin that are no test files -> the test file that runs them."""
NO_TEST = "by hand"
"""Last run of a promise that only a command shows."""
Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Test file -> report -> date, commit and counts."""


def rows(page: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """Yield the line, the cells and the test files of each promise.

    Raises:
        LookupError: a file that is named does not exist, or is not clear.
    """
    inside, seen, before = False, list[str](), list[str]()
    for number, line in enumerate(page.splitlines()):
        if not line.startswith("|"):
            inside = False
        elif line.startswith("| promise |"):
            inside = True
        elif inside and not line.startswith("|---"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]
            files = before if cells[2] == "the same" else _named(cells[2], seen)
            before = files
            yield number, cells, [_runner(file) for file in files]


def render(page: str, runs: Runs) -> str:
    """Return the page with its last column as the records say."""
    lines = page.splitlines()
    for number, cells, files in rows(page):
        lines[number] = "| " + " | ".join([*cells[:3], last_run(files, runs)]) + " |"
        lines[number] = lines[number].replace("|  |", "| |")
    text = "\n".join(lines) + "\n"
    return re.sub(r"\| promise \|[^\n]*\n\|[-|]+\n", f"{HEADER}\n|---|---|---|---|\n", text)


def last_run(files: Iterable[str], runs: Runs) -> str:
    """Return date and counts of the newest runs of test files, or that there is no record."""
    wanted = list(dict.fromkeys(files))
    if not wanted:
        return NO_TEST
    known = [run for file in wanted for run in runs.get(file, {}).values()]
    if not known:
        return "no record"
    counts = Counter[str]()
    for run in known:
        counts.update({name: run[name] for name in ("passed", "failed", "skipped")})
    text = f"{min(run['date'] for run in known)[:10]}, {counts['passed']} passed"
    text += "".join(f", {counts[name]} {name}" for name in ("failed", "skipped") if counts[name])
    missing = sum(file not in runs for file in wanted)
    return text + (f"; no record of {missing} of {len(wanted)} files" if missing else "")


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Return date, commit and counts of each test file in a report."""
    found: dict[str, dict[str, Any]] = {}
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        date = datetime.datetime.fromisoformat(suite.attrib["timestamp"]).isoformat(timespec="seconds")
        for case in suite.iter("testcase"):
            file = _file_of(case.attrib["classname"])
            outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = {"skipped": "skipped"}.get("".join(outcomes), "failed") if outcomes else "passed"
            counts = found.setdefault(
                file, {"date": date, "commit": suite.attrib["name"], "passed": 0, "failed": 0, "skipped": 0}
            )
            counts[outcome] += 1
    return found


def _named(cell: str, seen: list[str]) -> list[str]:
    """Return the files that a cell names; `seen` gets them, and says which file a bare name means."""
    found: list[str] = []
    for name in re.findall(r"`([\w/.-]+\.py)`", cell):
        same_folder = [f"{Path(found[-1]).parent}/{name}"] if found else []
        above = [file for file in reversed(seen) if file.endswith(f"/{name}")]
        anywhere = [file for file in _files() if file.endswith(f"/{name}")]
        candidates = [name, *same_folder, *above, *(anywhere if len(anywhere) == 1 else [])]
        file = next((candidate for candidate in candidates if candidate in _files()), None)
        if file is None:
            raise LookupError(f"docs/guarantees.md: {name} does not exist, or could be {anywhere}")
        found.append(file)
        seen.append(file)
    return found


def _runner(file: str) -> str:
    return next((runner for start, runner in RUN_BY.items() if file.startswith(start)), file)


def _file_of(classname: str) -> str:
    """Return the test file of a `classname`, which may end with the name of a class."""
    parts = classname.split(".")
    while parts and not (ROOT / ("/".join(parts) + ".py")).is_file():
        parts.pop()
    return "/".join(parts) + ".py" if parts else classname


@cache
def _files() -> frozenset[str]:
    folders = (ROOT / "tests", ROOT / "rollout")
    return frozenset(str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py"))


def load() -> dict[str, Any]:
    """Return what results/guarantees.json says."""
    known: dict[str, Any] = json.loads(RECORD.read_text())
    return known


def main(reports: list[str]) -> None:
    """Add the reports to the record, and write the page."""
    sys.path.insert(0, str(ROOT))
    from tests.benchmarks.record import record_now

    known = load() if RECORD.exists() else {"runs": {}}
    named = {file for _, _, files in rows(PAGE.read_text()) for file in files}
    for report in reports:
        for file, run in read_report(Path(report)).items():
            if file in named:
                known["runs"].setdefault(file, {})[Path(report).stem] = run
    if reports:
        record = {**record_now(), "command": "make guarantees"}
        ordered = dict(sorted(known["runs"].items()))
        RECORD.write_text(json.dumps({"record": record, "runs": ordered}, indent=1) + "\n")
    PAGE.write_text(render(PAGE.read_text(), known["runs"]))


if __name__ == "__main__":
    main(sys.argv[1:])
