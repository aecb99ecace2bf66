"""Which senders a run gets."""

from contextlib import closing

import pytest

from protocol.messages import WeightPiece
from trainer.backends.base import Publication
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.weights.registry import make_part_sender


class TwoRanks(ScriptedBackend):
    """A model of which each of two ranks has a row."""

    @property
    def publication(self) -> Publication:
        parts = tuple((WeightPiece(0, ((rank, rank + 1), (0, 2))),) for rank in range(2))
        return Publication(("w",), ((2, 2),), parts)


def config(transport: str) -> WeightConfig:
    return WeightConfig(transport=transport, backend="gloo")


@pytest.fixture(autouse=True)
def of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say what torchrun says to two ranks of one host, whatever a test before has left."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_several_ranks_publish_their_own_parts(transport: str) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    sender = make_part_sender(config(transport), 1, backend, "float32")
    assert sender is not None
    with closing(sender):
        assert sender.rank == 1


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_versions_in_files_go_through_rank_0(transport: str) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    assert make_part_sender(config(transport), 1, backend, "float32") is None


def test_one_rank_publishes_all() -> None:
    backend = ScriptedBackend(trainer=TrainerConfig(backend="scripted"))
    assert make_part_sender(config("ipc"), 0, backend, "float32") is None


def test_ranks_of_several_hosts_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert make_part_sender(config("ipc"), 1, backend, "float32") is None
    sender = make_part_sender(config("nccl"), 1, backend, "float32")
    assert sender is not None
    sender.close()
