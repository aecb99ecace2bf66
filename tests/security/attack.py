"""Attacks a port: bytes of no protocol, of other protocols, messages without sense, and silence."""

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgpack
import zmq

from protocol.codec import encode, encode_payload, wrap
from protocol.messages import Hello
from tests.protocol.samples import SAMPLES
from tests.trials.fuzz.mutate import changed

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
"""With which ZMTP 3.0 begins."""
SILENT = 20
"""Connections to one port that say nothing, held open."""
PATIENCE_S = 5.0


@dataclass
class Attack:
    """One thread against some ports, one after the other, repeatedly until stopped."""

    ports: Sequence[tuple[str, int]]
    run: str
    what: "Callable[[Attack, random.Random], None]"
    rounds: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    held: list[socket.socket] = field(default_factory=list)
    failed: str = ""
    port: tuple[str, int] = ("", 0)
    """The one whose turn it is."""

    def start(self, seed: int) -> threading.Thread:
        """Start the thread; join it after `stop`."""
        thread = threading.Thread(target=self._loop, args=(random.Random(seed),), daemon=True)
        thread.start()
        return thread

    def connect(self) -> socket.socket:
        """Return a connection to the port."""
        return socket.create_connection(self.port, PATIENCE_S)

    def say(self, data: bytes) -> None:
        """Send on a new connection, read the answer, and hang up. The port may do so first."""
        with suppress(OSError), self.connect() as connection:
            connection.sendall(data)
            connection.settimeout(0.05)
            connection.recv(1 << 16)

    def _loop(self, chance: random.Random) -> None:
        try:
            while not self.stop.is_set():
                for port in self.ports:
                    self.port = port
                    self.what(self, chance)
                self.rounds += 1
                time.sleep(0.01)
        except Exception as error:  # told by the test
            self.failed = f"{self.what.__name__}: {error!r}"
        finally:
            for connection in self.held:
                connection.close()


def garbage(attack: Attack, chance: random.Random) -> None:
    """Send random bytes, bytes of other protocols, and greetings cut short anywhere."""
    attack.say(chance.randbytes(chance.randrange(1, 5000)))
    attack.say(GREETING[: chance.randrange(len(GREETING))] + chance.randbytes(chance.randrange(50)))
    attack.say(GREETING + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + chance.randbytes(200))
    attack.say(GREETING + b"\x06" + b"\xff" * 8)  # a command of 2**64 bytes
    attack.say(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * chance.randrange(5000) + b"\r\n")
    attack.say(b"GET /../../../../etc/passwd HTTP/1.0\r\n\r\n")
    attack.say(
        b"POST /status.json HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n"
        + chance.randbytes(1000)
    )
    attack.say(
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"
        + chance.randbytes(100)
    )
    attack.say(b"\x16\x03\x01\x02\x00\x01\x00" + chance.randbytes(512))


def crowd(attack: Attack, chance: random.Random) -> None:
    """Open connections and leave them; some stay open and send nothing, or half a greeting."""
    with suppress(OSError):  # a full backlog makes them wait, which is no more than they deserve
        for _ in range(20):
            attack.connect().close()
        for _ in range(SILENT if attack.rounds == 0 else 0):
            attack.held.append(attack.connect())
            attack.held[-1].sendall(GREETING[: chance.randrange(len(GREETING))])


def messages(attack: Attack, chance: random.Random) -> None:
    """Send noise, damaged frames and changed messages as ZeroMQ peers, unknown and known."""
    context = zmq.Context()
    try:
        peer = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 200),
            (zmq.SNDTIMEO, int(PATIENCE_S * 1000)),
            (zmq.RCVTIMEO, int(PATIENCE_S * 1000)),
        ):
            peer.setsockopt(option, value)
        peer.connect("tcp://{}:{}".format(*attack.port))
        with suppress(zmq.Again):
            peer.send_multipart([chance.randbytes(20)] * chance.randrange(2, 9))
            peer.send(chance.randbytes(chance.randrange(2000)))
            peer.send(encode(SAMPLES["scored"], run="another", id="m1"))
            peer.send(encode(SAMPLES["scored"], run=attack.run, id="m1"))
            if chance.random() < 0.7:
                peer.send(encode(Hello(sender="stranger", role="reward"), run=attack.run, id=""))
                peer.recv()
            for _ in range(20):
                peer.send(_strange(attack.run, chance))
    finally:
        context.destroy(200)


def _strange(run: str, chance: random.Random) -> bytes:
    """Return a frame: a message with some fields changed, or damaged, or cut short."""
    whole = msgpack.unpackb(encode_payload(SAMPLES[chance.choice(list(SAMPLES))]), strict_map_key=False)
    for _ in range(chance.randrange(4)):
        whole = changed(whole, chance)
    try:
        packed = msgpack.packb(whole)
    except (ValueError, OverflowError):
        packed = b"\x80"
    frame = bytearray(
        wrap(
            packed,
            run=run,
            id=f"strange-{chance.randrange(1000)}",
            epoch="e",
            group=chance.choice((-1, 0, 7)),
            token="t",
        )
    )
    if chance.random() < 0.2:
        frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    return bytes(frame[: chance.randrange(len(frame))] if chance.random() < 0.2 else frame)
