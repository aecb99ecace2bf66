"""Updates of engines whose parameters live in processes of their own: what all ranks say, turned into one
outcome.

The ranks' side is `share.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from protocol.weights.provisional import is_provisional
from rollout.engines.base import Served

POLL_S = (0.002, 0.1)
"""Shortest and longest wait between two looks at a staging."""
POLL_SHARE = 1 / 8
"""Of the time since it began: the end of a staging is noticed so much later at most."""

Call = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every rank's `Share` and returns their answers; EngineError where one does not answer."""


class AllRanksStaging:
    """Stages on all ranks, one version at a time."""

    def __init__(self, call: Call, ask: Call, *, stage_timeout_s: float, call_timeout_s: float) -> None:
        """`call` reaches all ranks between the same two steps; `ask` at any time, for what concerns the
        staging copy alone."""
        self._call = call
        self._call_anytime = ask
        self._stage_timeout_s = stage_timeout_s
        self._call_timeout_s = call_timeout_s
        self._busy = False
        self._staged: Served | None = None
        """What all ranks hold, if they have been left alone since."""

    async def stage(self, manifest: WeightManifest) -> None:
        """Returns when every rank holds the whole version, at once if it does. Cancelled or failed, it leaves
        nothing staged anywhere.

        Raises:
            WeightError: with a rank's own reason.
            PoisonedError: a rank will not stage any more.
        """
        if self._busy:
            raise WeightError(f"version {manifest.version}: another version is being staged")
        if self._staged == Served(manifest.epoch, manifest.version, manifest.digest):
            return
        self._busy, self._staged = True, None
        try:
            ranks = await self._call_anytime("stage", msgspec.msgpack.encode(manifest), self._stage_timeout_s)
            if not any(rank["error"] for rank in ranks):
                ranks = await self._settled(manifest)
            wanted = manifest
            if is_provisional(manifest) and ranks[0].get(
                "digest"
            ):  # what has come must be the same on all ranks, whatever it is
                wanted = replace(manifest, digest=ranks[0]["digest"])
            for number, rank in sorted(
                enumerate(ranks), key=lambda found: not found[1]["error"]
            ):  # who says why comes first
                check_rank(number, rank, wanted)
            self._staged = Served(wanted.epoch, wanted.version, wanted.digest)
        finally:
            try:
                if self._staged is None:
                    await self._discard()
            finally:
                self._busy = False

    async def commit(self, manifest: WeightManifest) -> list[Any]:
        """Make the staged version live on all ranks. Returns their answers.

        Raises:
            WeightError: no rank has applied it.
            PoisonedError: some have.
        """
        self._staged = None
        ranks = await self._call("commit", msgspec.msgpack.encode(manifest))
        applied = [rank["applied"] for rank in ranks]
        poisoned = any(rank["poisoned"] for rank in ranks)
        if not any(applied) and not poisoned:
            raise WeightError(next(rank["error"] for rank in ranks))
        if not all(applied) or poisoned:
            raise PoisonedError(
                f"version {manifest.version}: {next(rank['error'] for rank in ranks if rank['error'])}"
            )
        return ranks

    @property
    def is_staging(self) -> bool:
        """Whether a version is being staged."""
        return self._busy

    async def sleep(self, *arguments: Any) -> None:
        """Have all ranks give memory back. Raises EngineError: a rank has not, others may have."""
        self._staged = None
        self._check_all(await self._call("sleep", *arguments))

    async def wake(self) -> None:
        """Have all ranks take their memory again. Raises EngineError if one cannot."""
        self._check_all(await self._call("wake"))

    async def live_digest(self) -> int:
        """Digest of the live parameters; with one rank that of the manifest whose bytes they are."""
        ranks = await self._call("live_digest")
        if ranks[0][0]:
            return int(ranks[0][1])
        return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode([digest for _, digest in ranks]))

    @staticmethod
    def _check_all(ranks: list[Any]) -> None:
        for number, rank in enumerate(ranks):
            if rank["error"]:
                raise EngineError(f"rank {number}: {rank['error']}")

    async def _settled(self, manifest: WeightManifest) -> list[Any]:
        """Every rank's status when none is staging any more, or one has failed."""
        shortest_s, longest_s = POLL_S
        began = time.monotonic()
        limit_s = self._stage_timeout_s + self._call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    ranks = await self._call_anytime("status")
                    states = {rank["state"] for rank in ranks}
                    if "staging" not in states or "failed" in states:
                        return ranks
                    await asyncio.sleep(
                        min(max(shortest_s, POLL_SHARE * (time.monotonic() - began)), longest_s)
                    )
        except TimeoutError:
            raise WeightError(
                f"version {manifest.version}: not staged on all ranks within {limit_s:g} s"
            ) from None

    async def _discard(self) -> None:
        """Forget what is staged, on all ranks; a fetch that runs is told to end and waited for."""
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(self._call_timeout_s):
                ranks = await self._call_anytime("cancel")
                while any(rank["state"] in ("staging", "staged") for rank in ranks):
                    await asyncio.sleep(POLL_S[0])
                    ranks = await self._call_anytime("cancel")


def check_rank(rank: int, found: dict[str, Any], manifest: WeightManifest) -> None:
    """Compare what a rank says it has staged with the manifest.

    Raises:
        WeightError: with the rank's own reason, or what differs.
        PoisonedError: with its reason for which it will not stage any more.
    """
    if found["error"] or found["state"] != "staged":
        kind = PoisonedError if found.get("poisoned") else WeightError
        raise kind(found["error"] or f"rank {rank} is {found['state']}")
    covered = sum(entry.nbytes for entry in manifest.tensors)
    expected = {
        "epoch": manifest.epoch,
        "version": manifest.version,
        "digest": manifest.digest,
        "covered": covered,
    }
    for fact, value in expected.items():
        if found.get(fact) != value:
            raise WeightError(
                f"rank {rank} has staged {fact} {found.get(fact)}, version {manifest.version} has {value}"
            )
