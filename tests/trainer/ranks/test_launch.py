"""Tests the command lines that start ranks."""

from trainer.hosts.place import HostPlace
from trainer.ranks.launch import torchrun, torchrun_on_hosts


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
