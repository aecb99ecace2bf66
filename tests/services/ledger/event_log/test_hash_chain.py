"""Logs whose lines are linked: damage is found line by line, and a write that fails leaves nothing."""

import json
import multiprocessing
import resource
from pathlib import Path

import pytest

from services.ledger.event_log.hash_chain import append, damaged_lines, head_path


def bodies(first: int, count: int) -> list[bytes]:
    return [json.dumps({"step": step}).encode() for step in range(first, first + count)]


def steps(log: Path) -> list[int]:
    return [json.loads(line)["step"] for line in log.read_bytes().splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    append(tmp_path / "metrics.jsonl", bodies(0, 3))
    append(tmp_path / "metrics.jsonl", bodies(3, 2), durable=False)
    return tmp_path / "metrics.jsonl"


def test_any_changed_byte_of_log_and_head_is_found(log: Path) -> None:
    assert list(damaged_lines(log)) == []
    for path in (log, head_path(log)):
        whole = path.read_bytes()
        for place in range(len(whole)):
            changed = bytearray(whole)
            changed[place] ^= 1 + place % 255
            path.write_bytes(changed)
            assert list(damaged_lines(log)), (path, place)
        path.write_bytes(whole)
    assert list(damaged_lines(log)) == []


def test_damage_is_named_by_file_and_line(log: Path) -> None:
    log.write_bytes(log.read_bytes().replace(b'"step": 2', b'"step": 7'))
    problem = "line 3 is not what was written, or does not follow the line before"
    assert list(damaged_lines(log)) == [(log, problem)]
    head_path(log).unlink()
    assert [path for path, _ in damaged_lines(log)] == [head_path(log), log]


def test_a_lost_end_is_named(log: Path) -> None:
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    assert list(damaged_lines(log)) == [(log, "the newest line that metrics.head names is missing")]


def test_a_torn_line_is_replaced_by_the_next_one(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b'{"step": 5, "re')
    assert list(damaged_lines(log)) == []
    append(log, bodies(5, 1))
    assert steps(log) == list(range(6))
    assert list(damaged_lines(log)) == []


def test_a_write_that_the_disk_refuses_leaves_the_log_as_it_was(log: Path) -> None:
    before = log.read_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append(log, bodies(5, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert log.read_bytes() == before
    append(log, bodies(5, 2))
    assert steps(log) == list(range(7))
    assert list(damaged_lines(log)) == []


def write_many(log: Path, first: int) -> None:
    for step in range(first, first + 50):
        append(log, bodies(step, 1), durable=False)


def test_lines_of_two_processes_are_one_chain(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(log, first)) for first in (0, 50)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert sorted(steps(log)) == list(range(100))
    assert list(damaged_lines(log)) == []
