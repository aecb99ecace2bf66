"""Runs this host's ranks of a trainer on several hosts.

The hosts connect (`trainer/hosts/meeting.py`), torchrun starts the ranks on each host, and all hosts end
together. Hosts other than host 0 need the settings, the model and the run directory. Only rank 0 connects to
ledger and bus.
"""

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from protocol.errors import SettingsError, TetherError
from services.runtime.errors import EXIT_FAILED, EXIT_SETTINGS
from services.settings.hub import fetch_critic, fetch_frozen, fetch_model
from services.settings.sections import Settings
from services.trainer.start_ranks import launch
from trainer.hosts.meeting import Consequence, Ending, HostFacts, Meeting
from trainer.hosts.place import SEE_S, HostPlace
from trainer.ranks.launch import torchrun_on_hosts
from trainer.weights.version_directories import versions_in

log = logging.getLogger("tether.hosts")

COMPARED_SECTIONS = (
    "model",
    "trainer",
    "parallel",
    "placement",
    "optimizer",
    "algorithm",
    "critic",
    "lora",
    "reference",
    "teacher",
    "reward_model",
    "weights",
)
"""Sections that must be the same on all hosts."""
HOST_SPECIFIC_SETTINGS = frozenset(
    {
        *("model.path", "critic.path", "reference.path", "teacher.path", "reward_model.path"),
        *("trainer.threads", "weights.directory", "weights.host"),
    }
)
"""Settings in these sections that may differ between hosts."""
EXIT_CODES = {Consequence.RESTART: EXIT_FAILED, Consequence.REFUSED: EXIT_SETTINGS, Consequence.STOPPED: 0}
"""Consequence of an ending -> exit code of all hosts."""


def run_on_hosts(settings: Settings, place: HostPlace) -> int:
    """Run this host's ranks until the ranks of all hosts have ended.

    Returns:
        The exit code.

    Raises:
        SettingsError: a host's settings, models or directories do not match host 0.
        TetherError: not all hosts connected in time, or a host ended before all had connected.
    """
    log.info("hosts.place %s", place.describe())
    with _marker(settings, place) as marker:
        facts = HostFacts(socket.gethostname(), os.getpid(), marker, host_settings(settings))
        meeting = Meeting(place, settings.cluster, facts)
        try:
            port = meeting.join(lambda first: check_host(settings, place, facts, first))
        except TetherError as error:
            consequence = Consequence.REFUSED if isinstance(error, SettingsError) else Consequence.RESTART
            meeting.leave(Ending(consequence, str(error)))
            raise
    log.info("hosts.met hosts=%d ranks=%d", place.hosts, settings.trainer_ranks)
    meeting.watch(_kill_ranks_and_exit)
    ranks = settings.trainer_ranks // place.hosts
    code, stopped = launch(torchrun_on_hosts(ranks, place, port, "services.trainer"))
    if stopped:
        meeting.leave(Ending(Consequence.STOPPED, f"host {place.number} was asked to stop"))
    elif code:
        consequence = Consequence.REFUSED if code == EXIT_SETTINGS else Consequence.RESTART
        meeting.leave(Ending(consequence, f"a rank of host {place.number} ({facts.name}) ended with {code}"))
    else:
        meeting.leave()
    return code


def host_settings(settings: Settings) -> dict[str, Any]:
    """Return settings and model fingerprints that must be the same on all hosts, by name.

    Raises:
        SettingsError: a model is missing.
    """
    tables = {name: dataclasses.asdict(getattr(settings, name)) for name in COMPARED_SECTIONS}
    compared = {
        f"setting {section}.{name}": json.loads(json.dumps(value))
        for section, table in tables.items()
        for name, value in table.items()
        if f"{section}.{name}" not in HOST_SPECIFIC_SETTINGS
    }
    compared["setting engine.dtype"] = settings.engine.dtype  # each rank publishes its part in this dtype
    models = {"the model's files": fetch_model(settings)}
    models |= {f"the files of [{role}]": path for role, path in fetch_frozen(settings).items()}
    if settings.critic.path:
        models["the files of [critic]"] = fetch_critic(settings)
    return compared | {name: _fingerprint(directory) for name, directory in models.items()}


