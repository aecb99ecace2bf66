"""Tests the command lines that start ranks."""

import pytest

from tests.changes import slow_unless_changed
from trainer.hosts.place import HostPlace
from trainer.ranks.launch import result_of_ranks, torchrun, torchrun_on_hosts


def test_ranks_of_one_machine_meet_by_themselves() -> None:
    command = torchrun(4, "a.module", "x")
    assert command[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--log-dir", "/dev/null",
        "-m", "a.module", "x",
    ]  # fmt: skip


def test_ranks_of_several_hosts_meet_at_the_first() -> None:
    command = torchrun_on_hosts(4, HostPlace(1, 2, "host-0", 29400), 31000, "a.module")
    assert command[1:] == [
        "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "4",
        "--master-addr", "host-0", "--master-port", "31000", "--max-restarts", "0",
        "--log-dir", "/dev/null", "-m", "a.module",
    ]  # fmt: skip


@slow_unless_changed("trainer/ranks/launch")
def test_ranks_start_without_torchruns_banner(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert result_of_ranks(2, "tests.trainer.ranks.one_thread", limit_s=300) == {"threads": "1"}
    assert "****" not in capfd.readouterr().err
