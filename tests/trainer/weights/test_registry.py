"""Which senders a run gets."""

from contextlib import closing
from pathlib import Path

import pytest

from protocol.messages import WeightPiece
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.ranks.publication import Publication
from trainer.weights.base import WeightSender
from trainer.weights.publish import publish
from trainer.weights.registry import make_sender


class TwoRanks(ScriptedBackend):
    """A model of which each of two ranks has a row."""

    @property
    def publication(self) -> Publication:
        parts = tuple((WeightPiece(0, ((rank, rank + 1), (0, 2))),) for rank in range(2))
        return Publication(("w",), ((2, 2),), parts)


def made(transport: str, rank: int, backend: ScriptedBackend, directory: Path) -> WeightSender | None:
    config = WeightConfig(transport=transport, backend="gloo")
    return make_sender(config, backend, "float32", run="r", run_dir=directory, rank=rank)


@pytest.fixture(autouse=True)
def of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say what torchrun says to two ranks of one host, whatever a test before has left."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_several_ranks_publish_their_own_parts(transport: str, tmp_path: Path) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    sender = made(transport, 1, backend, tmp_path)
    assert sender is not None
    with closing(sender):
        assert sender.in_parts


@pytest.mark.parametrize("transport", ["shm", "disk", "http"])
def test_versions_in_files_are_written_by_the_ranks_of_one_host(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    for rank in (0, 1):
        for delta in (False, True):
            config = WeightConfig(transport=transport, delta=delta)
            sender = make_sender(config, backend, "float32", run="r", run_dir=tmp_path, rank=rank)
            assert sender is not None
            assert sender.in_parts
            sender.close()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    follower = made(transport, 1, backend, tmp_path)
    assert (follower is None) == (transport == "shm")  # the memory of one host


def test_one_rank_publishes_one_part(tmp_path: Path) -> None:
    backend = ScriptedBackend(trainer=TrainerConfig(backend="scripted"))
    sender = made("ipc", 0, backend, tmp_path)
    assert sender is not None
    with closing(sender):
        assert not sender.in_parts
        assert len(publish(backend, sender, "e1", 1, "float32").parts) == 1


def test_ranks_of_several_hosts_do_not_share_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = TwoRanks(trainer=TrainerConfig(backend="scripted"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert made("ipc", 1, backend, tmp_path) is None
    gathering, sender = made("ipc", 0, backend, tmp_path), made("nccl", 1, backend, tmp_path)
    assert sender is not None
    assert gathering is not None
    assert sender.in_parts
    assert not gathering.in_parts
    sender.close()
    gathering.close()
