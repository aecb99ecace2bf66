"""Publishes weights from one host to another while a third one, with other keys, asks for them, too.

    python -m tests.trials.chaos.strangers

    trainer   10.99.0.2   Redis, ingest, reward, and the trainer: two ranks, each of which serves its part
    engines   10.99.0.3   a rollout worker
    stranger  10.99.0.4   a machine that reaches every port, and knows everything but a secret key

Hosts are network namespaces. Weights go by `nccl`, on gloo. Exit codes: those of `tests.trials.chaos.hosts`.
"""

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from protocol.device.pair_group import BACKENDS
from protocol.errors import WeightError
from protocol.host.key_proof import ReceiverKeys, fetch_with_keys
from protocol.messages import WeightManifest
from protocol.weights.slices import all_of
from rollout.weights.registry import make_receiver
from rollout.weights.sender_connection import parse_location
from services.bus.curve import create_keys
from services.ledger.redis.ledger import RedisLedger
from tests.trials.chaos.checks import check_run
from tests.trials.chaos.hosts import Hosts, connected, main, reached
from tests.trials.chaos.place import Place
from tests.trials.chaos.run import tell_last_step
from tests.trials.chaos.scene import adopt_orphans
from trainer.weights.served.receiver_connection import REFUSED

HOSTS = {"trainer": "10.99.0.2", "engines": "10.99.0.3", "stranger": "10.99.0.4"}
SERVICES = (("trainer", "ingest"), ("trainer", "reward"), ("trainer", "trainer"), ("engines", "rollout"))
VARIABLES = {
    "TETHER_TRAINER__BACKEND": "megatron",
    "TETHER_PARALLEL__TENSOR_MODEL_PARALLEL_SIZE": "2",
}
RANKS = 2
SECONDS = 20.0


async def run(place: Place) -> list[str]:
    """Run the whole scenario; returns violations."""
    adopt_orphans()
    create_keys(place.root / "keys")
    create_keys(place.root / "others")
    shutil.copyfile(place.root / "keys" / "server.key", place.root / "others" / "server.key")  # it is public
    hosts = Hosts(place, HOSTS, VARIABLES)
    await hosts.redis()
    ledger = await connected(hosts.url)
    if await (await hosts.service("trainer", "prepare")).wait() != 0:
        return ["prepare failed"]
    for host, name in SERVICES:
        await hosts.service(host, name)
    await reached(ledger, 2)
    print("weights go from host to host", flush=True)
    wrong = await intrude(hosts, ledger)
    last = await tell_last_step(ledger, place)
    if code := await hosts.processes["trainer", "trainer"].wait():
        wrong.append(f"the trainer ended with exit code {code}")
    wrong += await hosts.stop("rollout") + await hosts.stop("reward") + await hosts.stop("ingest")
    status = await ledger.status()
    await ledger.close()
    await hosts.stop("redis")
    report = await asyncio.to_thread(check_run, place.run_dir, status)
    print(f"hosts={len(HOSTS)} last={last} steps={report.steps} trained={report.trained}", flush=True)
    return wrong + report.violations


async def intrude(hosts: Hosts, ledger: RedisLedger) -> list[str]:
    """Have the stranger ask for the current version, and the run make steps meanwhile and afterwards."""
    encoded = await ledger.manifest()
    assert encoded is not None
    manifest = msgspec.msgpack.decode(encoded, type=WeightManifest)
    if len({part.location for part in manifest.parts}) != RANKS:
        return [f"the version does not lie on {RANKS} ranks: {manifest.parts}"]
    place = hosts.place
    (place.root / "manifest").write_bytes(encoded)
    arguments = (str(place.root / "manifest"), str(place.root / "others"), str(place.root / "keys"))
    program = (sys.executable, "-m", "tests.trials.chaos.strangers", "stranger", *arguments)
    stranger = await hosts.start("stranger", "stranger", *program)
    if await stranger.wait() != 0:
        return [f"the stranger ended with exit code {stranger.returncode}"]
    await reached(ledger, (await ledger.status()).version + 3)
    said = (place.root / "stranger.stranger.log").read_text().splitlines()[-1]
    return check_answers(json.loads(said))


def check_answers(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what the stranger got beyond a refusal."""
    wrong = [f"the stranger read {line}" for line in found["lines"] if json.loads(line) != REFUSED]
    wrong += [f"the stranger got {what}" for what in found["fetched"] if REFUSED["error"] not in what]
    if len(found["lines"]) != 3 * RANKS or len(found["fetched"]) != 2:
        wrong.append(f"the stranger has not tried everything: {found}")
    return wrong


def be_stranger(manifest: WeightManifest, others: Path, ours: Path) -> dict[str, list[str]]:
    """Try everything that a machine without an authorized secret key can; returns what came of it.

    Args:
        manifest: of the current version.
        others: keys that are not authorized.
        ours: the run's, of which it uses a public one.
    """
    request = {"version": manifest.version, "epoch": manifest.epoch}
    borrowed = ReceiverKeys(others).hello() | {"key": ReceiverKeys(ours).hello()["key"]}
    lines = []
    for host, port, _ in (parse_location(part.location, BACKENDS) for part in manifest.parts):
        lines += said_by(host, port, request)
        lines += said_by(host, port, ReceiverKeys(others).hello(), request)
        _challenge, *rest = said_by(host, port, borrowed, {"proof": "00" * 32}, request)
        lines += rest
    fetched = []
    for keys in ("", str(others)):
        fetch_with_keys(keys)
        with closing(make_receiver(manifest.transport)) as receiver:
            try:
                fetched.append(f"{len(list(receiver.slices(manifest, all_of(manifest), SECONDS)))} slices")
            except WeightError as error:
                fetched.append(str(error))
    return {"lines": lines, "fetched": fetched}


def said_by(host: str, port: int, *messages: Mapping[str, object]) -> list[str]:
    """Return all lines that a sender answers to these."""
    said = b""
    with socket.create_connection((host, port), timeout=SECONDS) as connection:
        connection.sendall(b"".join(json.dumps(message).encode() + b"\n" for message in messages))
        with suppress(ConnectionResetError):  # it has hung up with lines unread
            while part := connection.recv(4096):
                said += part
    return said.decode().splitlines()


if __name__ == "__main__":
    if sys.argv[1:2] == ["stranger"]:
        current = msgspec.msgpack.decode(Path(sys.argv[2]).read_bytes(), type=WeightManifest)
        print(json.dumps(be_stranger(current, Path(sys.argv[3]), Path(sys.argv[4]))))
    else:
        sys.exit(main(run, HOSTS))
