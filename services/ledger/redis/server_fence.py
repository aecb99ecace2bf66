"""Fences connections from a server process on which the run was not reconciled since it started.

A server that restarts or fails over may have lost acknowledged writes. It is another process then, with
another `run_id`, and all connections to it are new. `services/ledger_recovery/reconcile.py` compares the
server's contents with the files on disk, and writes the `run_id` to the run (field `server`). Until then a
guarded connection is not used, so that no new events follow a gap.
"""

import re

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

SERVER_FIELD = "server"
"""Field of the hash `run`: the `run_id` of the server process on which the run was reconciled last."""
_RUN_ID = re.compile(rb"run_id:(\w+)")


def run_id(info: bytes) -> str:
    """Return the id of the server process from an answer of `INFO server`; empty if it has none."""
    found = _RUN_ID.search(info)
    return found.group(1).decode() if found else ""


class ServerFence:
    """Check that every new connection of a pool passes before it is used."""

    def __init__(self) -> None:
        self.run_key = ""
        """Key of the hash `run`; empty while connections are not guarded."""

    async def on_connect(self, connection: AbstractConnection) -> None:
        """Log in, and reject a server process on which the run is not reconciled yet.

        Raises:
            RedisConnectionError: if it is not.
        """
        try:
            await connection.on_connect()
            if self.run_key:
                await self._check(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    async def _check(self, connection: AbstractConnection) -> None:
        await connection.send_command("INFO", "server")
        server = run_id(await connection.read_response())
        await connection.send_command("HGET", self.run_key, SERVER_FIELD)
        reconciled = await connection.read_response()
        if reconciled and server and reconciled.decode() != server:
            raise RedisConnectionError(
                "it was restarted, and the ingest has not checked yet whether it lost writes: "
                "is the ingest running?"
            )
