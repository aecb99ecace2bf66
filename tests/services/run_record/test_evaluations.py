"""Tests the lines of eval.jsonl: written whole, read whatever is beside them, described in words."""

from pathlib import Path

import msgspec

from services.run_record.evaluations import (
    BEST,
    FILE,
    MAX_ROWS,
    Evaluation,
    ScoredVersions,
    append_evaluation,
    counted_evaluations,
    describe_evaluation,
    due_versions,
    evaluation_facts,
    fallen_scores,
    latest_evaluations,
    read_evaluations,
    render_facts,
    unscored_versions,
)
from services.run_record.steps import StepLog
from tests.services.run_record.test_steps import report

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


def test_the_page_gets_each_score_once(tmp_path: Path) -> None:
    scores = ScoredVersions(tmp_path)
    assert scores.since(0) == {"rows": [], "last": 0, "reset": False}
    append_evaluation(tmp_path, FULL)
    row = {"step": 3, "set": "math", "greedy": 0.5, "sampled": 0.25}
    assert scores.since(0) == {"rows": [row], "last": 1, "reset": False}
    assert scores.since(1)["rows"] == []
    append_evaluation(tmp_path, Evaluation(version=0, set="code", greedy=1e200))
    assert scores.since(1) == {"rows": [{"step": 0, "set": "code"}], "last": 2, "reset": False}


def test_the_page_forgets_the_scores_of_a_replaced_file(tmp_path: Path) -> None:
    for version in range(MAX_ROWS + 2):
        append_evaluation(tmp_path, Evaluation(version=version, set="math"))
    scores = ScoredVersions(tmp_path)
    found = scores.since(0)
    assert (len(found["rows"]), found["last"], found["rows"][0]["step"]) == (MAX_ROWS, MAX_ROWS + 2, 1)
    other = tmp_path / "other"
    other.mkdir()
    append_evaluation(other, FULL)
    (other / FILE).replace(tmp_path / FILE)
    replaced = scores.since(found["last"])
    assert (replaced["reset"], replaced["last"], len(replaced["rows"])) == (True, 1, 1)


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


def test_the_latest_evaluations_are_of_the_newest_version_that_counts(tmp_path: Path) -> None:
    assert latest_evaluations(tmp_path) == []
    for version in (0, 6, 2, 4):  # the evaluator catches up on 2 and 4
        append_evaluation(tmp_path, Evaluation(version=version, set="math", epoch="e1"))
    assert [row.version for row in latest_evaluations(tmp_path)] == [6]
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in range(6):
        log.append(report(step, "e1"))
    log.append(report(2, "e2"))
    append_evaluation(tmp_path, Evaluation(version=0, set="code", epoch="e2"))
    assert [row.version for row in latest_evaluations(tmp_path)] == [2]  # a rewind abandoned 4 and 6


def put_scores(run_dir: Path, *scores: tuple[int, float | None, float | None], **fields: str) -> None:
    for version, greedy, error in scores:
        row = Evaluation(version=version, set="math", greedy=greedy, greedy_stderr=error, time=7.0, **fields)  # type: ignore[arg-type]
        append_evaluation(run_dir, row)


def test_a_score_far_under_its_best_is_a_warning_until_it_recovers(tmp_path: Path) -> None:
    put_scores(tmp_path, (0, 0.2, 0.03), (4, 0.55, 0.03), (8, 0.45, 0.03))
    assert fallen_scores(tmp_path) == []  # 2.4 standard errors of the difference
    put_scores(tmp_path, (12, 0.35, 0.03))
    ((row, text),) = fallen_scores(tmp_path)
    assert row.version == 12
    assert text.startswith(
        "math has fallen: greedy 0.350 ± 0.030 at version 12, its best is 0.550 ± 0.030 at version 4; "
    )
    facts = evaluation_facts(tmp_path)
    assert facts is not None
    assert facts["warnings"] == [text]
    assert render_facts(facts).splitlines()[-1] == f"warning: {text}"
    put_scores(tmp_path, (16, 0.5, 0.03))
    assert fallen_scores(tmp_path) == []


def test_a_score_without_an_error_or_of_an_abandoned_version_is_no_best(tmp_path: Path) -> None:
    put_scores(tmp_path, (0, 0.9, None), (2, None, None), (4, 0.1, 0.01), epoch="e1")
    assert fallen_scores(tmp_path) == []
    put_scores(tmp_path, (6, 0.9, 0.01), epoch="e1")
    log = StepLog(tmp_path / "metrics.jsonl")
    for step, epoch in ((0, "e1"), (4, "e2")):
        log.append(msgspec.structs.replace(report(step), epoch=epoch))
    put_scores(tmp_path, (5, 0.1, 0.01), epoch="e2")
    assert fallen_scores(tmp_path) == []
