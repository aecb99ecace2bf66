"""A trainer's side as a process: `python -m tests.trainer.weights.publisher TRANSPORT DEVICE`.

It publishes two versions, a manifest in hex on a line each, and stays until it is killed.
"""

import sys
from pathlib import Path

import msgspec

from tests.trainer.weights.engines import publish, version_tensors
from tests.trainer.weights.senders import sender_of
from trainer.config import WeightConfig


def main(transport: str, device: str) -> None:
    config = WeightConfig(transport=transport, bucket_mb=1, timeout_s=60)
    sender = sender_of(config, version_tensors(0), Path())
    for version in (1, 2):
        print(msgspec.msgpack.encode(publish(sender, version, device)).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
