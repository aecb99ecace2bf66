"""One end of a pair, stopped while the group is created: `python -m tests.trainer.weights.halted SIDE`.

sender              listens, prints its port, answers one request with the port of a store, and stops itself
receiver HEX COUNT  requests the version on COUNT connections, joins each store, prints a line, stops itself
"""

import json
import os
import signal
import socket
import sys
from datetime import timedelta

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from protocol.messages import WeightManifest
from rollout.weights.nccl import parse_location
from rollout.weights.sender_connection import SenderConnection
from rollout.weights.verification import Deadline

TIMEOUT = timedelta(seconds=60)


def send() -> None:
    store = TCPStore("127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.makefile().readline()
            connection.sendall(json.dumps({"store_port": store.port}).encode() + b"\n")
            os.kill(os.getpid(), signal.SIGSTOP)


def receive(manifest: WeightManifest, count: int) -> None:
    host, port, _ = parse_location(manifest.location)
    kept = []
    for _ in range(count):
        deadline = Deadline(manifest, TIMEOUT.total_seconds())
        line = SenderConnection(host, port, deadline)
        answer = line.request(manifest, deadline)
        store = TCPStore(host, int(answer["store_port"]), 2, False, TIMEOUT)
        store.set("receiver", "here")
        kept.append((line, store))
    print("there", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    if sys.argv[1] == "sender":
        send()
    else:
        receive(msgspec.msgpack.decode(bytes.fromhex(sys.argv[2]), type=WeightManifest), int(sys.argv[3]))
