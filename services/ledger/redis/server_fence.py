"""Which server process a connection talks to, and whether the run was looked at since that one started.

A server that restarts or fails over may have lost acknowledged writes. It is another process then, with
another `run_id`, and all connections to it are new ones. The run's keeper
(`services/ledger_recovery/reconcile.py`) compares what the server holds with what is on disk, and notes the
`run_id` in the run (field `server`). Until then a guarded connection is not used: nobody writes history on
top of a lost one.
"""

import re

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

SERVER_FIELD = "server"
_RUN_ID = re.compile(rb"run_id:(\w+)")


def run_id(info: bytes) -> str:
    """The server process that answered `INFO server`; empty if it does not say."""
    found = _RUN_ID.search(info)
    return found.group(1).decode() if found else ""


class ServerFence:
    """What a new connection does first."""

    def __init__(self) -> None:
        self.run_key = ""
        """Key of the hash `run`; empty while connections are not guarded."""

    async def on_connect(self, connection: AbstractConnection) -> None:
        """Log in, and refuse a server that the run is on but was not looked at.

        Raises:
            RedisConnectionError: the keeper has not looked at it yet.
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
        noted = await connection.read_response()
        if noted and server and noted.decode() != server:
            raise RedisConnectionError(
                "it was started again, and the ingest has not looked yet whether it lost writes: is the ingest running?"
            )
