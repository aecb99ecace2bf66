"""Sharing tensors between processes of a host: what can be mapped, and when it cannot."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protocol.device.shared_tensors import SharedTensors, map_tensors
from protocol.errors import WeightError
from tests.changes import slow_unless_changed

OWNER = """
import sys, torch
from pathlib import Path
from protocol.device.shared_tensors import SharedTensors
room = SharedTensors([torch.arange(5.0)])
room.write(Path(sys.argv[1]), {"a": {"x": room.tensors[0]}})
print(flush=True)
sys.stdin.readline()
room.tensors[0].add_(1)
print(flush=True)
sys.stdin.read()
"""


def owner(path: Path) -> "subprocess.Popen[bytes]":
    """A process that has described a tensor; for a line of input it writes to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_tensors_of_another_process_are_seen_and_outlive_it(tmp_path: Path) -> None:
    with owner(tmp_path / "o.msgpack") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = map_tensors(tmp_path / "o.msgpack")["a"]["x"]
        assert found.tolist() == [0, 1, 2, 3, 4]
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline()
        assert found.tolist() == [1, 2, 3, 4, 5]
        process.kill()
    assert found.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(WeightError, match="the process whose tensors it describes has ended"):
        map_tensors(tmp_path / "o.msgpack")


def test_writes_of_a_reader_are_private(tmp_path: Path) -> None:
    room = SharedTensors([torch.zeros(3)])
    room.write(tmp_path / "o.msgpack", {"a": {"x": room.tensors[0]}})
    map_tensors(tmp_path / "o.msgpack")["a"]["x"].fill_(7)
    assert room.tensors[0].tolist() == [0, 0, 0]
    room.close()


def test_mapped_tensors_keep_dtype_shape_stride_and_ties(tmp_path: Path) -> None:
    tied = torch.randn(4, 3)
    given = [tied, torch.randn(6, 2).T, torch.tensor(5), torch.randn(3).bfloat16(), torch.empty(0, 3), tied]
    room = SharedTensors(given)
    assert room.tensors[0].data_ptr() == room.tensors[5].data_ptr() != tied.data_ptr()
    named = {str(number): tensor for number, tensor in enumerate(room.tensors)}
    room.write(
        tmp_path / "o.msgpack",
        {"whole": named, "parts": {"rows": room.tensors[0][1:3], "columns": room.tensors[0][:, 1]}},
    )
    found = map_tensors(tmp_path / "o.msgpack")
    for number, tensor in enumerate(given):
        other = found["whole"][str(number)]
        assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(other, tensor)
    assert torch.equal(found["parts"]["rows"], tied[1:3])
    assert torch.equal(found["parts"]["columns"], tied[:, 1])
    room.tensors[0].zero_()
    assert not found["parts"]["rows"].any()
    room.close()
    room.close()


def test_a_descriptor_that_means_another_file_is_not_mapped(tmp_path: Path) -> None:
    room = SharedTensors([torch.zeros(100)])
    room.write(tmp_path / "o.msgpack", {"a": {"x": room.tensors[0]}})
    room.close()
    other = SharedTensors([torch.ones(100)])  # takes the number that has become free
    with pytest.raises(WeightError, match="has ended"):
        map_tensors(tmp_path / "o.msgpack")
    other.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93\x01\x02\x03", b"\x80", bytes(range(255, 191, -1))],
    ids=["empty", "array", "map", "noise"],
)
def test_a_file_that_is_no_description_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "o.msgpack").write_bytes(content)
    with pytest.raises(WeightError, match=r"o\.msgpack"):
        map_tensors(tmp_path / "o.msgpack")
    with pytest.raises(WeightError, match=r"none\.msgpack"):
        map_tensors(tmp_path / "none.msgpack")


@slow_unless_changed("protocol/device/", "protocol/host/")
def test_a_file_is_read_by_its_user_alone_and_removes_those_of_the_dead(tmp_path: Path) -> None:
    with owner(tmp_path / "shared/dead.msgpack") as process:
        process.kill()
    with owner(tmp_path / "shared/alive.msgpack") as process:
        room = SharedTensors([torch.zeros(3)])
        room.write(tmp_path / "shared/o.msgpack", {})
        assert {path.name for path in (tmp_path / "shared").iterdir()} == {"alive.msgpack", "o.msgpack"}
        room.close()
        process.kill()
    assert stat.S_IMODE((tmp_path / "shared/o.msgpack").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    room = SharedTensors([])
    with pytest.raises(WeightError, match="taken"):
        room.write(tmp_path / "taken/o.msgpack", {})
    room.close()
