"""One connection pool to a Redis or Valkey server: bounded calls, retries across restarts, and what the
server promises."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import hiredis
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from protocol.errors import Reason, Refused, SettingsError, Unavailable
from services.ledger.redis.scripts import Script
from services.ledger.redis.server_fence import ServerFence
from services.ledger.redis.url import redacted, refused_url

T = TypeVar("T")
_AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    TryAgainError,
    TimeoutError,
    OSError,
)
"""Errors that a server which restarts or fails over gives for a while."""
_AWAY_PREFIXES = ("MISCONF", "MASTERDOWN", "CLUSTERDOWN", "OOM", "BUSY")
_DENIED = (AuthenticationError, AuthorizationError, NoPermissionError)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_POOL = 16


class _Packed(aioredis.Connection):
    """redis-py's asyncio client packs commands in Python; a script with 24 keys is packed 8 times faster in
    C."""

    def pack_command(self, *args: Any) -> list[bytes]:
        return [hiredis.pack_command(args)] if args[0] in ("EVALSHA", "EVAL") else super().pack_command(*args)


class Connection:
    """Calls to one server. Every call ends within `timeout_s`, or is repeated for `retry_s` while the server
    is away."""

    def __init__(self, url: str, *, timeout_s: float, retry_s: float) -> None:
        """Raises SettingsError if `url` is not one that redis-py understands; connects to nothing yet."""
        self.name = redacted(url)
        self.timeout_s = timeout_s
        self.retry_s = retry_s
        self._guard = ServerFence()
        self._run_seen = False
        try:
            pool = aioredis.BlockingConnectionPool.from_url(
                url,
                connection_class=_Packed,  # rediss:// and unix:// bring their own
                max_connections=_POOL,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                redis_connect_func=self._guard.on_connect,
            )
            pool.make_connection()  # which finds options that there are not
        except (ValueError, TypeError):
            raise refused_url(url) from None
        self._redis = aioredis.Redis(connection_pool=pool)

    async def run(
        self, script: Script, keys: Sequence[str], arguments: Sequence[str | int | float | bytes]
    ) -> list[Any]:
        """Run a script and return what follows its "ok". Cancelled, it may or may not have taken effect.

        Raises:
            Refused: if the script refuses.
            Unavailable: if the server was away for longer than `retry_s`.
        """

        async def call() -> Any:
            try:
                answer = await self._redis.evalsha(script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                answer = await self._redis.eval(script.body, len(keys), *keys, *arguments)  # type: ignore[arg-type]
            if (
                answer[0] == b"refused"
                and answer[1] == Reason.NO_RUN.value.encode()
                and self._guard.run_key
                and self._run_seen
            ):
                raise RedisConnectionError(
                    "it does not hold the run: was it prepared? The ingest brings a lost one back"
                )
            return answer

        answer = await self.patiently(call, self.retry_s)
        if answer[0] == b"refused":
            raise Refused(Reason(answer[1].decode()), answer[2].decode())
        self._run_seen = True
        return list(answer[1:])

    async def command(self, *words: str | int | bytes) -> Any:
        """Run one plain command, with the same limits as a script."""
        return await self.patiently(lambda: self._redis.execute_command(*words), self.retry_s)  # type: ignore[no-untyped-call]

    async def guard(self, run_key: str) -> None:
        """From now on use no server that the run (its hash is `run_key`) was not looked at on, and wait for a
        run that vanishes."""
        self._guard.run_key = run_key
        await self._redis.connection_pool.disconnect(inuse_connections=False)

    async def server(self) -> str:
        """Which process answers now; another one after a restart or a failover."""
        info = await self.patiently(lambda: self._redis.info("server"), self.retry_s)
        return str(info.get("run_id", ""))

    async def patiently(self, call: Callable[[], Awaitable[T]], retry_s: float) -> T:
        """Await `call()`, again with growing pauses while the server is away, for `retry_s` in all."""
        began = time.monotonic()
        pause = _FIRST_PAUSE_S
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        while True:
            try:
                async with asyncio.timeout(self.timeout_s):
                    answer = await call()
                if (
                    task.cancelling() > cancels
                ):  # redis-py sends by wait_for, which in Python 3.11 may lose one
                    raise asyncio.CancelledError
                return answer
            except _DENIED as error:
                raise SettingsError(
                    f"ledger {self.name} refuses this user: {error}; check user, password and ACL"
                ) from error
            except _AWAY as error:
                cause: Exception = error
            except ResponseError as error:
                if not str(error).startswith(_AWAY_PREFIXES):
                    raise
                cause = error
            waited = time.monotonic() - began
            if waited + pause > retry_s:
                raise self._unavailable(cause, waited) from cause
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _unavailable(self, cause: Exception, waited: float) -> Unavailable:
        what = str(cause) or type(cause).__name__
        return Unavailable(
            f"ledger {self.name} did not answer for {waited:.1f} s ({what}); is the server running, and is the URL right?"
        )

    async def check(self) -> str:
        """Look at the server once and say how durable it is; empty if nothing acknowledged can be lost.

        Raises:
            Unavailable: if it does not answer within `timeout_s`.
            SettingsError: if it may evict keys.
        """
        info = await self.patiently(lambda: self._redis.info(), self.timeout_s)
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SettingsError(
                f"ledger {self.name} has maxmemory-policy {policy}: it would forget groups under memory pressure; "
                "set maxmemory-policy noeviction"
            )
        if not int(info.get("aof_enabled", 0)):
            return "the append-only file is off: a restart of the server loses the run; set appendonly yes and appendfsync always"
        try:
            setting = await self.patiently(lambda: self._redis.config_get("appendfsync"), self.timeout_s)
        except (SettingsError, RedisError):
            return "appendfsync cannot be read: a crash of the server may lose acknowledged writes unless it is always"
        fsync = setting.get("appendfsync", "unknown")
        return (
            ""
            if fsync == "always"
            else f"appendfsync is {fsync}: a crash of the server may lose acknowledged writes; set it to always"
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose()
        await self._redis.connection_pool.aclose()
