"""Implements the binding end of an edge: a ROUTER socket, driven from the event loop."""

import contextlib
import functools
import logging
from collections.abc import Callable
from enum import Enum

import zmq

from protocol.errors import ProtocolError, SettingsError
from protocol.topics import Topic
from services.bus.config import BusConfig, bind_address, public_endpoint
from services.bus.curve import Authenticator, secure_server
from services.bus.pump import Pump, make_context
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

FAILED_EVENTS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Failed handshakes for which ZeroMQ does not call the authenticator."""


IDENTITY_FLAGS = zmq.NOBLOCK | zmq.SNDMORE
"""Flags for the frame with the peer's identity."""


class SendResult(Enum):
    """Result of sending a frame to a peer."""

    SENT = "sent"
    """The socket has queued the frame."""
    FULL = "full"
    """The peer's queue is full: retry later, or drop the frame."""
    UNREACHABLE = "unreachable"
    """The peer is no longer connected."""


class Router:
    """Owner of the context, socket and authenticator of a binding end.

    `on_frame(peer, frame)` is called for each single-frame message and raises ProtocolError for a malformed
    frame. Multi-frame messages are counted as malformed.
    """

    def __init__(
        self,
        topic: Topic,
        *,
        config: BusConfig,
        stats: BusStats,
        on_frame: Callable[[bytes, zmq.Frame], None],
    ) -> None:
        self._topic = topic
        self._config = config
        self._stats = stats
        self._on_frame = on_frame
        self._socket: zmq.Socket[bytes]
        self.pump: Pump
        """Reads the socket between `open` and `close`."""
        self._opened = contextlib.ExitStack()

    def open(self) -> str:
        """Bind and start reading; return the endpoint to register.

        Raises:
            SettingsError: the address must not or cannot be bound.
        """
        address = bind_address(self._topic, self._config)
        with contextlib.ExitStack() as opened:
            context = make_context()
            opened.callback(context.destroy, 0)
            if self._config.curve_dir:
                authenticator = Authenticator(context, self._config.curve_dir, self._stats)
                opened.callback(authenticator.close)
            self._socket = self._make_socket(context)
            opened.callback(self._socket.close, 0)
            monitor = self._socket.get_monitor_socket(FAILED_EVENTS)
            opened.callback(monitor.close, 0)
            opened.callback(self._socket.disable_monitor)
            opened.callback(Pump(monitor, functools.partial(self._count_failed, monitor)).close)
            self._bind(self._socket, address)
            self.pump = Pump(self._socket, self._take)
            opened.callback(self.pump.close)
            self._opened = opened.pop_all()
        endpoint = public_endpoint(self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0"), self._config)
        log.info(
            "bus.bound topic=%s endpoint=%s curve=%s",
            self._topic.name,
            endpoint,
            bool(self._config.curve_dir),
        )
        return endpoint

    def send(self, peer: bytes, frame: bytes) -> SendResult:
        """Queue a frame for a peer, without waiting."""
        socket = self._socket
        if socket.closed:
            return SendResult.UNREACHABLE
        try:
            socket.send(peer, IDENTITY_FLAGS)
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.UNREACHABLE
        finally:
            self.pump.poke()
        self._stats.bytes_out += len(frame)
        return SendResult.SENT

    def close(self) -> None:
        """Drop queued frames and close all sockets. Idempotent."""
        self._opened.close()

    def _make_socket(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.ROUTER)
        config = self._config
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, config.max_frame_bytes),
            (zmq.SNDHWM, config.high_water_mark),
            (zmq.RCVHWM, config.high_water_mark),
            (zmq.HEARTBEAT_IVL, max(1, int(config.heartbeat_s * 1000))),
            (zmq.HEARTBEAT_TIMEOUT, int(config.peer_timeout_s * 1000)),
            (zmq.IPV6, int(":" in config.host)),
        ):
            socket.setsockopt(option, value)
        if config.curve_dir:
            secure_server(socket, config.curve_dir)
        return socket

    def _bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            hint = "another process uses this port" if error.errno == zmq.EADDRINUSE else str(error)
            raise SettingsError(
                f"topic {self._topic.name}: cannot bind {address}: {hint}; "
                "set bus.port_base to 0 for any free port, or change bus.host"
            ) from error

    def _count_failed(self, monitor: zmq.Socket[bytes]) -> None:
        """Count a peer with a failed handshake, which lacks required keys or does not speak ZeroMQ."""
        monitor.recv_multipart(zmq.NOBLOCK)
        self._stats.unknown_peer += 1

    def _take(self) -> None:
        socket = self._socket
        peer = socket.recv(zmq.NOBLOCK)
        frame = socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more:
            while frame.more:
                self._stats.bytes_in += len(frame)
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            self._stats.malformed += 1
            return
        self._stats.bytes_in += len(frame)
        try:
            self._on_frame(peer, frame)
        except ProtocolError as error:
            self._stats.malformed += 1
            log.debug("bus.malformed topic=%s error=%s", self._topic.name, error)
