"""Implements the ledger on Redis or Valkey: each transition is one atomic, idempotent Lua script."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import msgspec

from protocol.ids import checked_run_id, new_token
from protocol.staleness import Bound, Policy
from services.ledger.interface import (
    Head,
    Lease,
    LedgerStatus,
    Peer,
    RunSpec,
    Snapshot,
    StepRecord,
    TakenBatch,
    TakenGroup,
)
from services.ledger.limits import ARCHIVE_LIMIT, check_bound, check_spec
from services.ledger.redis.connection import SERVER_FIELD, Connection
from services.ledger.redis.json_codec import (
    decode,
    decode_endpoints,
    decode_peer,
    decode_status,
    encode_counts,
    encode_endpoints,
    encode_peer,
    encode_snapshot,
)
from services.ledger.redis.keys import Keys
from services.ledger.redis.scripts import script

_READ = 512  # steps or groups per command
REREAD_S = 10.0
"""Seconds after which endpoints are read again although the registry's change count is the same.

A server that lost the registry restarts its count at 0 and may reach the same count with other endpoints.
"""


class RedisLedger:
    """Ledger of one run on one server; `services/ledger/interface.py` documents the methods.

    Safe for concurrent use by the tasks of one event loop. A cancelled call may have taken effect; repeat it.
    """

    def __init__(
        self,
        connection: Connection,
        run: str,
        *,
        durability: str = "",
        archive_limit: int = ARCHIVE_LIMIT,
        tokens: Callable[[], str] = new_token,
    ) -> None:
        """Store a checked connection; use `connect` instead."""
        self.run = run
        """Name of the run."""
        self.durability = durability
        """Warning about guarantees that the server lacks; empty if no acknowledged write can be lost."""
        self.keys = Keys(run)
        self._connection = connection
        self._archive_limit = archive_limit
        self._tokens = tokens
        self._endpoints: tuple[bytes | None, dict[str, dict[str, str]]] = (None, {})
        """Change count of the registry, and topic -> incarnation -> endpoint at that count."""
        self._reread_at_s = 0.0
        """Time at which the endpoints are read again in any case, on the monotonic clock."""

    @classmethod
    async def connect(
        cls,
        url: str,
        run: str,
        *,
        timeout_s: float = 5.0,
        retry_s: float = 30.0,
        archive_limit: int = ARCHIVE_LIMIT,
        tokens: Callable[[], str] = new_token,
    ) -> Self:
        """Connect to the server at `url` and check that it can hold a ledger.

        Args:
            url: redis://, rediss:// (TLS) or unix://, with user and password if the server requires them.
            run: name of the run; the run may not exist yet.
            timeout_s: timeout of one call, and of the connection attempt.
            retry_s: seconds for which a call is retried while the server is away.
            archive_limit: maximum number of events that wait for the archive before leasing stops.
            tokens: generates lease tokens.

        Raises:
            Unavailable: the server does not answer within `timeout_s`.
            SettingsError: the URL or the run name is invalid, the user is denied, or the server may evict
                keys.
        """
        connection = Connection(url, timeout_s=timeout_s, retry_s=retry_s)
        try:
            durability = await connection.check()
            return cls(
                connection,
                checked_run_id(run),
                durability=durability,
                archive_limit=archive_limit,
                tokens=tokens,
            )
        except BaseException:
            await connection.close()
            raise

    async def _run(self, name: str, *arguments: str | int | float | bytes) -> list[Any]:
        return await self._connection.run(script(name), self.keys.all, arguments)

    async def create(self, spec: RunSpec) -> None:
        await self._run("create", *_spec_arguments(spec))

    async def rebuild(self, spec: RunSpec, snapshot: Snapshot) -> None:
        await self._run("rebuild", *_spec_arguments(spec), *encode_snapshot(snapshot))

    async def status(self) -> LedgerStatus:
        return decode_status((await self._run("status"))[0])

    async def head(self) -> Head:
        names = ("epoch", "version", "sequence", "published")
        fields = await self._connection.command("HMGET", self.keys.of("run"), *names)
        if fields[1] is None:
            await self.status()  # raises Refused, or waits for a lost run
            return await self.head()
        return Head(fields[0].decode(), *map(int, fields[1:]))

    # -- engines and processes

    async def register(self, peer: Peer, ttl_ms: int) -> None:
        await self._run("register", peer.incarnation, encode_peer(peer), ttl_ms, encode_endpoints(peer))

    async def unregister(self, incarnation: str, *, refuted: bool = False) -> None:
        await self._run("unregister", incarnation, int(refuted))

    async def peers(self, role: str | None = None) -> Sequence[Peer]:
        flat = await self._run("peers")
        peers = [decode_peer(name, data) for name, data in zip(flat[::2], flat[1::2], strict=True)]
        return [peer for peer in peers if role is None or peer.role == role]

    async def endpoints(self, topic: str) -> Mapping[str, str]:
        key = self.keys.of("endpoints")
        changes = await self._connection.command("HGET", key, "")
        if changes != self._endpoints[0] or time.monotonic() >= self._reread_at_s:
            self._reread_at_s = time.monotonic() + REREAD_S
            data = dict(await self._connection.command("HGETALL", key))
            self._endpoints = data.get(b""), decode_endpoints(data)
        return self._endpoints[1].get(topic, {})

    async def applied(self, engine: str, epoch: str, version: int) -> None:
        await self._run("applied", engine, epoch, version)

    # -- a group's life

    async def lease(
        self, *, request: str, engine: str, holder: str, lease_ms: int, groups: int = -1
    ) -> Lease:
        answer = await self._run(
            "lease", engine, holder, lease_ms, self._tokens(), self._archive_limit, request, groups
        )
        return decode(answer[0], Lease)

    async def extend(self, group: int, token: str, lease_ms: int) -> None:
        await self._run("extend", group, token, lease_ms)

    async def release(self, group: int, token: str, reason: str) -> None:
        await self._run("release", group, token, reason)

    async def accept(
        self, group: int, token: str, counts: Mapping[int, int], reward: float | None = None
    ) -> TakenGroup:
        tokens = msgspec.json.encode(encode_counts(counts))
        words = (group, token, tokens, "" if reward is None else reward)
        return decode((await self._run("accept", *words))[0], TakenGroup)

    async def lost(self, group: int, token: str) -> None:
        await self._run("lost", group, token)

    async def drop(self, group: int, token: str, reason: str, wasted: int = 0, detail: str = "") -> None:
        await self._run("drop", group, token, reason, wasted, detail)

    async def filter(self, group: int, token: str, tokens: int, reward: float, max_batches: int) -> None:
        await self._run("filter", group, token, tokens, reward, max_batches)

    # -- the trainer

    async def claim(self, epoch: str) -> LedgerStatus:
        return decode_status((await self._run("claim", epoch))[0])

    async def resume(self, epoch: str, version: int, digest: int) -> bool:
        return bool((await self._run("resume", epoch, version, str(digest)))[0])

    async def take(self, epoch: str) -> TakenBatch:
        return decode((await self._run("take", epoch))[0], TakenBatch)

    async def commit(
        self,
        epoch: str,
        step: int,
        trained: Mapping[int, Mapping[int, int]],
        *,
        digest: int,
        report: bytes,
        manifest: bytes,
    ) -> int:
        groups = msgspec.json.encode({str(group): encode_counts(counts) for group, counts in trained.items()})
        return int((await self._run("commit", epoch, step, groups, str(digest), report, manifest))[0])

    async def publish(self, epoch: str, manifest: bytes, version: int) -> None:
        await self._run("publish", epoch, version, manifest)

    async def halt(self, epoch: str, cause: str) -> None:
        await self._run("halt", epoch, cause)

    async def manifest(self) -> bytes | None:
        answer: bytes | None = await self._connection.command("GET", self.keys.of("manifest"))
        return answer

    async def step_records(self, first: int) -> Sequence[StepRecord]:
        return [decode(data, StepRecord) for data in await self._steps("steps", first)]

    async def reports(self, first: int) -> Sequence[bytes]:
        return await self._steps("reports", first)

    async def _steps(self, name: str, first: int) -> list[bytes]:
        """Return the values of a hash keyed by step, from `first` up to the committed version."""
        version = int(await self._connection.command("HGET", self.keys.of("run"), "version") or 0)
        values: list[bytes] = []
        for start in range(max(first, 0), version, _READ):
            steps = [str(step) for step in range(start, min(start + _READ, version))]
            values += await self._connection.command("HMGET", self.keys.of(name), *steps)
        return [data for data in values if data is not None]

    async def checkpointed(self, version: int) -> None:
        while (await self._run("checkpointed", version))[0]:
            pass

    async def ended(self, groups: Collection[int]) -> set[int]:
        requested, found = sorted(groups), set()
        for start in range(0, len(requested), _READ):
            found |= {int(group) for group in await self._run("ended", *requested[start : start + _READ])}
        return found

    # -- settings

    async def set_bound(
        self,
        *,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
        policy: Policy | None = None,
    ) -> Bound | None:
        check_bound(max_staleness, groups_per_step)
        numbers = ("" if n is None else n for n in (max_staleness, groups_per_step))
        answer = await self._run("set_bound", *numbers, "" if policy is None else policy.value)
        return None if answer[0] else Bound(answer[1], answer[2], Policy(answer[3].decode()))

    async def drain(self, on: bool = True) -> None:
        await self._run("drain", int(on))

    # -- the event log

    async def events(self, after: int, limit: int) -> Sequence[Mapping[str, Any]]:
        entries = await self._connection.command(
            "XRANGE", self.keys.of("events"), f"{after + 1}-0", "+", "COUNT", limit
        )
        return [decode(_event(fields), dict[str, Any]) for _, fields in entries]

    async def archived(self, sequence: int) -> None:
        await self._run("archived", sequence)

    # -- the server

    async def wall_ms(self) -> int:
        """Return the server's wall clock in ms. Events carry this time, which may jump."""
        seconds, micros = await self._connection.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def guard(self) -> None:
        """Use only server processes on which the run is reconciled from now on.

        Until then calls are retried as if the server were away.
        """
        await self._connection.guard(self.keys.of("run"))

    async def reconciled_server(self) -> tuple[str, str]:
        """Return the ids of the current server process and of the last one on which the run was reconciled.

        The second id is empty if the run was never reconciled.
        """
        reconciled = await self._connection.command("HGET", self.keys.of("run"), SERVER_FIELD)
        return await self._connection.server(), reconciled.decode() if reconciled else ""

    async def set_reconciled_server(self, server: str) -> None:
        """Record that the run is complete on this server process, which guarded connections may then use."""
        await self._connection.command("HSET", self.keys.of("run"), SERVER_FIELD, server)

    async def check_durability(self) -> str:
        """Check the server again; return the guarantees that it lacks, as in `durability`."""
        return await self._connection.check()

    async def close(self) -> None:
        await self._connection.close()


def _spec_arguments(spec: RunSpec) -> tuple[str | int | float, ...]:
    check_spec(spec)
    prompts, bound = -1 if spec.prompts is None else spec.prompts, spec.bound
    limits = (spec.max_attempts, spec.drop_share, spec.drop_window)
    return (
        spec.fingerprint,
        prompts,
        spec.steps,
        bound.max_staleness,
        bound.groups_per_step,
        bound.policy.value,
        *limits,
    )


def _event(fields: Any) -> bytes:
    """Return the value of a stream entry's only field, in both formats of redis-py."""
    value: bytes = next(iter(fields.values())) if isinstance(fields, dict) else fields[1]
    return value
