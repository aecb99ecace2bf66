"""Runs under `engine.python`, and executes the engine's calls to a `JaxModel` sequentially."""

import os
import queue
import sys
from pathlib import Path

from rollout.engines.multi_process.parent_watch import exit_with_parent
from rollout.engines.multi_process.rank_rpc import RankCall, RankRpcServer, socket_path

METHODS = ("load", "share", "prefill", "decode", "move", "replace", "release", "restore", "digests")


def main(directory: Path, descriptor: int) -> None:
    """Serve until the engine's process ends.

    Args:
        directory: directory of the socket.
        descriptor: file shared by model and engine.
    """
    exit_with_parent(lambda _: os._exit(1))
    calls: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
    server = RankRpcServer(socket_path(directory, 0), calls.put)
    model = None
    while True:
        call = calls.get()
        if call.method not in METHODS:
            raise ValueError(f"no method {call.method}")

        def run(*arguments: object, method: str = call.method) -> object:
            nonlocal model
            if model is None:
                # import errors are reported in the answer to the first call
                from rollout.engines.sglang_jax.jax_model import JaxModel

                model = JaxModel(descriptor)
            return getattr(model, method)(*arguments)

        server.carry_out(call, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
