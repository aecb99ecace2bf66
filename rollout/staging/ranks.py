"""Stages and commits on all ranks of an engine, and combines their answers into one outcome.

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
"""Shortest and longest interval between two polls of a staging, seconds."""
POLL_SHARE = 1 / 8
"""Interval between two polls as a share of the time since the staging began, within `POLL_S`."""
UNFINISHED = (RankState.STAGING, RankState.STAGED)
"""States after which a cancelled rank may still hold a version."""

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every rank's `RankStaging` and returns their answers as plain values. EngineError if one
is missing."""


class AllRanksStaging:
    """Staging copies of all ranks, with one version at a time."""

    def __init__(
        self, call: Call, call_anytime: Call, *, stage_timeout_s: float, call_timeout_s: float
    ) -> None:
        """Use these calls.

        Args:
            call: reaches all ranks between the same two steps.
            call_anytime: reaches all ranks at any time, for what concerns the staging copy alone.
            stage_timeout_s: limit of a rank for a fetch.
            call_timeout_s: limit for the answers to a call.
        """
        self._call = call
        self._call_anytime = call_anytime
        self._stage_timeout_s = stage_timeout_s
        self._call_timeout_s = call_timeout_s
        self._busy = False
        self._staged: Served | None = None
        """Version that all ranks hold, unless a call has changed that since."""

    async def divide(self, unplaced: Sequence[Sequence[str]]) -> None:
        """Tell each rank which tensors other ranks have a place for, once all have traced their loaders.

        Args:
            unplaced: for each rank, the tensors that it has no place for.
        """
        nowhere = set(unplaced[0]).intersection(*unplaced[1:])
        if any(len(names) > len(nowhere) for names in unplaced):
            await self._call("divide", sorted(nowhere))

    async def stage(self, manifest: WeightManifest) -> None:
        """Stage a version on all ranks, unless they hold exactly that version.

        If it fails or is cancelled, no version is staged on any rank.

        Raises:
            WeightError: with the reason of a rank; as in `check_rank`.
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
            # ranks with an error first: it is the reason of the others' state
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
        """Copy the staged version over the live weights of all ranks; return their answers.

        Raises:
            WeightError: no rank has applied it.
            PoisonedError: some ranks have applied it, or one may have applied a part.
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
        """The version that all ranks hold; None if there is none."""
        return self._staged

    @property
    def is_staging(self) -> bool:
        """Whether a version is being staged."""
        return self._busy

    async def sleep(self, *arguments: Any) -> None:
        """Have all ranks release their memory.

        Raises:
            EngineError: a rank has not; others may have.
        """
        self._staged = None
        self._check_all(await self._call("sleep", *arguments))

    async def wake(self) -> None:
        """Have all ranks take their memory again; EngineError if one cannot."""
        self._check_all(await self._call("wake"))

    async def live_digest(self) -> int:
        """Return the digest of the live parameters; with one rank the manifest's digest of their bytes."""
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
        """Poll until no rank is staging any more or one has failed; return the status of all."""
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
        """Discard the staged versions of all ranks, after ending fetches that still run."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._call_timeout_s):
                ranks = await self._statuses("cancel")
                while any(rank.state in UNFINISHED for rank in ranks):
                    await asyncio.sleep(POLL_S[0])
                    ranks = await self._statuses("cancel")


def check_rank(rank: int, status: RankStatus, manifest: WeightManifest) -> None:
    """Compare a rank's status with the manifest that it was to stage.

    Args:
        rank: number of the rank.
        status: its status, once it does not stage any more.
        manifest: the version.

    Raises:
        WeightError: with the rank's reason, or with what differs.
        UnfitVersion: with the rank's reason, if the version does not fit the engine.
        PoisonedError: with the rank's reason, if it cannot stage any more.
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
