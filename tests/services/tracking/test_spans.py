"""Tests the spans of a run: the recorded run's, read in pieces and by a restarted process."""

from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE as EVENTS
from services.run_record.evaluations import FILE as EVALUATIONS
from services.run_record.evaluations import Evaluation, append_evaluation
from services.run_record.steps import FILE as METRICS
from services.run_record.steps import read_steps
from services.tracking.spans import SpanReader, TraceSpan, span_id, trace_id
from tests.services.monitor.runs import recorded_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def read(reader: SpanReader, path: Path, begin: int = 0, end: int | None = None) -> list[TraceSpan]:
    """The spans of a part of a file."""
    lines = path.read_bytes()[begin:end].splitlines(keepends=True)
    return [span for line in lines for span in reader.items(path.name, line, 0)]


def test_each_part_of_a_step_and_each_life_of_a_group_is_a_span(run_dir: Path) -> None:
    reader, lines = SpanReader(run_dir, {}), read_steps(run_dir / METRICS)
    trained = [span for span in read(reader, run_dir / METRICS) if span.name.startswith("train ")]
    assert [(span.trace, span.process) for span in trained] == [
        (f"step {line['step']}", "trainer") for line in lines
    ]
    assert [(span.end_us - span.begin_us) / 1e6 for span in trained] == pytest.approx(
        [line["train_s"] for line in lines], abs=1e-6
    )
    groups = read(reader, run_dir / EVENTS)
    ends = [span for span in groups if span.facts.get("outcome") == "trained"]
    assert len(ends) == sum(line["groups"] for line in lines)
    assert all(span.trace == span.name and span.end_us >= span.begin_us for span in ends)
    append_evaluation(run_dir, Evaluation(version=6, set="held", greedy=0.75, seconds=1.5, time=1000.0))
    (scored,) = read(reader, run_dir / EVALUATIONS)
    assert (scored.process, scored.begin_us, scored.end_us) == ("evaluation", 998_500_000, 1_000_000_000)


def test_a_restarted_process_reads_the_same_spans_from_where_the_last_one_ended(run_dir: Path) -> None:
    path = run_dir / EVENTS
    whole = read(SpanReader(run_dir, {}), path)
    middle = path.read_bytes().index(b"\n", path.stat().st_size // 2) + 1
    first = read(SpanReader(run_dir, {}), path, 0, middle)
    rest = read(SpanReader(run_dir, {EVENTS: middle}), path, middle)
    assert first + rest == whole
    assert len({span_id("run", span) for span in whole}) == len(set(whole_keys(whole)))


def whole_keys(spans: list[TraceSpan]) -> list[tuple[str, str, int, int]]:
    return [(span.process, span.name, span.begin_us, span.end_us) for span in spans]


def test_spans_of_a_group_are_one_trace_and_of_another_run_another(run_dir: Path) -> None:
    spans = [span for span in read(SpanReader(run_dir, {}), run_dir / EVENTS) if span.name == "group 3"]
    assert len(spans) >= 3
    assert len({trace_id("run", span) for span in spans}) == 1
    assert trace_id("other", spans[0]) != trace_id("run", spans[0])
