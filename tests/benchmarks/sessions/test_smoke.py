"""The benchmark of sessions runs and writes what its page shows. No timing is asserted."""

import json
from pathlib import Path

from tests.benchmarks.sessions import many
from tests.benchmarks.sessions.__main__ import main
from tests.changes import slow_unless_changed


def test_small_session_benchmark_writes_what_the_endpoint_adds(tmp_path: Path) -> None:
    out = tmp_path / "sessions.json"
    main(["--open", "1", "20", "--turns", "2", "--repeats", "1", f"--out={out}"])
    figures = json.loads(out.read_text())["figures"]
    assert figures.keys() == {"1", "20"}
    assert figures["20"]["one_at_a_time"]["calls"] == figures["20"]["many_at_once"]["calls"] == 2 * 16
    assert {"idle_session_kb", "added_p50_ms_by_turn"} <= figures["20"].keys()


@slow_unless_changed("tests/benchmarks/", "rollout/sessions/")
def test_workers_are_measured_together(tmp_path: Path) -> None:
    out = tmp_path / "many.json"
    many.main(["--workers", "2", "--open", "20", "--turns", "2", "--repeats", "2", f"--out={out}"])
    figures = json.loads(out.read_text())["figures"]
    assert (figures["open_sessions"], len(figures["idle_session_kb"])) == (40, 2)
    assert len(figures["calls_per_s"]) == len(figures["direct_calls_per_s"]) == 2
