"""Finds conflicts with this machine: bus keys, ports, libraries; and queries the ledger's server."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from protocol.errors import SettingsError, Unavailable, error_text
from protocol.host.curve_keys import load_authorized, load_pair
from protocol.network.certificates import server_tls
from protocol.topics import TOPICS
from services.bus.config import BusConfig, bind_address
from services.bus.curve import ClientKeys
from services.ledger.redis.ledger import RedisLedger
from services.preflight.machine import device_problems, directory_problems
from services.preflight.model import engines_of
from services.preflight.problem import Problem
from services.runtime.run_ledger import ledger_url, status_if_created
from services.settings.automatic import visible_gpus
from services.settings.engine_pool import engine_names
from services.settings.sections import Settings
from services.settings.tracking import is_installed

LEDGER_S = 3.0
"""Timeout of the ledger server's answer, seconds."""
FIND_S = 60.0
"""Timeout of the query whether a Python interpreter has SGLang, seconds."""
LIBRARIES = {"megatron": "megatron.core", "vllm": "vllm"}
"""Backend or engine -> library that it needs in this interpreter."""


def local_problems(settings: Settings) -> Iterator[Problem]:
    """Yield problems that prevent services from starting on this machine; ports are bound briefly."""
    yield from directory_problems(settings.run_dir)
    yield from device_problems(settings, visible_gpus(os.environ))
    yield from _library_problems(settings)
    yield from _sglang_problems(settings)
    yield from _key_problems(settings.bus)
    yield from _certificate_problems(settings)
    yield from _port_problems(settings)


def ledger_problems(settings: Settings) -> Iterator[Problem]:
    """Yield a problem if the configured server does not answer for this run within `LEDGER_S`."""
    if not settings.ledger.url:
        return

    async def ask() -> None:
        ledger = await RedisLedger.connect(
            ledger_url(settings), settings.run.name, timeout_s=LEDGER_S, retry_s=0
        )
        try:
            await status_if_created(ledger)
        finally:
            await ledger.close()

    try:
        asyncio.run(ask())
    except (SettingsError, Unavailable) as error:
        yield Problem(f"section [ledger]: {error}")


def _library_problems(settings: Settings) -> Iterator[Problem]:
    engines = {*engine_names(settings.engine, settings.services.pool)}
    for setting, names in (("trainer.backend", {settings.trainer.backend}), ("engine.name", engines)):
        for name in sorted(names & LIBRARIES.keys()):
            if not is_installed(LIBRARIES[name]):
                yield Problem(
                    f"the library {LIBRARIES[name]} is not installed for this Python",
                    "install it, or choose another one",
                    setting,
                    name,
                )


def _sglang_problems(settings: Settings) -> Iterator[Problem]:
    """Check that each interpreter for SGLang has the package, without importing it."""
    engines = (engine for engine in engines_of(settings) if engine.name == "sglang")
    for python in dict.fromkeys(engine.python or sys.executable for engine in engines):
        command = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('sglang') is None)"]
        try:
            has_it = not subprocess.run(command, timeout=FIND_S, check=False).returncode
            cause = f"{python} has no SGLang"
        except (OSError, subprocess.TimeoutExpired) as error:
            has_it, cause = False, f"{python} cannot be started: {error}"
        if not has_it:
            yield Problem(
                cause,
                "install it there, or set engine.python to the Python that has it",
                "engine.name",
                "sglang",
            )


def _key_problems(bus: BusConfig) -> Iterator[Problem]:
    try:
        for topic in TOPICS.values():
            bind_address(topic, bus)
        if bus.curve_dir:
            load_pair(bus.curve_dir, "server")
            ClientKeys.load(bus.curve_dir)
    except SettingsError as error:
        yield Problem(str(error))
        return
    if bus.curve_dir and not load_authorized(bus.curve_dir):
        yield Problem(
            f"{Path(bus.curve_dir) / 'authorized'} holds no public key, so that no service could connect",
            f"copy {Path(bus.curve_dir) / 'client.key'} there",
            "bus.curve_dir",
            bus.curve_dir,
        )


def _certificate_problems(settings: Settings) -> Iterator[Problem]:
    environment = settings.environment
    if environment.cert_file and environment.key_file:
        try:
            server_tls(environment.cert_file, environment.key_file)
        except SettingsError as error:
            yield Problem(
                str(error),
                "use another certificate, or create a new one",
                "environment.cert_file",
                environment.cert_file,
            )


def _port_problems(settings: Settings) -> Iterator[Problem]:
    bus, monitor, environment = settings.bus, settings.monitor, settings.environment
    bus_ports = range(bus.port_base, bus.port_base + len(TOPICS)) if bus.port_base else range(0)
    ports = [("bus.port_base", bus.port_base, bus.host, port) for port in bus_ports]
    if monitor.enabled and monitor.port:
        ports.append(("monitor.port", monitor.port, monitor.host, monitor.port))
        if monitor.port in bus_ports:
            yield Problem(
                f"the bus has the ports {bus_ports[0]} to {bus_ports[-1]} (bus.port_base)",
                "choose another port, or 0 for any free one",
                "monitor.port",
                monitor.port,
            )
    if bus.health_port:
        yield Problem(
            "all services of a run on one machine would serve /health on the same port",
            "remove the setting; it is for services with addresses of their own, such as pods",
            "bus.health_port",
            bus.health_port,
        )
    if environment.port:
        tried = range(environment.port, min(environment.port + environment.ports, 1 << 16))
        if all(_why_not_bound(environment.host, port) for port in tried):
            ports.append(("environment.port", environment.port, environment.host, environment.port))
    for setting, value, host, port in ports:
        reason = _why_not_bound(host, port)
        if reason:
            yield Problem(
                f"port {port} of {host} cannot be served on: {reason}",
                "choose another port, or 0 for any free one",
                setting,
                value,
            )


def _why_not_bound(host: str, port: int) -> str:
    """Return why a TCP port cannot be bound; empty if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            "0.0.0.0" if host == "*" else host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error_text(error)
    return ""
