"""Configures the bus, and derives from that which addresses its sockets bind and register."""

import ipaddress
import socket
from dataclasses import dataclass

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import SettingsError
from protocol.topics import TOPICS, Topic

WILDCARDS = frozenset({"*", "0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class BusConfig:
    """Section `[bus]`."""

    host: str = "127.0.0.1"
    """Address that receivers bind; `curve_dir` is required unless it is a loopback address."""
    advertise: str = ""
    """Host that others connect to; empty: `host`, or this machine's name where `host` is a wildcard."""
    port_base: int = 0
    """Topic number i of `protocol.topics.TOPICS` binds port_base + i; 0: any free port."""
    heartbeat_s: float = 0.5
    """Seconds between two heartbeats of a receiver, and between two reads of the registry by a sender."""
    peer_timeout_s: float = 5.0
    """Seconds of silence after which a receiver counts as dead and its messages go to another one."""
    max_outstanding: int = 1024
    """Most unacknowledged messages of one sender."""
    high_water_mark: int = 1000
    """Most frames that a socket queues per connection, and most messages that wait for `receive`."""
    curve_dir: str = ""
    """Directory of CURVE keys (`services/bus/curve.py`); empty: no encryption, loopback only."""
    max_frame_bytes: int = MAX_FRAME_BYTES
    """Largest frame, bytes; a peer that sends a larger one is disconnected before it is read."""

    def __post_init__(self) -> None:
        if self.heartbeat_s <= 0 or self.peer_timeout_s < 2 * self.heartbeat_s:
            raise SettingsError(
                f"bus.peer_timeout_s = {self.peer_timeout_s}: use at least twice "
                f"bus.heartbeat_s = {self.heartbeat_s}, which must be > 0"
            )
        if self.max_outstanding < 1 or self.high_water_mark < 1:
            raise SettingsError("bus.max_outstanding and bus.high_water_mark must be at least 1")
        if not 0 <= self.port_base <= 65535 - len(TOPICS):
            raise SettingsError(
                f"bus.port_base = {self.port_base}: use 0 for any free port, or 1 to {65535 - len(TOPICS)}"
            )


def is_loopback(host: str) -> bool:
    """Return whether `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bind_address(topic: Topic, config: BusConfig) -> str:
    """Return the ZeroMQ address to bind for `topic`.

    Raises:
        SettingsError: if the address can be reached from other machines and there are no keys.
    """
    if not is_loopback(config.host) and not config.curve_dir:
        raise SettingsError(
            f"bus.host = {config.host!r} can be reached from other machines: "
            "make keys with `tether keys DIR` and set bus.curve_dir, or bind 127.0.0.1"
        )
    names = list(TOPICS)
    offset = names.index(topic.name) if topic.name in names else 0
    port = str(config.port_base + offset) if config.port_base else "*"
    return f"tcp://{_bracketed(config.host)}:{port}"


def public_endpoint(bound: str, config: BusConfig) -> str:
    """Return the endpoint to register for a socket that is bound to `bound`."""
    host = config.advertise or (socket.gethostname() if config.host in WILDCARDS else config.host)
    return f"tcp://{_bracketed(host)}:{bound.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
