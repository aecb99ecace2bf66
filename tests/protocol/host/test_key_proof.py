"""Proofs that both ends of a connection have a key of the bus."""

import shutil
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.host.key_proof import ReceiverKeys, SenderKeys, proves
from services.bus.curve import create_keys


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    create_keys(tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    create_keys(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_both_ends_prove_that_they_have_a_key(ours: Path) -> None:
    receiver = ReceiverKeys(ours)
    challenge = SenderKeys(ours).challenge(receiver.hello())
    answer = receiver.answer(challenge.answer)
    assert proves(answer, challenge.expected)
    assert challenge.answer["proof"] != challenge.expected


def test_a_key_that_is_not_authorized_gets_no_challenge(ours: Path, theirs: Path) -> None:
    with pytest.raises(ValueError, match="not in authorized"):
        SenderKeys(ours).challenge(ReceiverKeys(theirs).hello())


def test_an_authorized_key_without_its_secret_proves_nothing(ours: Path, theirs: Path) -> None:
    shutil.copyfile(ours / "server.key", theirs / "server.key")
    hello = ReceiverKeys(theirs).hello() | {"key": ReceiverKeys(ours).hello()["key"]}
    challenge = SenderKeys(ours).challenge(hello)
    with pytest.raises(ValueError, match=r"server\.key"):
        ReceiverKeys(theirs).answer(challenge.answer)
    assert not proves({"proof": challenge.answer["proof"]}, challenge.expected)
    assert not proves({}, challenge.expected)


def test_a_sender_with_another_key_is_refused(ours: Path, theirs: Path) -> None:
    shutil.copyfile(ours / "client.key", theirs / "authorized" / "client.key")
    receiver = ReceiverKeys(ours)
    with pytest.raises(ValueError, match=r"server\.key"):
        receiver.answer(SenderKeys(theirs).challenge(receiver.hello()).answer)


def test_proofs_of_another_connection_are_worth_nothing(ours: Path) -> None:
    sender, first, second = SenderKeys(ours), ReceiverKeys(ours), ReceiverKeys(ours)
    recorded = first.answer(sender.challenge(first.hello()).answer)
    assert not proves(recorded, sender.challenge(first.hello()).expected)  # the same first line, replayed
    with pytest.raises(ValueError, match=r"server\.key"):
        second.answer(sender.challenge(first.hello()).answer)


@pytest.mark.parametrize(
    "change",
    [{"key": "00"}, {"key": None}, {"key": "x" * 64}, {"nonce": ""}, {"nonce": 3}, {"key": "00" * 32}],
)
def test_a_malformed_first_line_is_refused(ours: Path, change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        SenderKeys(ours).challenge(ReceiverKeys(ours).hello() | change)


def test_a_key_is_authorized_and_revoked_while_the_sender_runs(ours: Path, theirs: Path) -> None:
    sender, receiver = SenderKeys(ours), ReceiverKeys(theirs)
    shutil.copyfile(theirs / "client.key", ours / "authorized" / "theirs.key")
    assert sender.challenge(receiver.hello()).answer
    (ours / "authorized" / "theirs.key").unlink()
    with pytest.raises(ValueError, match="not in authorized"):
        sender.challenge(receiver.hello())


def test_keys_that_cannot_be_read_are_refused_with_what_makes_them(tmp_path: Path) -> None:
    for keys in (SenderKeys, ReceiverKeys):
        with pytest.raises(SettingsError, match=f"make keys with `tether keys '{tmp_path}/my keys'`"):
            keys(tmp_path / "my keys")
