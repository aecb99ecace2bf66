"""Tests which of the trainer's hosts this one is, and what is refused."""

import pytest

from protocol.errors import SettingsError
from trainer.config import ClusterConfig
from trainer.hosts.place import HostPlace, find_place, split_endpoint

MEETING = "trainer-0:29400"


def refusal(config: ClusterConfig, ranks: int = 4, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        find_place(config, ranks, environ)
    return str(caught.value)


def test_a_trainer_without_rendezvous_has_one_host_whatever_slurm_says() -> None:
    environ = {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "JOB_COMPLETION_INDEX": "2"}
    assert find_place(ClusterConfig(), 4, environ) == HostPlace()
    assert find_place(ClusterConfig(nodes=1, rendezvous=MEETING), 3, environ).hosts == 1


def test_settings_come_before_what_slurm_says() -> None:
    config = ClusterConfig(nodes=2, node_rank=1, rendezvous=MEETING)
    place = find_place(config, 4, {"SLURM_NNODES": "4", "SLURM_NODEID": "3"})
    assert place == HostPlace(1, 2, "trainer-0", 29400, "cluster.node_rank, cluster.nodes")


def test_the_step_of_slurm_comes_before_its_job() -> None:
    environ = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "5", "SLURM_NODEID": "1"}
    place = find_place(ClusterConfig(rendezvous=MEETING), 4, environ)
    assert (place.number, place.hosts, place.source) == (1, 2, "SLURM_NODEID, SLURM_STEP_NUM_NODES")
    assert place.describe() == (
        "host 1 of 2 rendezvous=trainer-0:29400 by SLURM_NODEID, SLURM_STEP_NUM_NODES"
    )


def test_an_indexed_job_of_kubernetes_gives_the_number() -> None:
    place = find_place(ClusterConfig(nodes=4, rendezvous=MEETING), 4, {"JOB_COMPLETION_INDEX": "3"})
    assert (place.number, place.hosts, place.source) == (3, 4, "JOB_COMPLETION_INDEX, cluster.nodes")


def test_ranks_that_hosts_do_not_divide_are_refused() -> None:
    assert refusal(ClusterConfig(nodes=3, node_rank=0, rendezvous=MEETING)) == (
        "setting cluster.nodes: 3 hosts cannot divide the 4 ranks that [parallel] asks for; "
        "it can be 1, 2 or 4, or change the sizes"
    )
    said = refusal(ClusterConfig(rendezvous=MEETING), 1, SLURM_NNODES="2", SLURM_NODEID="0")
    assert said.startswith("SLURM_NNODES: 2 hosts cannot divide the 1 ranks")
    assert "it can be 1, or" in said


def test_a_missing_number_or_count_is_refused_with_its_variable() -> None:
    assert "set TETHER_NODE_RANK to a number from 0 to 1" in refusal(
        ClusterConfig(nodes=2, rendezvous=MEETING)
    )
    assert "set TETHER_NODES" in refusal(ClusterConfig(node_rank=0, rendezvous=MEETING))
    assert "TETHER_RENDEZVOUS" in refusal(ClusterConfig(nodes=2, node_rank=0))


def test_a_number_beyond_the_hosts_is_refused() -> None:
    said = "setting cluster.node_rank: 2 is not the number of one of 2 hosts; they count from 0 to 1"
    assert refusal(ClusterConfig(nodes=2, node_rank=2, rendezvous=MEETING)) == said
    config = ClusterConfig(nodes=2, rendezvous=MEETING)
    assert refusal(config, JOB_COMPLETION_INDEX="2").startswith("JOB_COMPLETION_INDEX: 2 is not")
    assert refusal(config, SLURM_NODEID="one") == "variable SLURM_NODEID: 'one' is not a number"


@pytest.mark.parametrize("text", ["trainer-0", ":29400", "trainer-0:", "a:b", "a:1/x", "me@a:1", "a:99999"])
def test_an_endpoint_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not HOST:PORT"):
        split_endpoint(text)


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert split_endpoint("[fd00::1]:29400") == ("fd00::1", 29400)
