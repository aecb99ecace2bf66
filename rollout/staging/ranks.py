"""Stages and commits on all ranks of an engine, and combines their replies into one result.

The ranks' side is `rank.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from protocol.errors import EngineError, PoisonedError, UnfitVersion, WeightError
from protocol.messages import WeightManifest
from protocol.weights.provisional import is_provisional
from rollout.engines.base import Served
from rollout.staging.rank_status import RankCommit, RankState, RankStatus

POLL_S = (0.002, 0.1)
"""Minimum and maximum polling interval during staging, seconds."""
POLL_SHARE = 1 / 8
"""Polling interval as a fraction of the time since staging began, within `POLL_S`."""
UNFINISHED = (RankState.STAGING, RankState.STAGED)
"""States after which a cancelled rank may still hold a version."""

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every rank's `RankStaging` and returns the results as plain values. Raises EngineError if
a reply is missing."""


class AllRanksStaging:
    """Staging copies of all ranks, for one version at a time."""

    def __init__(
        self, call: Call, call_anytime: Call, *, stage_timeout_s: float, call_timeout_s: float
    ) -> None:
        """Store the call functions.

        Args:
            call: calls all ranks between the same two steps.
            call_anytime: calls all ranks at any time, for operations on the staging copy only.
            stage_timeout_s: timeout of a fetch on each rank, seconds.
            call_timeout_s: timeout of the replies to a call, seconds.
        """
        self._call = call
        self._call_anytime = call_anytime
        self._stage_timeout_s = stage_timeout_s
        self._call_timeout_s = call_timeout_s
        self._busy = False
        self._staged: Served | None = None
        """Version held by all ranks, unless a later call has changed it."""

    async def divide(self, unplaced: Sequence[Sequence[str]]) -> None:
        """Send each rank the tensors that belong to no rank, after all ranks have traced their loaders.

        Args:
            unplaced: for each rank, the tensors without a shard on it.
        """
        unowned = set(unplaced[0]).intersection(*unplaced[1:])
        if any(len(names) > len(unowned) for names in unplaced):
            await self._call("divide", sorted(unowned))

    async def stage(self, manifest: WeightManifest) -> None:
        """Stage a version on all ranks, unless they all hold exactly this version.

        After a failure or cancellation, no rank has a staged version.

        Raises:
            WeightError: a rank failed, see `check_rank`; the message contains its reason.
            PoisonedError: a rank cannot stage any more.
        """
        if self._busy:
            raise WeightError(f"version {manifest.version}: another version is being staged")
        if self._staged == Served(manifest.epoch, manifest.version, manifest.digest):
            return
        self._busy, self._staged = True, None
        try:
            refusals = await self._call_anytime(
                "stage", msgspec.msgpack.encode(manifest), self._stage_timeout_s
            )
            if any(refusals):
                raise WeightError(next(filter(None, refusals)))
            ranks = await self._final_status(manifest)
            target = manifest
            # all ranks must have received the same bytes
            if is_provisional(manifest) and (staged := ranks[0].staged) is not None:
                target = replace(manifest, digest=staged.digest)
            # ranks with an error first: their error explains the state of the others
            for number, rank in sorted(enumerate(ranks), key=lambda numbered: not numbered[1].error):
                check_rank(number, rank, target)
            self._staged = Served(target.epoch, target.version, target.digest)
        finally:
            try:
                if self._staged is None:
                    await self._discard()
            finally:
                self._busy = False

    async def commit(self, manifest: WeightManifest) -> list[RankCommit]:
        """Copy the staged version over the live weights of all ranks; return the ranks' results.

        Raises:
            WeightError: no rank has applied the version.
            PoisonedError: only some ranks have applied the version, or a rank may have applied a part.
        """
        self._staged = None
        answers = await self._call("commit", msgspec.msgpack.encode(manifest))
        ranks = msgspec.convert(answers, list[RankCommit])
        applied = [rank.applied for rank in ranks]
        poisoned = any(rank.poisoned for rank in ranks)
        if not any(applied) and not poisoned:
            raise WeightError(next(rank.error for rank in ranks))
        if not all(applied) or poisoned:
            raise PoisonedError(
                f"version {manifest.version}: {next(rank.error for rank in ranks if rank.error)}"
            )
        return ranks

    @property
    def staged(self) -> Served | None:
        """Version held by all ranks; None if there is none."""
        return self._staged

    @property
    def is_staging(self) -> bool:
        """Whether a version is being staged."""
        return self._busy

    async def sleep(self, *arguments: Any) -> None:
        """Let all ranks release their memory.

        Raises:
            EngineError: a rank failed; other ranks may have released theirs.
        """
        self._staged = None
        self._check_all(await self._call("sleep", *arguments))

    async def wake(self) -> None:
        """Let all ranks reallocate their memory. Raises EngineError if a rank cannot."""
        self._check_all(await self._call("wake"))

    async def live_digest(self) -> int:
        """Return the digest of the live parameters; with one rank, the digest of their manifest."""
        ranks = await self._call("live_digest")
        if ranks[0][0]:
            return int(ranks[0][1])
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([digest for _, digest in ranks]))

    @staticmethod
    def _check_all(refusals: list[str]) -> None:
        for number, refusal in enumerate(refusals):
            if refusal:
                raise EngineError(f"rank {number}: {refusal}")

    async def _statuses(self, method: str) -> list[RankStatus]:
        return msgspec.convert(await self._call_anytime(method), list[RankStatus])

    async def _final_status(self, manifest: WeightManifest) -> list[RankStatus]:
        """Poll until no rank is staging or a rank has failed; return the status of all ranks."""
        shortest_s, longest_s = POLL_S
        began = time.monotonic()
        limit_s = self._stage_timeout_s + self._call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    ranks = await self._statuses("status")
                    states = {rank.state for rank in ranks}
                    if RankState.STAGING not in states or RankState.FAILED in states:
                        return ranks
                    await asyncio.sleep(
                        min(max(shortest_s, POLL_SHARE * (time.monotonic() - began)), longest_s)
                    )
        except TimeoutError:
            raise WeightError(
                f"version {manifest.version}: not staged on all ranks within {limit_s:g} s"
            ) from None

    async def _discard(self) -> None:
        """End running fetches, and discard the staged versions of all ranks."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._call_timeout_s):
                ranks = await self._statuses("cancel")
                while any(rank.state in UNFINISHED for rank in ranks):
                    await asyncio.sleep(POLL_S[0])
                    ranks = await self._statuses("cancel")


def check_rank(rank: int, status: RankStatus, manifest: WeightManifest) -> None:
    """Check a rank's status against the manifest that it staged.

    Args:
        status: status after staging has ended.

    Raises:
        WeightError: the rank failed, or staged something else; the message contains the reason.
        UnfitVersion: the version does not fit the engine.
        PoisonedError: the rank cannot stage any more.
    """
    staged = status.staged
    if status.error or staged is None:
        kind = PoisonedError if status.poisoned else UnfitVersion if status.unfit else WeightError
        raise kind(status.error or f"rank {rank} is {status.state}")
    for key, value, expected in (
        ("epoch", staged.epoch, manifest.epoch),
        ("version", staged.version, manifest.version),
        ("digest", staged.digest, manifest.digest),
        ("covered", status.covered, sum(entry.nbytes for entry in manifest.tensors)),
    ):
        if value != expected:
            raise WeightError(
                f"rank {rank} has staged {key} {value}, version {manifest.version} has {expected}"
            )
