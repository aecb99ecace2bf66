"""Tests the film of a run under kills: it is made of its record, and ends in its verdict."""

import json
import xml.etree.ElementTree as ElementTree

from tests.benchmarks.faults.film import DRAWING, RECORD, Line, draw, lines


def test_film_is_drawn_from_its_record() -> None:
    drawn = draw(lines(json.loads(RECORD.read_text())))
    assert DRAWING.read_text() == drawn, "run `python -m tests.benchmarks.faults.film --draw`"


def test_recorded_run_ended_well_under_kills() -> None:
    record = json.loads(RECORD.read_text())
    assert (record["code"], record["violations"]) == (0, 0)
    assert len(record["kills"]) >= 5
    assert lines(record)[-1].text.endswith(f"{len(record['kills'])} kills, 0 violations")


def test_lines_come_in_the_order_of_the_run() -> None:
    record = {
        "steps": [{"at": 3.0, "step": 1, "reward": 0.5}, {"at": 9.0, "step": 3, "reward": 1.0}],
        "kills": [{"at": 5.0, "name": "trainer"}], "violations": 0, "trained": 64,
    }  # fmt: skip
    assert [line.kind for line in lines(record)] == ["command", "step", "kill", "step", "command", "end"]
    assert lines(record)[-1].text == "64 groups trained once each, 1 kills, 0 violations"


def test_drawing_is_xml_with_every_line_at_its_time() -> None:
    drawn = ElementTree.fromstring(draw([Line(0.0, "step", "a < b"), Line(12.0, "end", "c")]))
    texts = [node for node in drawn.iter() if node.tag.endswith("text")]
    assert [node.text for node in texts] == ["a < b", "c"]
    assert texts[1].attrib["style"] == "animation-delay:24.0s"
