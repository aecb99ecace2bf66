"""The transport shared: masters are converted in place, and never read while the trainer writes to them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protocol.errors import SettingsError, WeightError
from protocol.messages import WeightManifest
from rollout.weights.checked import ManifestCheck
from rollout.weights.registry import make_receiver
from rollout.weights.shared import SharedReceiver
from tests.trainer.weights.senders import received
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.files import disk_sender
from trainer.weights.registry import make_sender
from trainer.weights.shared import SharedSender

CONFIG = WeightConfig(transport="shared")


@pytest.fixture
def masters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("a", (30, 50)), ("b", (7,)))
    }


@pytest.fixture
def sender(masters: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[SharedSender]:
    made = SharedSender(tmp_path, masters)
    yield made
    made.close()
    made.close()


def publish(
    sender: SharedSender, masters: dict[str, torch.Tensor], version: int, dtype: str = "bfloat16"
) -> WeightManifest:
    return sender.publish("e1", version, in_dtype(masters.items(), dtype), base_model="M")


def receive(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    return {entry.name: tensor.clone() for entry, tensor in received(make_receiver("shared"), manifest, 30)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_is_what_the_masters_make_and_has_the_digest_of_any_transport(
    sender: SharedSender, masters: dict[str, torch.Tensor], tmp_path: Path, dtype: str
) -> None:
    manifest = publish(sender, masters, 3, dtype)
    ManifestCheck()(manifest)
    assert (manifest.epoch, manifest.version, manifest.base_model) == ("e1", 3, "M")
    found = receive(manifest)
    assert list(found) == ["a", "b"]
    assert all(
        torch.equal(found[name], master.detach().to(getattr(torch, dtype)))
        for name, master in masters.items()
    )
    other = disk_sender(WeightConfig(), tmp_path / "disk")
    assert other.publish("e1", 3, in_dtype(masters.items(), dtype)).digest == manifest.digest


def test_masters_stay_the_trainers_and_are_read_where_it_has_them(
    sender: SharedSender, masters: dict[str, torch.Tensor]
) -> None:
    publish(sender, masters, 1)
    sender.invalidate()
    with torch.no_grad():
        masters["b"].add_(1)
    assert torch.equal(receive(publish(sender, masters, 2, "float32"))["b"], masters["b"].detach())


def test_tensors_interleaved_in_a_master_are_read_out_of_it(tmp_path: Path) -> None:
    master = torch.nn.Parameter(torch.randn(3 * 5, 7))

    def parts() -> dict[str, torch.Tensor]:
        turns = master.detach().view(3, 5, 7)
        return {"q": turns[:, :4], "k": turns[:, 4:]}

    wanted = {name: part.reshape(-1, 7).clone() for name, part in parts().items()}
    sender = SharedSender(tmp_path, {"qk": master}, parts)
    found = receive(sender.publish("e1", 1, in_dtype(wanted.items(), "bfloat16")))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in wanted.items())
    for wrong in ({"q": wanted["q"].T.contiguous()}, {"k": wanted["q"]}, {"qk": master.detach()}):
        with pytest.raises(WeightError, match="is not one of the masters"):
            sender.publish("e1", 2, wrong.items())
    sender.close()


def test_masters_that_changed_since_are_no_version(
    sender: SharedSender, masters: dict[str, torch.Tensor]
) -> None:
    manifest = publish(sender, masters, 1)
    with torch.no_grad():
        masters["b"][3] += 1
    with pytest.raises(WeightError, match="tensor b: digest"):
        receive(manifest)


def test_nothing_is_read_as_a_version_once_it_is_withdrawn(
    sender: SharedSender, masters: dict[str, torch.Tensor]
) -> None:
    receiver = SharedReceiver()
    first = publish(sender, masters, 1)
    assert len(list(received(receiver, first, 30))) == 2
    assert receiver.masters(first).keys() == masters.keys()
    sender.invalidate()
    with pytest.raises(WeightError, match="version 1 has been overwritten by the trainer"):
        receiver.masters(first)
    with pytest.raises(WeightError, match="version 1 has been overwritten"):
        receive(first)
    second = publish(sender, masters, 2)
    with pytest.raises(WeightError, match="version 1 has been overwritten"):
        receive(first)
    assert receive(second)
    receiver.close()
    with pytest.raises(WeightError, match="version 2 has been overwritten"):
        receiver.masters(second)


def test_tensor_without_a_master_is_not_published(
    sender: SharedSender, masters: dict[str, torch.Tensor]
) -> None:
    for wrong in (
        {"c": torch.zeros(3)},
        {"b": torch.zeros(8)},
        {"b": torch.zeros(7, dtype=torch.complex64)},
        {},
    ):
        with pytest.raises(WeightError, match="version 1: "):
            sender.publish("e1", 1, wrong.items())
    assert receive(publish(sender, masters, 1))


def test_a_closed_sender_leaves_no_file(masters: dict[str, torch.Tensor], tmp_path: Path) -> None:
    sender = SharedSender(tmp_path, masters)
    manifest = publish(sender, masters, 1)
    assert Path(manifest.location).is_file()
    sender.close()
    assert list((tmp_path / "shared").iterdir()) == []
    with pytest.raises(WeightError):
        receive(manifest)
    masters["a"].data.zero_()


def test_a_trainer_without_masters_is_refused(tmp_path: Path) -> None:
    backend = ScriptedBackend(trainer=TrainerConfig(backend="scripted"))
    with pytest.raises(SettingsError, match=r"weights\.transport"):
        make_sender(CONFIG, backend, "float32", run="r", run_dir=tmp_path)
