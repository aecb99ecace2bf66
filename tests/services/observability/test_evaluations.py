"""Tests the lines of eval.jsonl: written whole, read whatever is beside them, described in words."""

from pathlib import Path

import msgspec

from services.observability.evaluations import (
    BEST,
    FILE,
    Evaluation,
    EvaluationFollower,
    append_evaluation,
    counted_evaluations,
    describe_evaluation,
    due_versions,
    evaluation_facts,
    latest_evaluations,
    read_evaluations,
    render_facts,
    unscored_versions,
)
from services.observability.steps import StepLog
from tests.services.observability.test_steps import report

FULL = Evaluation(
    version=4, step=3, digest="0" * 16, set="math", n=10, samples=2, greedy=0.5, greedy_stderr=0.125,
    sampled=0.25, pass_at_k={1: 0.25, 2: 0.375}, pass_at_k_stderr={1: 0.1, 2: None}, seconds=1.25,
)  # fmt: skip


def test_evaluations_are_read_as_written_and_torn_lines_are_skipped(tmp_path: Path) -> None:
    append_evaluation(tmp_path, FULL)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"version": 5, "se')
    other = Evaluation(version=6, set="math")
    append_evaluation(tmp_path, other)
    assert list(read_evaluations(tmp_path)) == [FULL, other]
    assert list(read_evaluations(tmp_path / "nowhere")) == []


def test_the_last_line_of_a_version_and_set_counts(tmp_path: Path) -> None:
    rows = [
        Evaluation(version=4, set="math", digest="a"),
        Evaluation(version=4, set="code", digest="a"),
        Evaluation(version=6, set="math", digest="b"),
        Evaluation(version=4, set="math", digest="c"),
    ]
    for row in rows[:-1]:
        append_evaluation(tmp_path, row)
    assert counted_evaluations(tmp_path) == rows[:-1]
    assert counted_evaluations(tmp_path, rows[-1]) == rows[1:]


def test_versions_that_a_rewind_abandoned_do_not_count_once_a_step_proves_it(tmp_path: Path) -> None:
    first = [Evaluation(version=v, set="math", epoch="e1") for v in (0, 2, 4, 6)]
    resumed = Evaluation(version=7, set="math", epoch="e2")  # published by a trainer that continued there
    for row in (*first, resumed):
        append_evaluation(tmp_path, row)
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in range(7):
        log.append(report(step, "e1"))
    log.append(report(7, "e2"))
    rewound = Evaluation(version=4, set="code", epoch="e3")
    assert counted_evaluations(tmp_path, rewound) == [*first, resumed, rewound]
    log.append(report(4, "e3"))
    assert counted_evaluations(tmp_path, rewound) == [*first[:3], rewound]


def test_unmeasured_value_of_an_evaluation_is_null(tmp_path: Path) -> None:
    append_evaluation(tmp_path, Evaluation(version=0, set="math"))
    line = msgspec.json.decode((tmp_path / FILE).read_bytes())
    assert (line["step"], line["greedy"], line["sampled_stderr"], line["pass_at_k"]) == (None, None, None, {})


def test_due_versions_are_multiples_and_the_last_one() -> None:
    assert due_versions(2, 0, 5) == [0, 2, 4, 5]
    assert due_versions(3, 4, 9) == [6, 9]
    assert due_versions(10, 0, 0) == [0]


def test_unscored_versions_lack_a_set_that_others_have() -> None:
    rows = [Evaluation(version=v, set=s) for v, s in ((0, "a"), (0, "b"), (2, "a"), (4, "a"), (4, "b"))]
    assert unscored_versions(rows, [0, 2, 4, 6]) == [2, 6]
    assert unscored_versions([], [0, 2]) == [0, 2]


def test_evaluation_is_described_in_one_line() -> None:
    assert describe_evaluation(FULL) == (
        "evaluation of version 4 on math: greedy 0.500 ± 0.125, sampled 0.250, pass@2 0.375, 10 prompts, "
        "1.2 s"
    )
    nothing = Evaluation(version=0, set="code", failed=3, error="prompt 0: too long")
    assert "0 prompts, 3 not scored (prompt 0: too long)" in describe_evaluation(nothing)


def test_follower_describes_new_lines_once(tmp_path: Path) -> None:
    append_evaluation(tmp_path, FULL)
    follower = EvaluationFollower(tmp_path)
    assert follower.new_lines() == []
    append_evaluation(tmp_path, FULL)
    assert follower.new_lines() == [describe_evaluation(FULL)]
    assert follower.new_lines() == []


def test_facts_are_the_sets_of_the_latest_version_and_the_best(tmp_path: Path) -> None:
    assert render_facts(evaluation_facts(tmp_path)) == ""
    for row in (FULL, Evaluation(version=6, set="math"), Evaluation(version=6, set="code", greedy=0.75)):
        append_evaluation(tmp_path, row)
    assert [row.set for row in latest_evaluations(tmp_path)] == ["math", "code"]
    (tmp_path / BEST).parent.mkdir()
    best = {"version": 4, "set": "math", "metric": "greedy", "score": 0.5, "directory": "best_step_00000004"}
    (tmp_path / BEST).write_bytes(msgspec.json.encode(best))
    facts = evaluation_facts(tmp_path)
    assert facts is not None
    assert facts["best"] == best
    lines = render_facts(facts).splitlines()
    assert lines[2] == "evaluation of version 6 on code: greedy 0.750, 0 prompts, 0.0 s"
    assert lines[3] == "best: version 4, math greedy 0.500, in exports/best_step_00000004"
