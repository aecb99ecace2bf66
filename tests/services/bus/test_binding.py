"""Binding and CURVE: which addresses may be bound, and which keys may connect."""

import asyncio
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import SettingsError
from protocol.host.curve_keys import load_authorized, load_pair, load_public
from protocol.messages import Hello
from protocol.network.addresses import is_loopback
from protocol.topics import ROLLOUTS, SCORED, TOPICS
from protocol.validation import validated
from services.bus.config import BusConfig, bind_address, public_endpoint
from services.bus.curve import KEY_FILES, create_keys
from tests.services.bus.harness import (
    QUICK,
    Raw,
    Registry,
    acknowledge,
    background,
    eventually,
    frame,
    receiver,
    score,
    sender,
)


async def test_taken_port_is_named() -> None:
    async with receiver() as first:
        port = int(first.endpoint.rpartition(":")[2])
        config = replace(QUICK, port_base=port - list(TOPICS).index(SCORED.name))
        with pytest.raises(SettingsError, match=f":{port}.*another process uses this port"):
            await receiver(config=config).start()


async def test_address_that_this_host_does_not_have_is_refused(tmp_path: Path) -> None:
    create_keys(tmp_path)
    with pytest.raises(SettingsError, match=r"cannot bind tcp://192\.0\.2\.1"):
        await receiver(config=replace(QUICK, host="192.0.2.1", curve_dir=str(tmp_path))).start()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "192.0.2.1", "::", "example.org", "127.0.0.1.evil.example"])
async def test_off_loopback_needs_keys(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(SettingsError, match="tether keys"):
        await receiver(config=replace(QUICK, host=host)).start()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert bind_address(SCORED, BusConfig(host=host)).startswith("tcp://")


def test_ports_count_up_from_the_base() -> None:
    ports = {bind_address(topic, BusConfig(port_base=7000)).rpartition(":")[2] for topic in TOPICS.values()}
    assert ports == {"7000", "7001", "7002", "7003"}


def test_advertised_host_is_registered() -> None:
    assert public_endpoint("tcp://0.0.0.0:7", BusConfig(host="0.0.0.0", advertise="node3")) == "tcp://node3:7"
    assert public_endpoint("tcp://[::1]:7", BusConfig(host="::1")) == "tcp://[::1]:7"
    assert not public_endpoint("tcp://0.0.0.0:7", BusConfig(host="0.0.0.0")).startswith("tcp://0.0.0.0")


@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_s": 0.0},
        {"heartbeat_s": 5.0},
        {"max_outstanding": 0},
        {"high_water_mark": 0},
        {"port_base": 65535},
        {"port_base": -1},
        {"max_frame_bytes": MAX_FRAME_BYTES + 1},
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        validated(BusConfig, values)


async def test_authorized_key_may_connect_even_off_loopback(tmp_path: Path) -> None:
    create_keys(tmp_path)
    groups: list[int] = []
    config = replace(QUICK, host="0.0.0.0", advertise="127.0.0.1", curve_dir=str(tmp_path))
    async with (
        receiver(config=config) as inbox,
        sender(Registry({"ingest.1": inbox.endpoint}), config=config) as outbox,
    ):
        async with background(acknowledge(inbox, groups)):
            await outbox.send(score(1))
    assert groups == [1]
    assert inbox.stats.unknown_peer == 0


async def test_other_keys_and_no_keys_are_refused_until_authorized(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    create_keys(ours)
    create_keys(theirs)
    shutil.copyfile(ours / "server.key", theirs / "server.key")
    groups: list[int] = []
    async with receiver(config=replace(QUICK, curve_dir=str(ours))) as inbox:
        registry = Registry({"ingest.1": inbox.endpoint})
        stranger = sender(registry, "stranger.1", config=replace(QUICK, curve_dir=str(theirs)))
        plain = sender(registry, "plain.1")
        async with stranger, plain, background(acknowledge(inbox, groups)), asyncio.TaskGroup() as group:
            sending = group.create_task(stranger.send(score(1)))
            naked = group.create_task(plain.send(score(2)))
            await eventually(lambda: inbox.stats.unknown_peer >= 3)
            assert not sending.done()
            assert groups == []
            shutil.copyfile(theirs / "client.key", ours / "authorized" / "theirs.key")
            await eventually(sending.done)
            assert groups == [1]
            naked.cancel()


async def test_a_plain_peer_is_refused_and_counted(tmp_path: Path) -> None:
    create_keys(tmp_path)
    async with receiver(config=replace(QUICK, curve_dir=str(tmp_path))) as inbox, Raw(inbox.endpoint) as raw:
        with suppress(zmq.Again):  # it may be refused before it can say anything
            await raw.socket.send_multipart([frame(Hello(sender="plain.1", role="reward"))], zmq.NOBLOCK)
        await eventually(lambda: inbox.stats.unknown_peer >= 1)
        assert inbox.stats.bytes_in == 0


async def test_a_secret_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    create_keys(tmp_path)
    config = replace(QUICK, curve_dir=str(tmp_path))
    (tmp_path / "server.key_secret").chmod(0o640)
    with pytest.raises(
        SettingsError, match=r"server\.key_secret can be read by other users \(mode 640\); chmod 600 it"
    ):
        await receiver(config=config).start()
    (tmp_path / "server.key_secret").chmod(0o600)
    (tmp_path / "client.key_secret").chmod(0o604)
    async with receiver(config=config) as inbox:
        with pytest.raises(SettingsError, match=r"client\.key_secret can be read by other users"):
            await sender(Registry({"ingest.1": inbox.endpoint}), config=config).__aenter__()


def test_keys_are_private_and_not_overwritten(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    secrets = list((tmp_path / "keys").glob("*.key_secret"))
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    before = [path.read_bytes() for path in secrets]
    with pytest.raises(SettingsError, match="exists"):
        create_keys(tmp_path / "keys")
    assert [path.read_bytes() for path in secrets] == before


@pytest.mark.parametrize("moved", range(len(KEY_FILES)))
def test_keys_whose_making_was_interrupted_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    replace, left = os.replace, iter(range(moved))

    def interrupted(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr("services.bus.curve.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_keys(tmp_path)
    monkeypatch.undo()
    placed = {name: (tmp_path / name).read_bytes() for name in KEY_FILES[:moved]}
    create_keys(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in KEY_FILES[:moved]} == placed
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["authorized", *KEY_FILES[:4]])
    assert load_authorized(tmp_path) == {load_pair(tmp_path, "client")[0]}
    assert load_pair(tmp_path, "server")[0] == load_public(tmp_path)


def test_file_that_is_no_key_is_skipped(tmp_path: Path) -> None:
    create_keys(tmp_path)
    (tmp_path / "authorized" / "junk.key").write_text("junk")
    (tmp_path / "authorized" / "binary.key").write_bytes(b"\xff\xfe")
    assert len(load_authorized(tmp_path)) == 1


async def test_missing_keys_are_named(tmp_path: Path) -> None:
    config = replace(QUICK, curve_dir=str(tmp_path))
    with pytest.raises(SettingsError, match=r"server\.key_secret.*tether keys"):
        await receiver(topic=ROLLOUTS, config=config).start()
    with pytest.raises(SettingsError, match=r"client\.key_secret"):
        await sender(Registry(), config=config).__aenter__()
