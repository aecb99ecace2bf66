"""Connects a network namespace to this one by a link with a rate and a delay. Needs root and /dev/net/tun.

A process of its own relays packets between two tun devices and holds each until it would have arrived. So
delays need no module of the kernel. Packets keep their segment size, though the kernel hands over up to 64
KiB at a time: TCP starts as slowly as on a real link.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

NAMESPACE = "tether-far"
NEAR, FAR = "10.199.7.1", "10.199.7.2"
DEVICES = ("tether-near0", "tether-far0")
TUN, NO_PI, VNET_HDR = 0x0001, 0x1000, 0x4000
SET_INTERFACE, SET_OFFLOAD = 0x400454CA, 0x400454D0
CHECKSUM_AND_SEGMENTS = 0x01 | 0x02
PACKET_BYTES = 65_536 + 64
QUEUE_BYTES = 64 << 20
"""Bytes that wait for the link in each direction; what comes then is dropped."""
DIE_WITH_PARENT, KILL = 1, 9


@contextmanager
def slow_link(rate_mbit: float, rtt_ms: float) -> Iterator[list[str]]:
    """Yield the words before a command that run it at the far end, whose address is `FAR`."""
    subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True, check=False)
    _ip("netns", "add", NAMESPACE)
    command = [sys.executable, "-m", "tests.benchmarks.slow_link", str(rate_mbit), str(rtt_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            if relay.stdout.readline() != "ready\n":
                raise SystemExit("the relay has not started")
            yield ["ip", "netns", "exec", NAMESPACE]
        finally:
            relay.kill()
            _ip("netns", "del", NAMESPACE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, bytes_per_s: float, delay_s: float) -> None:
        self.source, self._target = source, target
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._packets: deque[tuple[float, bytes]] = deque()
        self._waiting = 0
        self._free = 0.0
        """When the link has sent all that waits."""

    def take(self) -> None:
        """Take packets that the kernel sends, as many as there are."""
        while True:
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            if self._waiting + len(packet) <= QUEUE_BYTES:
                self._free = max(self._free, time.monotonic()) + len(packet) / self._bytes_per_s
                self._packets.append((self._free + self._delay_s, packet))
                self._waiting += len(packet)

    def give(self) -> float:
        """Deliver the packets that have arrived, and return the seconds until the next one."""
        while self._packets:
            left = self._packets[0][0] - time.monotonic()
            if left > 0:
                return left
            _, packet = self._packets.popleft()
            self._waiting -= len(packet)
            os.write(self._target, packet)
        return 60.0


def relay(rate_mbit: float, rtt_ms: float) -> None:
    """Make the devices and relay between them until the process is killed."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, KILL)
    near, far = (_device(name) for name in DEVICES)
    _ip("link", "set", DEVICES[1], "netns", NAMESPACE)
    for words, device, address in (((), DEVICES[0], NEAR), (("-n", NAMESPACE), DEVICES[1], FAR)):
        _ip(*words, "addr", "add", f"{address}/24", "dev", device)
        _ip(*words, "link", "set", device, "up")
    numbers = (rate_mbit * 1e6 / 8, rtt_ms / 2e3)
    directions = (Direction(near, far, *numbers), Direction(far, near, *numbers))
    ready = selectors.DefaultSelector()
    for direction in directions:
        ready.register(direction.source, selectors.EVENT_READ, direction)
    print("ready", flush=True)
    while True:
        for key, _ in ready.select(min(direction.give() for direction in directions)):
            key.data.take()


def _device(name: str) -> int:
    """Make a tun device that hands over whole runs of segments, and return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, SET_INTERFACE, struct.pack("16sH22x", name.encode(), TUN | NO_PI | VNET_HDR))
    fcntl.ioctl(descriptor, SET_OFFLOAD, CHECKSUM_AND_SEGMENTS)
    return descriptor


if __name__ == "__main__":
    relay(float(sys.argv[1]), float(sys.argv[2]))
