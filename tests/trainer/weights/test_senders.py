"""Every sender, read with the receiver of the same name."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import manifest_digest
from rollout.weights.checked import ManifestCheck
from tests.trainer.weights.senders import receive, sender_of
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.registry import TRANSPORTS as SENDERS
from trainer.weights.registry import make_sender
from trainer.weights.served.sender import PartSender

TRANSPORTS = ("shm", "disk", "http", "nccl", "ipc")


def tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Over three buckets of 1 MiB: float32, bfloat16 that is not contiguous, a scalar, an empty one, one
    larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(300, 500, generator=generator)),
        ("proj", torch.randn(200, 300, generator=generator).bfloat16().T),
        ("scale", torch.tensor(0.5 + seed)),
        ("none", torch.zeros(0, 3)),
        ("large", torch.randn(300, 1000, generator=generator)),
        ("count", torch.arange(7)),
    ]


def made_of(transport: str, sent: list[tuple[str, torch.Tensor]], directory: Path) -> WeightSender:
    config = WeightConfig(transport=transport, backend="gloo", bucket_mb=1, timeout_s=30)
    return sender_of(config, sent, directory)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sender(transport: str, tmp_path: Path) -> Iterator[WeightSender]:
    with closing(made_of(transport, tensors(), tmp_path)) as made:
        yield made


def assert_arrived(manifest: WeightManifest, sent: list[tuple[str, torch.Tensor]]) -> None:
    got = receive(manifest)
    assert sorted(got) == sorted(name for name, _ in sent)
    for name, tensor in sent:
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor)


def test_published_version_arrives_byte_for_byte(sender: WeightSender) -> None:
    sent = tensors()
    manifest = sender.publish("e1", 3, iter(sent), base_model="Qwen2ForCausalLM")
    ManifestCheck()(manifest)
    assert (manifest.epoch, manifest.version, manifest.base_model) == ("e1", 3, "Qwen2ForCausalLM")
    assert [entry.name for entry in manifest.tensors] == [name for name, _ in sent]
    assert_arrived(manifest, sent)
    assert_arrived(manifest, sent)  # as often as engines ask


def test_the_tensors_may_be_written_once_publish_has_returned(transport: str, tmp_path: Path) -> None:
    live = torch.ones(1000)
    with closing(made_of(transport, [("a", live)], tmp_path)) as sender:
        manifest = sender.publish("e1", 1, [("a", live)])
        live.zero_()
        assert_arrived(manifest, [("a", torch.ones(1000))])


def test_equal_weights_have_equal_digests_over_every_transport(tmp_path: Path) -> None:
    found = set()
    for transport in TRANSPORTS:
        for order in (1, -1):
            with closing(made_of(transport, tensors()[::order], tmp_path)) as made:
                found.add(made.publish("e1", 1, tensors()[::order]).digest)
                assert made.publish("e2", 3, tensors(seed=1)[::order]).digest not in found
    assert len(found) == 1


def test_a_newer_version_is_served_beside_the_current_ones(sender: WeightSender) -> None:
    first = sender.publish("e1", 1, tensors(1))
    second = sender.publish("e1", 2, tensors(2))
    assert_arrived(second, tensors(2))
    if not SENDERS[first.transport].files:
        with pytest.raises(WeightError, match="current version is 2"):
            receive(first)
    else:
        assert_arrived(first, tensors(1))


def test_an_export_that_fails_publishes_nothing_and_leaves_the_last_version(sender: WeightSender) -> None:
    manifest = sender.publish("e1", 1, tensors(1))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors(2)[:3]
        raise RuntimeError("the backend failed")

    with pytest.raises(RuntimeError, match="the backend failed"):
        sender.publish("e1", 2, broken())
    assert_arrived(manifest, tensors(1))
    assert_arrived(sender.publish("e1", 2, tensors(2)), tensors(2))


def test_a_refused_publish_consumes_the_whole_export(sender: WeightSender) -> None:
    seen = []
    problem = (
        "version 1: .*a where the version has embed"
        if isinstance(sender, PartSender)
        else "tensor a is duplicated"
    )

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "a", "b", "c"):
            seen.append(name)
            yield name, torch.zeros(1)

    with pytest.raises(WeightError, match=problem):
        sender.publish("e1", 1, export())
    assert seen == ["a", "a", "b", "c"]


def test_the_digest_is_that_of_the_entries(sender: WeightSender) -> None:
    manifest = sender.publish("e1", 1, tensors())
    assert manifest.digest == manifest_digest(manifest.tensors)


def test_close_is_idempotent(sender: WeightSender) -> None:
    sender.publish("e1", 1, tensors())
    sender.close()
    sender.close()


def test_the_same_version_may_be_published_again(sender: WeightSender) -> None:
    sender.publish("e1", 1, tensors(1))
    assert_arrived(sender.publish("e1", 1, tensors(2)), tensors(2))


def test_an_unknown_transport_is_refused_with_the_nearest(tmp_path: Path) -> None:
    backend = ScriptedBackend(trainer=TrainerConfig(backend="scripted"))
    with pytest.raises(SettingsError, match=r"'ncl' is not known; did you mean 'nccl'\?"):
        make_sender(WeightConfig(transport="ncl"), backend, "float32", run="r", run_dir=tmp_path)
    with pytest.raises(SettingsError, match=r"weights\.keep 0"):
        make_sender(WeightConfig(keep=0), backend, "float32", run="r", run_dir=tmp_path)
