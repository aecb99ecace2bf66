"""Strangers at the port of a sender of weights: their answers, and that engines are served meanwhile."""

import json
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from protocol.errors import WeightError
from protocol.host.key_proof import KEY_DIR_VARIABLE, ReceiverKeys, SenderKeys, fetch_with_keys
from protocol.messages import WeightManifest
from rollout.weights.registry import make_receiver
from services.bus.curve import create_keys
from tests.trainer.weights.senders import part_sender, received
from trainer.config import WeightConfig
from trainer.weights.served.receiver_connection import REFUSED
from trainer.weights.served.sender import PartSender

CONFIG = WeightConfig(transport="nccl", bucket_mb=1, timeout_s=30)
TENSORS = {"a": torch.arange(1000.0), "b": torch.ones(3)}


@pytest.fixture(autouse=True)
def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_DIR_VARIABLE, "")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    create_keys(tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    create_keys(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def sender(ours: Path) -> Iterator[PartSender]:
    with closing(part_sender(CONFIG, TENSORS.items(), SenderKeys(ours))) as made:
        yield made


def fetched(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    with closing(make_receiver("nccl")) as receiver:
        return {entry.name: tensor.clone() for entry, tensor in received(receiver, manifest, 30)}


def said_to(manifest: WeightManifest, *lines: bytes) -> bytes:
    """Everything that the sender says to these lines, until it hangs up."""
    host, port = manifest.location.partition("/")[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"".join(lines))
        said = b""
        while part := connection.recv(4096):
            said += part
        return said


def test_an_engine_with_the_keys_of_the_run_is_served(sender: PartSender, ours: Path) -> None:
    manifest = sender.publish("e1", 1, TENSORS.items())
    fetch_with_keys(str(ours))
    found = fetched(manifest)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_stranger_is_refused_and_learns_nothing_of_the_run(
    sender: PartSender, ours: Path, theirs: Path
) -> None:
    manifest = sender.publish("e1", 1, TENSORS.items())
    request = json.dumps({"version": 1, "epoch": "e1"}).encode() + b"\n"
    stranger = json.dumps(ReceiverKeys(theirs).hello()).encode() + b"\n"
    for lines in ((request,), (stranger, request), (b"nonsense\n",), (b"[]\n",), (b'{"slices": 9}\n',)):
        assert json.loads(said_to(manifest, *lines)) == REFUSED, lines
    fetch_with_keys(str(ours))
    assert len(fetched(manifest)) == len(TENSORS)


def test_a_public_key_alone_does_not_get_past_the_challenge(sender: PartSender, ours: Path) -> None:
    manifest = sender.publish("e1", 1, TENSORS.items())
    hello = json.dumps(ReceiverKeys(ours).hello()).encode() + b"\n"
    challenge, refusal = said_to(manifest, hello, b'{"proof": "00"}\n').splitlines()
    assert sorted(json.loads(challenge)) == ["nonce", "proof"]
    assert json.loads(refusal) == REFUSED


def test_an_engine_without_keys_says_what_is_missing(sender: PartSender) -> None:
    with pytest.raises(WeightError, match=r"refused version 1: .*holders of a key.*bus\.curve_dir"):
        fetched(sender.publish("e1", 1, TENSORS.items()))


def test_an_engine_with_other_keys_says_whom_it_does_not_trust(sender: PartSender, theirs: Path) -> None:
    fetch_with_keys(str(theirs))
    with pytest.raises(WeightError, match=r"127\.0\.0\.1:\d+ did not prove .*holders of a key"):
        fetched(sender.publish("e1", 1, TENSORS.items()))


def test_an_engine_with_keys_refuses_a_sender_without_the_runs_key(ours: Path, theirs: Path) -> None:
    shutil.copyfile(ours / "client.key", theirs / "authorized" / "client.key")
    fetch_with_keys(str(ours))
    for keys, problem in ((SenderKeys(theirs), r"key of server\.key"), (None, "current version is 1")):
        with (
            closing(part_sender(CONFIG, TENSORS.items(), keys)) as impostor,
            pytest.raises(WeightError, match=problem),
        ):
            fetched(impostor.publish("e1", 1, TENSORS.items()))


def test_keys_that_an_engine_cannot_read_are_an_error_of_the_version(
    sender: PartSender, tmp_path: Path
) -> None:
    fetch_with_keys(str(tmp_path / "none"))
    with pytest.raises(WeightError, match="make keys with `tether keys"):
        fetched(sender.publish("e1", 1, TENSORS.items()))