def check_host(settings: Settings, place: HostPlace, facts: HostFacts, first: HostFacts) -> None:
    """Check that this host matches host 0.

    Args:
        settings: settings of this host.
        place: number of this host.
        facts: facts of this host.
        first: facts of host 0.

    Raises:
        SettingsError: a setting, model or directory differs; the message has both values.
    """
    names = f"host {place.number} ({facts.name})", f"host 0 ({first.name})"
    for name in sorted({*facts.settings, *first.settings}):
        value, first_value = facts.settings.get(name), first.settings.get(name)
        if value != first_value:
            raise SettingsError(
                f"{name}: {value!r} on {names[0]}, {first_value!r} on {names[1]}; start all hosts with the "
                "same settings, such as TETHER_CONFIG=RUN_DIR/settings.json"
            )
    end = time.monotonic() + SEE_S
    for setting, directory, use in _shared_directories(settings):
        path = directory / first.marker
        while not path.is_file():
            if time.monotonic() > end:
                raise SettingsError(
                    f"setting {setting}: {names[0]} does not see the directory of {names[1]}: there is no "
                    f"{path}; put it on a file system that all hosts of the trainer have, as each rank "
                    f"writes its part of {use} to it"
                )
            time.sleep(0.2)


def _shared_directories(settings: Settings) -> Iterator[tuple[str, Path, str]]:
    """Yield each directory that all hosts write to: its setting, the path on this host, and its purpose."""
    yield "run.dir", settings.run_dir, "a checkpoint"
    if settings.weights.transport in ("disk", "http"):
        yield "weights.directory", versions_in(settings.weights, settings.run_dir), "a version"


def _fingerprint(model_dir: Path) -> str:
    """Return a digest of a model's configuration and the names and sizes of its weight files."""
    weights = sorted((path.name, path.stat().st_size) for path in model_dir.glob("*.safetensors"))
    return hashlib.sha256((model_dir / "config.json").read_bytes() + repr(weights).encode()).hexdigest()[:16]


@contextmanager
def _marker(settings: Settings, place: HostPlace) -> Iterator[str]:
    """On host 0, create a marker file in each shared directory within the block; yield its name.

    Other hosts recognize the directory by the marker. Its name is random, because network file systems cache
    the absence of names.

    Raises:
        SettingsError: there is no run directory, or a directory cannot be written.
    """
    if not settings.run_dir.is_dir():
        raise SettingsError(f"no run directory {settings.run_dir}: start the ingest first, or `tether up`")
    if place.number:
        yield ""
        return
    name, paths = f"hosts-{secrets.token_hex(8)}", list[Path]()
    try:
        for setting, directory, _ in _shared_directories(settings):
            paths.append(directory / name)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                for old in directory.glob("hosts-*"):  # left by a killed host 0
                    old.unlink(missing_ok=True)
                paths[-1].touch()
            except OSError as error:
                raise SettingsError(
                    f"setting {setting}: cannot write {paths[-1]}: {error.strerror}"
                ) from None
        yield name
    finally:
        for path in paths:
            with suppress(OSError):
                path.unlink()


def _kill_ranks_and_exit(ending: Ending) -> None:
    """Kill this host's ranks and exit: without the other hosts the ranks would wait forever.

    torchrun is not asked to stop, because it would wait for the blocked ranks.
    """
    code = EXIT_CODES[ending.consequence]
    log.error("hosts.ended code=%d reason=%s", code, ending.reason)
    print(f"tether trainer: {ending.reason}; all its hosts end", file=sys.stderr, flush=True)
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    os._exit(code)
