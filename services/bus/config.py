"""Configures the bus, and derives the addresses that its sockets bind and register."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.codec import MAX_FRAME_BYTES
from protocol.errors import SettingsError
from protocol.network.addresses import bracketed, is_loopback, reachable_host
from protocol.paths import FilePath
from protocol.topics import TOPICS, Topic


@dataclass(frozen=True, slots=True)
class BusConfig:
    """Section `[bus]`: sockets between the services."""

    host: str = "127.0.0.1"
    """Address that receivers and health endpoints bind. Addresses other than loopback require `curve_dir`."""
    advertise: str = ""
    """Host name that peers connect to. Empty: `host`, or this machine's name if `host` is a wildcard."""
    port_base: Annotated[int, Interval(ge=0, le=65535 - len(TOPICS))] = 0
    """First port: topic number i binds port_base + i. 0: any free port."""
    health_port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port of a service's /health and /metrics, for probes of a service with its own address. 0: any free
    port; `tether status` shows it."""
    heartbeat_s: Annotated[float, Interval(ge=0.01, le=1e4)] = 0.5
    """Seconds between two heartbeats of a receiver, and between two reads of the registry by a sender."""
    peer_timeout_s: Annotated[float, Interval(ge=0.02, le=1e6)] = 5.0
    """Seconds of silence after which a receiver counts as dead and its messages are sent to another receiver.
    At least twice `heartbeat_s`."""
    max_outstanding: Annotated[int, Interval(ge=1, le=10**7)] = 1024
    """Maximum number of unacknowledged messages per sender."""
    high_water_mark: Annotated[int, Interval(ge=1, le=10**7)] = 1000
    """Maximum number of frames queued per connection, and of messages waiting for `receive`."""
    curve_dir: FilePath = ""
    """Directory of CURVE keys, created by `tether keys`. Empty: no encryption, loopback only."""
    max_frame_bytes: Annotated[int, Interval(ge=1, le=MAX_FRAME_BYTES)] = MAX_FRAME_BYTES
    """Maximum frame size. A peer that sends a larger frame is disconnected before the frame is read. The
    largest value is the format's limit."""

    def __post_init__(self) -> None:
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise SettingsError(
                f"setting bus.peer_timeout_s: {self.peer_timeout_s} is less than twice "
                f"bus.heartbeat_s = {self.heartbeat_s}"
            )


def bind_address(topic: Topic, config: BusConfig) -> str:
    """Return the ZeroMQ address to bind for `topic`.

    Raises:
        SettingsError: the address is reachable from other machines and there are no keys.
    """
    if not is_loopback(config.host) and not config.curve_dir:
        raise SettingsError(
            f"bus.host = {config.host!r} can be reached from other machines: "
            "make keys with `tether keys DIR` and set bus.curve_dir, or bind 127.0.0.1"
        )
    names = list(TOPICS)
    offset = names.index(topic.name) if topic.name in names else 0
    port = str(config.port_base + offset) if config.port_base else "*"
    return f"tcp://{bracketed(config.host)}:{port}"


def public_endpoint(bound: str, config: BusConfig) -> str:
    """Return the endpoint to register for a socket bound to `bound`."""
    host = config.advertise or reachable_host(config.host)
    return f"tcp://{bracketed(host)}:{bound.rpartition(':')[2]}"
