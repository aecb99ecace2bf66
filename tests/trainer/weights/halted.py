"""One end of a pair, stopped while the group is created: `python -m tests.trainer.weights.halted SIDE`.

sender              listens, prints its port, answers one request as if it made a group, and stops itself
receiver HEX COUNT  requests the version on COUNT connections, says that it joins, prints a line, stops itself
"""

import os
import signal
import socket
import sys

import msgspec

from protocol.device.pair_group import BACKENDS
from protocol.messages import WeightManifest
from protocol.weights.slices import all_of, encode_wanted
from rollout.weights.sender_connection import SenderConnection, parse_location
from rollout.weights.verification import Deadline

TIMEOUT_S = 60.0


def send() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.makefile("rb").readline()
            connection.sendall(b'{"join": true, "sizes": [1000, 1000]}\n')
            os.kill(os.getpid(), signal.SIGSTOP)


def receive(manifest: WeightManifest, count: int) -> None:
    host, port, _ = parse_location(manifest.location, BACKENDS)
    kept = []
    for _ in range(count):
        deadline = Deadline(manifest, TIMEOUT_S)
        line = SenderConnection(host, port, deadline)
        assert line.request(manifest, deadline, encode_wanted(all_of(manifest)))["join"]
        line.send({"joining": True}, deadline.remaining)
        kept.append(line)
    print("there", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        send()
    else:
        receive(msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=WeightManifest), int(sys.argv[3]))
