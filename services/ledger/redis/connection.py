"""Calls a Redis or Valkey server with timeouts and retries, and checks the server's durability."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import Reason, Refused, SettingsError, Unavailable
from services.ledger.redis.batches import Batches, Word
from services.ledger.redis.scripts import Script
from services.ledger.redis.url import has_database, redacted, refused_url

SERVER_FIELD = "server"
"""Field of the hash `run`: `run_id` of the server process on which the run was last reconciled."""
_RUN_ID = re.compile(rb"run_id:(\w+)")


def run_id(info: bytes) -> str:
    """Return the id of the server process in an answer to `INFO server`; empty without one."""
    found = _RUN_ID.search(info)
    return found.group(1).decode() if found else ""


class ServerFence:
    """Check that each new connection of a pool must pass before use."""

    def __init__(self) -> None:
        self.run_key = ""
        """Key of the hash `run`; empty while connections are not guarded."""

    async def on_connect(self, connection: AbstractConnection) -> None:
        """Log in; reject a server process on which the run is not reconciled yet.

        Raises:
            RedisConnectionError: the run is not reconciled on this server process.
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


T = TypeVar("T")
_TEMPORARY_ERRORS = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    ClusterDownError,
    OutOfMemoryError,
    TryAgainError,
    OSError,
)
"""Temporary errors of a server that restarts, fails over or is full."""
_TEMPORARY_PREFIXES = ("MISCONF", "BUSY")
"""Prefixes of other temporary error replies, for codes that redis-py does not parse."""
_SETTINGS_FAULTS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...] = (
    (
        (AuthenticationError, AuthorizationError, NoPermissionError),
        "",
        "it refuses this user; check user, password and ACL",
    ),
    (InvalidResponse, "", "the server is not Redis or Valkey"),
    (MovedError, "", "it is one of a cluster's servers; use a server outside a cluster"),
    (
        ResponseError,
        "WRONGTYPE",
        "another program's data has a key of this run; give another database or run.name",
    ),
    (ResponseError, "DB index is out of range", "it has no database of that number"),
    (ResponseError, "unknown command", "the server is not a Redis or Valkey with scripts"),
)
"""Error type and substring of its text -> the wrong setting; retries would not help."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0
_MAX_BATCHES = 2
"""Maximum number of batches in flight: one is executed while the answers to the other are read."""
_MAX_CONNECTIONS = _MAX_BATCHES + 2
"""Maximum number of connections: one per lane, the others for queries about the server."""


def _settings_fault(error: Exception) -> str:
    """Return the settings problem behind an error; empty if there is none."""
    return next(
        (fault for kind, part, fault in _SETTINGS_FAULTS if isinstance(error, kind) and part in str(error)),
        "",
    )


def _is_temporary(error: Exception) -> bool:
    """Return whether an error may be temporary."""
    return isinstance(error, _TEMPORARY_ERRORS) or (
        isinstance(error, ResponseError) and str(error).startswith(_TEMPORARY_PREFIXES)
    )


class _PackingConnection(aioredis.Connection):
    """Connection that packs batches in C: 8 times faster for 24 keys than redis-py in Python."""

    def pack_commands(self, commands: Iterable[Iterable[Any]]) -> list[bytes]:
        return [b"".join(hiredis.pack_command(tuple(words)) for words in commands)]


class Connection:
    """Connection pool to one server.

    Every call ends within `timeout_s`, or is retried for `retry_s` while the server is away.
    """

    def __init__(self, url: str, *, timeout_s: float, retry_s: float) -> None:
        """Create an empty pool. Raises SettingsError if redis-py cannot use `url`."""
        self.name = redacted(url)
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._fence = ServerFence()
        self._has_seen_run = False
        if not has_database(url):
            raise refused_url(url)
        try:
            pool = aioredis.BlockingConnectionPool.from_url(
                url,
                connection_class=_PackingConnection,  # rediss:// and unix:// use their own classes
                max_connections=_MAX_CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                redis_connect_func=self._fence.on_connect,
            )
            pool.make_connection()  # raises for unknown options
        except (ValueError, TypeError):
            raise refused_url(url) from None
        self._redis = aioredis.Redis(connection_pool=pool)
        self._batches = Batches(self._send, lanes=_MAX_BATCHES)

    async def run(
        self, script: Script, keys: Sequence[str], arguments: Sequence[str | int | float | bytes]
    ) -> list[Any]:
        """Run a script and return its values after "ok". If cancelled, the script may have taken effect.

        Raises:
            Refused: the script refuses.
            Unavailable: the server was away for longer than `retry_s`.
        """

        async def call() -> Any:
            try:
                answer = await self._batches("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                answer = await self._batches("EVAL", script.body, len(keys), *keys, *arguments)
            if (
                answer[0] == b"refused"
                and answer[1] == Reason.NO_RUN.value.encode()
                and self._fence.run_key
                and self._has_seen_run
            ):
                raise RedisConnectionError(
                    "it does not hold the run any more; the ingest rebuilds it: is the ingest running?"
                )
            return answer

        answer = await self._retry(call, self.retry_s)
        if answer[0] == b"refused":
            raise Refused(Reason(answer[1].decode()), answer[2].decode())
        self._has_seen_run = True
        return list(answer[1:])

    async def command(self, *words: str | int | bytes) -> Any:
        """Run one plain command, with the same timeout and retries as a script."""
        return await self._retry(lambda: self._batches(*words), self.retry_s)

    async def _send(self, commands: Sequence[tuple[Word, ...]]) -> Sequence[Any]:
        """Return the answers to a batch; the error of a command is its answer."""
        pipeline = self._redis.pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)  # type: ignore[no-untyped-call]
        return await pipeline.execute(raise_on_error=False)

    async def guard(self, run_key: str) -> None:
        """Use only server processes on which the run is reconciled from now on, and wait for a lost run.

        `run_key` is the key of the run's hash `run`.
        """
        self._fence.run_key = run_key
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def server(self) -> str:
        """Return the id of the server process; it changes with a restart or failover."""
        info = await self._retry(lambda: self._redis.info("server"), self.retry_s)
        return str(info.get("run_id", ""))

    async def _retry(self, call: Callable[[], Awaitable[T]], retry_s: float) -> T:
        """Await `call()`; retry with increasing pauses for `retry_s` while the server is away."""
        began = time.monotonic()
        pause = _FIRST_PAUSE_S
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await call()
                if task.cancelling() > cancels:  # redis-py's wait_for may lose a cancellation in Python 3.11
                    raise asyncio.CancelledError
                return answer
            except (RedisError, OSError) as error:  # TimeoutError is an OSError
                if fault := _settings_fault(error):
                    raise SettingsError(f"ledger {self.name}: {fault} ({error})") from error
                if not _is_temporary(error):
                    raise
                cause = error
            waited = time.monotonic() - began
            if waited + pause > retry_s:
                raise self._unavailable(cause, waited) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _unavailable(self, cause: Exception, waited: float) -> Unavailable:
        detail = str(cause) or type(cause).__name__
        if isinstance(cause, ResponseError):
            return Unavailable(f"ledger {self.name} refused calls for {waited:.1f} s: {detail}")
        return Unavailable(
            f"ledger {self.name} did not answer for {waited:.1f} s ({detail}); "
            "is the server running, and is the URL right?"
        )

    async def check(self) -> str:
        """Check the server's settings.

        Returns:
            A sentence about missing durability; empty if no acknowledged write can be lost.

        Raises:
            Unavailable: the server does not answer within `timeout_s`.
            SettingsError: the server may evict keys.
        """
        info = await self._retry(lambda: self._redis.info(), self.timeout_s)
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SettingsError(
                f"ledger {self.name} has maxmemory-policy {policy}: "
                "it would evict groups under memory pressure; set maxmemory-policy noeviction"
            )
        if not int(info.get("aof_enabled", 0)):
            return (
                "the append-only file is off: a restart of the server loses the run; "
                "set appendonly yes and appendfsync always"
            )
        loss = "a crash of the server may lose acknowledged writes"
        try:
            setting = await self._retry(lambda: self._redis.config_get("appendfsync"), self.timeout_s)
        except (SettingsError, RedisError):
            return f"appendfsync cannot be read: {loss} unless it is always"
        fsync = setting.get("appendfsync", "unknown")
        return "" if fsync == "always" else f"appendfsync is {fsync}: {loss}; set it to always"

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        await self._redis.connection_pool.aclose()
