"""A trainer's side as a process: publishes two versions by ipc, a manifest in hex on a line each, and stays until it is killed."""

import sys

import msgspec

from tests.trainer.weights.engines import publish
from trainer.config import WeightConfig
from trainer.weights.ipc import IpcSender


def main() -> None:
    sender = IpcSender(WeightConfig(transport="ipc", bucket_mb=1, timeout_s=60))
    for version in (1, 2):
        print(msgspec.msgpack.encode(publish(sender, version, "cuda")).hex(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
