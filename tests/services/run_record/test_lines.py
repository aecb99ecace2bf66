"""Following a file: every complete line once, whatever the pieces."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from services.run_record.lines import LineFollower


def read_all(follower: LineFollower) -> list[bytes]:
    found, more = [], True
    while more:
        lines, more = follower.read()
        found += [line.data for line in lines]
    return found


@given(st.lists(st.binary(max_size=12).filter(lambda b: b"\n" not in b)), st.integers(13, 40))
def test_lines_are_read_once_in_order(tmp_path_factory: object, lines: list[bytes], chunk: int) -> None:
    path = tmp_path_factory.mktemp("run") / "log"  # type: ignore[attr-defined]
    follower = LineFollower(path, chunk_bytes=chunk)
    assert read_all(follower) == []
    for line in lines:
        with path.open("ab") as file:
            file.write(line)
        assert read_all(follower) == []
        with path.open("ab") as file:
            file.write(b"\n")
        assert read_all(follower) == [line + b"\n"]


def test_offsets_point_at_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    lines, _ = LineFollower(path).read()
    data = path.read_bytes()
    assert [data[line.offset : line.offset + len(line.data)] for line in lines] == [
        b"one\n",
        b"two\n",
        b"three\n",
    ]


def test_line_longer_than_a_chunk_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\n" + b"x" * 100 + b"\nb\n")
    assert read_all(LineFollower(path, chunk_bytes=16)) == [b"a\n", b"b\n"]


def test_tail_begins_with_a_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %03d\n" % number for number in range(100)))
    follower = LineFollower(path, tail_bytes=25)
    assert read_all(follower) == [b"line 098\n", b"line 099\n"]
    assert not follower.is_complete


def test_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    follower = LineFollower(path)
    assert read_all(follower) == [b"old\n"]
    (tmp_path / "new").write_bytes(b"new one\nnew two\n")
    (tmp_path / "new").rename(path)
    assert read_all(follower) == [b"new one\n", b"new two\n"]
    assert follower.starts == 2


def test_following_continues_where_another_follower_ended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\n")
    first = LineFollower(path)
    first.read()
    path.write_bytes(b"one\ntwo\nthree\n")
    second = LineFollower(path, offset=first.offset)
    assert [line.data for line in second.read()[0]] == [b"three\n"]
    assert not second.is_complete
    path.write_bytes(b"new\n")
    assert [line.data for line in LineFollower(path, offset=first.offset).read()[0]] == [b"new\n"]
