"""How a rollout worker keeps its engine on the current weights.

Manifests arrive over the bus; the ledger's copy is the truth and is asked now and then, so a lost message
costs a second, not an update. One update at a time; a newer manifest supersedes an older one that was not
staged yet. A version that the trainer is still making is staged as it comes, and committed if it is what its
manifest says later. An engine that cannot stage goes on serving what it serves. A poisoned engine ends the
process: its supervisor starts a fresh one, which asks for the current version.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from protocol.codec import decode_payload
from protocol.errors import PoisonedError, ProtocolError, Reason, Refused, TetherError, WeightError
from protocol.messages import (
    Action,
    Control,
    WeightApplied,
    WeightDraft,
    WeightFailed,
    WeightManifest,
    WeightStaged,
)
from protocol.weights.provisional import is_provisional, provisional_manifest
from rollout.engines.base import Engine
from services.bus.broadcast import Listener
from services.runtime.process import Process

log = logging.getLogger("tether.updating")

POLL_S = 1.0
RETRY_S = 0.5


class WeightUpdater:
    """Listens for manifests, stages them, commits them, and says so."""

    def __init__(
        self,
        process: Process,
        engine: Engine,
        listener: Listener,
        on_abort: Callable[[tuple[int, ...]], None],
        on_applied: Callable[[], None],
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """`on_abort` gets groups that were dropped; `on_applied` is called when the engine serves another
        version, `on_turn` when the device that it shares may have changed hands."""
        self._process = process
        self._engine = engine
        self._listener = listener
        self._on_abort = on_abort
        self._on_applied = on_applied
        self._on_turn = on_turn
        self._awake = asyncio.Event()
        self._awake.set()
        self._applying = asyncio.Lock()
        self._wanted: WeightManifest | None = None
        self._draft: WeightManifest | None = None
        """Of a version that is being made."""
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()  # the ledger is to be asked at once

    async def listen_loop(self) -> None:
        """Take manifests and instructions from the trainer until cancelled."""
        while True:
            _, message = await self._listener.receive()
            if isinstance(message, WeightManifest):
                self._want(message)
            elif isinstance(message, WeightDraft):
                self._expect(message)
            elif isinstance(message, Control) and message.action is Action.ABORT:
                self._on_abort(message.groups)
            elif isinstance(message, Control) and message.action is Action.TURN and self._on_turn:
                self._on_turn()

    async def poll_loop(self) -> None:
        """Ask the ledger for the current manifest: at the start, and in case a message was lost."""
        while True:
            self._asked.clear()
            current = None if await self._is_current() else await self._named()
            if current is not None:
                self._want(current, from_ledger=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()

    async def apply_loop(self) -> None:
        """Bring the engine to the wanted version, again and again, until cancelled.

        Raises:
            PoisonedError: the engine may hold mixed weights.
        """
        while True:
            with contextlib.ExitStack() as stack:
                if (
                    self._engine.served.version < 0
                ):  # later there may be nothing new for long, and nobody waits for it
                    stack.enter_context(self._process.waiting("the first weights"))
                await self._changed.wait()
            await self._awake.wait()
            self._changed.clear()
            manifest = self._next()
            if manifest is None:
                continue
            try:
                async with self._applying:
                    await (self._stage_draft if is_provisional(manifest) else self._apply)(manifest)
            except PoisonedError as error:
                if self._process.stop.is_set():
                    return  # cancelled in the middle by the drain; the engine is closed next
                self._answer_failure(manifest, error, poisoned=True)
                raise
            except WeightError as error:
                self._process.metrics.count("weights.failed")
                log.warning("weights.failed version=%d error=%s", manifest.version, error)
                self._answer_failure(manifest, error, poisoned=False)
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def sleep(self) -> None:
        """Have the engine sleep, after the update that is under way; there is none until `wake`."""
        self._awake.clear()
        self._changed.set()  # nothing is staged early any more
        async with self._applying:
            await self._engine.sleep()

    async def wake(self) -> None:
        """Have the engine wake and bring it to the current version."""
        await self._engine.wake()
        self._awake.set()
        self._changed.set()
        self._asked.set()

    def _next(self) -> WeightManifest | None:
        """What is to be staged: the version that is wanted, or else a draft of the next one."""
        wanted, draft = self._wanted, self._draft
        if wanted is not None and not self._serves(wanted):
            return wanted
        self._draft = None
        served = self._engine.served
        return (
            draft
            if draft is not None and draft.epoch == served.epoch and draft.version > served.version
            else None
        )

    def _expect(self, coming: WeightDraft) -> None:
        known = self._wanted
        if known is not None and (known.epoch, known.version) == (coming.epoch, coming.like):
            self._draft = provisional_manifest(known, coming.version)
            self._changed.set()

    async def _stage_draft(self, draft: WeightManifest) -> None:
        """Stage what comes of a version that is being made, until it is complete, or another one is wanted.

        Raises:
            TetherError: the engine is at its end. That the version did not come is no error: there may be
                no such version.
        """
        async with asyncio.TaskGroup() as tasks:
            staging = tasks.create_task(self._receive(draft), name="draft")
            staging.add_done_callback(lambda _: self._changed.set())
            while not staging.done():
                await self._changed.wait()
                self._changed.clear()
                wanted = self._wanted
                other = wanted is not None and (wanted.epoch != draft.epoch or wanted.version > draft.version)
                if other or not self._awake.is_set():
                    staging.cancel()
        self._changed.set()  # by now its manifest may have come
        if not staging.cancelled() and (error := staging.result()) is not None:
            raise error

    async def _receive(self, draft: WeightManifest) -> TetherError | None:
        """Returns what ends the engine."""
        try:
            await self._engine.stage(draft)
            self._process.metrics.count("weights.drafts")
        except PoisonedError as error:
            return error
        except WeightError as error:
            log.info("weights.draft_failed version=%d error=%s", draft.version, error)
        except TetherError as error:
            return error
        return None

    def _want(self, manifest: WeightManifest, *, from_ledger: bool = False) -> None:
        known = self._wanted
        if is_provisional(manifest):  # names no weights
            log.error("weights.no_digests version=%d epoch=%s", manifest.version, manifest.epoch)
            return
        if known is not None and manifest.epoch == known.epoch:
            newer = manifest.version > known.version
        else:
            newer = from_ledger
            if not from_ledger:  # of a new trainer, or late of an old one: the ledger knows
                self._asked.set()
        if newer:
            self._wanted = manifest
            self._changed.set()

    async def _named(self) -> WeightManifest | None:
        """The manifest that the ledger names."""
        data = await self._process.ledger.manifest()
        if data is None:
            return None
        try:
            message = decode_payload(data)
        except ProtocolError as error:
            log.error("weights.bad_manifest error=%s", error)
            return None
        return message if isinstance(message, WeightManifest) else None

    async def _is_current(self) -> bool:
        """Whether the engine serves what the run stands at; a manifest is large, and most of the time nothing
        is new."""
        with contextlib.suppress(Refused):
            head = await self._process.ledger.head()
            return (head.epoch, head.version) == (self._engine.served.epoch, self._engine.served.version)
        return False

    def _serves(self, manifest: WeightManifest) -> bool:
        served = self._engine.served
        return (served.epoch, served.version) == (manifest.epoch, manifest.version)

    async def _is_superseded(self, manifest: WeightManifest) -> bool:
        """Whether the ledger names another epoch by now, so that this version is of an abandoned branch for
        all we know."""
        current = await self._named()
        if current is not None and current.epoch == manifest.epoch and current.version >= manifest.version:
            return False
        log.info("weights.superseded version=%d epoch=%s", manifest.version, manifest.epoch)
        if current is not None:
            self._want(current, from_ledger=True)
        return True

    async def _apply(self, manifest: WeightManifest) -> None:
        served = self._engine.served
        pause_ms = 0.0
        if served.version == manifest.version and served.digest == manifest.digest:
            if await self._is_superseded(manifest):
                return
            await self._engine.adopt(manifest.epoch, manifest.version)
        else:
            began = time.monotonic()
            await self._engine.stage(manifest)
            stage_ms = (time.monotonic() - began) * 1e3
            self._listener.answer(
                WeightStaged(
                    engine=self._process.incarnation,
                    epoch=manifest.epoch,
                    version=manifest.version,
                    digest=manifest.digest,
                    stage_ms=stage_ms,
                )
            )
            self._process.metrics.seconds.labels("stage").observe(stage_ms / 1e3)
            if await self._is_superseded(manifest):
                return
            pause_ms = await self._engine.commit(manifest)
            self._process.metrics.seconds.labels("update_pause").observe(pause_ms / 1e3)
        try:
            await self._process.ledger.applied(self._process.incarnation, manifest.epoch, manifest.version)
        except Refused as refusal:
            if refusal.reason is not Reason.STALE_EPOCH:
                raise
            log.info("weights.stale_epoch version=%d epoch=%s", manifest.version, manifest.epoch)
            return
        self._listener.answer(
            WeightApplied(
                engine=self._process.incarnation,
                epoch=manifest.epoch,
                version=manifest.version,
                pause_ms=pause_ms,
            )
        )
        self._on_applied()
        self._process.info["version"] = manifest.version
        self._process.metrics.count("weights.applied")
        log.debug("weights.applied version=%d pause_ms=%.1f", manifest.version, pause_ms)

    def _answer_failure(self, manifest: WeightManifest, error: Exception, *, poisoned: bool) -> None:
        self._listener.answer(
            WeightFailed(
                engine=self._process.incarnation,
                epoch=manifest.epoch,
                version=manifest.version,
                error=str(error)[:500],
                poisoned=poisoned,
            )
        )
