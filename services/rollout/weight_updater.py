"""Keeps a rollout worker's engine on the current weights.

Manifests arrive over the bus. The ledger's copy is authoritative and read once a second, so a lost message
delays an update by at most a second. `update_action.next_action` chooses the next update and `WeightUpdater`
applies it:

- One update runs at a time. A newer manifest supersedes an older one that is not staged yet.
- A version is staged while the trainer still exports the version. A staged version is committed only if its
  manifest has the digest of the received bytes.
- Before a commit, the updater asks the ledger whether it still names the version's epoch.
- An engine that cannot stage a version continues to serve its current version and retries. If the versions of
  the running trainer do not fit the engine, the process ends as with wrong settings. A version of an earlier
  trainer does not end it: the next trainer may have other settings.
- A poisoned engine ends the process. The supervisor starts a new engine, which requests the current version.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from protocol.codec import decode_payload
from protocol.errors import (
    PoisonedError,
    ProtocolError,
    Reason,
    Refused,
    TetherError,
    UnfitVersion,
    WeightError,
)
from protocol.messages import (
    Action,
    Control,
    WeightApplied,
    WeightDraft,
    WeightFailed,
    WeightManifest,
    WeightStaged,
)
from protocol.topics import Role
from protocol.weights.provisional import is_provisional, provisional_manifest
from rollout.engines.base import Engine
from services.bus.broadcast import Listener
from services.rollout.update_action import Adopt, Stage, StageProvisional, Wait, next_action
from services.runtime.event_loop import is_set_within
from services.runtime.process import Process

log = logging.getLogger("tether.updating")

POLL_S = 1.0
"""Seconds between two reads of the ledger's current version."""
RETRY_S = 0.5
"""Seconds before a failed staging is retried."""
MAX_ERROR_CHARACTERS = 500


class WeightUpdater:
    """Receives manifests, stages and commits versions, and reports results to the ledger and the trainer.

    Run `listen_loop`, `poll_loop` and `apply_loop` as tasks.
    """

    def __init__(
        self,
        process: Process,
        engine: Engine,
        listener: Listener,
        on_abort: Callable[[tuple[int, ...]], None],
        on_applied: Callable[[], None],
        on_turn: Callable[[], None] | None = None,
    ) -> None:
        """Start with an awake engine and no manifest.

        Args:
            process: supplies ledger, metrics and the stop event.
            engine: engine to update.
            listener: listener connected to the trainer's topic `weights`.
            on_abort: called with the groups that the trainer dropped.
            on_applied: called when the engine serves another version.
            on_turn: called when the turn of a shared GPU may have changed.
        """
        self._process = process
        self._engine = engine
        self._listener = listener
        self._on_abort = on_abort
        self._on_applied = on_applied
        self._on_turn = on_turn
        self._newest: WeightManifest | None = None
        """Newest manifest of the epoch that the ledger names."""
        self._provisional: WeightManifest | None = None
        """Manifest of the version that the trainer is exporting, until its staging begins."""
        self._awake = True
        """Whether the engine may stage; false from `sleep` to `wake`."""
        self._changed = asyncio.Event()  # an input of `next_action` changed
        self._poll_now = asyncio.Event()
        self._updating = asyncio.Lock()  # held during an update and during `sleep`

    async def listen_loop(self) -> None:
        """Receive manifests and instructions from the trainer until cancelled.

        Raises:
            PoisonedError: an audit refutes the engine.
        """
        while True:
            _, message = await self._listener.receive()
            if isinstance(message, WeightManifest):
                self._on_manifest(message)
            elif isinstance(message, WeightDraft):
                self._on_draft(message)
            elif isinstance(message, Control) and message.action is Action.ABORT:
                self._on_abort(message.groups)
            elif isinstance(message, Control) and message.action is Action.TURN and self._on_turn:
                self._on_turn()
            elif isinstance(message, Control) and message.engine == self._process.incarnation:
                raise PoisonedError("an audit refutes this engine (audit.action = quarantine)")

    async def poll_loop(self) -> None:
        """Read the current manifest from the ledger, at the start and every `POLL_S`, until cancelled."""
        while True:
            self._poll_now.clear()
            current = None if await self._is_current() else await self._ledger_manifest()
            if current is not None:
                self._on_manifest(current, from_ledger=True)
            await is_set_within(self._poll_now, POLL_S)

    async def apply_loop(self) -> None:
        """Apply `next_action` after each change, until cancelled.

        Raises:
            PoisonedError: the engine may hold mixed weights.
            UnfitVersion: the versions of the running trainer do not fit the engine.
        """
        while True:
            await self._change()
            action = next_action(self._newest, self._provisional, self._engine.served, awake=self._awake)
            if isinstance(action, Wait):
                continue
            try:
                async with self._updating:
                    await self._carry_out(action)
            except PoisonedError as error:
                if self._process.stop.is_set():
                    return  # the drain cancelled an update; the engine is closed next
                self._report_failure(action.manifest, error, poisoned=True)
                raise
            except WeightError as error:
                self._process.metrics.count("weights.failed")
                log.warning("weights.failed version=%d error=%s", action.manifest.version, error)
                self._report_failure(action.manifest, error, poisoned=False)
                if isinstance(error, UnfitVersion) and await self._is_from_current_epoch(action.manifest):
                    raise UnfitVersion(
                        f"no version of this trainer fits engine {self._process.incarnation}: {error}"
                    ) from error
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    async def sleep(self) -> None:
        """Put the engine to sleep after the update in progress; no other update begins until `wake`.

        If `sleep` is cancelled during its wait, the engine keeps its memory and updates stay suspended.
        """
        self._awake = False
        self._changed.set()  # cancels the staging of a provisional version
        async with self._updating:
            await self._engine.sleep()

    async def wake(self) -> None:
        """Wake the engine; `apply_loop` then brings it to the current version."""
        await self._engine.wake()
        self._awake = True
        self._changed.set()
        self._poll_now.set()

    # -- state
    def _on_manifest(self, manifest: WeightManifest, *, from_ledger: bool = False) -> None:
        """Accept a newer version. Only the ledger switches to another epoch."""
        newest = self._newest
        if is_provisional(manifest):  # without digests a manifest identifies no weights
            log.error("weights.no_digests version=%d epoch=%s", manifest.version, manifest.epoch)
            return
        if newest is not None and manifest.epoch == newest.epoch:
            newer = manifest.version > newest.version
        else:
            newer = from_ledger
            if not from_ledger:  # the sender is a new trainer, or the message of an old trainer is late
                self._poll_now.set()
        if newer:
            self._newest = manifest
            self._changed.set()

    def _on_draft(self, draft: WeightDraft) -> None:
        """Expect a version that the trainer is exporting, if the manifest with its layout is known."""
        known = self._newest
        if known is not None and (known.epoch, known.version) == (draft.epoch, draft.like):
            self._provisional = provisional_manifest(known, draft.version)
            self._changed.set()

    async def _change(self) -> None:
        """Wait for a change since the last call."""
        with contextlib.ExitStack() as stack:
            if self._awake and self._engine.served.version < 0:  # after the first weights, waiting is normal
                stack.enter_context(self._process.waiting("the first weights"))
            await self._changed.wait()
        self._changed.clear()

    async def _ledger_manifest(self) -> WeightManifest | None:
        """Return the manifest that the ledger names; None if there is none or it cannot be decoded."""
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
        """Return whether the engine serves the run's epoch and its newest published version.

        The check avoids reading the large manifest when there is no new version.
        """
        with contextlib.suppress(Refused):
            head = await self._process.ledger.head()
            return (head.epoch, head.published) == (self._engine.served.epoch, self._engine.served.version)
        return False

    async def _is_superseded(self, manifest: WeightManifest) -> bool:
        """Return whether the ledger names another epoch; the version may be of an abandoned branch."""
        current = await self._ledger_manifest()
        if current is not None and current.epoch == manifest.epoch and current.version >= manifest.version:
            return False
        log.info("weights.superseded version=%d epoch=%s", manifest.version, manifest.epoch)
        if current is not None:
            self._on_manifest(current, from_ledger=True)
        return True

    async def _is_from_current_epoch(self, manifest: WeightManifest) -> bool:
        """Return whether a registered trainer publishes under the version's epoch."""
        trainers = await self._process.ledger.peers(Role.TRAINER)
        return any(trainer.info.get("epoch") == manifest.epoch for trainer in trainers)

    # -- actions
    async def _carry_out(self, action: Stage | StageProvisional | Adopt) -> None:
        match action:
            case Stage(manifest):
                await self._stage_and_commit(manifest)
            case StageProvisional(manifest):
                self._provisional = None  # one attempt: the final manifest stages the version again
                await self._stage_provisional(manifest)
            case Adopt(manifest):
                await self._adopt(manifest)

    async def _stage_and_commit(self, manifest: WeightManifest) -> None:
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
        await self._report_applied(manifest, pause_ms)

    async def _adopt(self, manifest: WeightManifest) -> None:
        if await self._is_superseded(manifest):
            return
        await self._engine.adopt(manifest.epoch, manifest.version)
        await self._report_applied(manifest, pause_ms=0.0)

    async def _stage_provisional(self, provisional: WeightManifest) -> None:
        """Stage a version during its export; return when it is complete, failed or no longer useful.

        Raises:
            PoisonedError: the engine cannot stage any more.
            EngineError: the engine is dead. A version that does not arrive raises no error, since it may
                never be committed.
        """
        async with asyncio.TaskGroup() as tasks:
            staging = tasks.create_task(self._try_stage(provisional), name="weights.stage_provisional")
            staging.add_done_callback(lambda _: self._changed.set())
            while not staging.done():
                await self._change()
                if not self._is_useful(provisional):
                    staging.cancel()
        self._changed.set()  # the final manifest may have arrived during the staging
        if not staging.cancelled() and (error := staging.result()) is not None:
            raise error

    def _is_useful(self, staging: WeightManifest) -> bool:
        action = next_action(
            self._newest, self._provisional, self._engine.served, awake=self._awake, staging=staging
        )
        return action == StageProvisional(staging)

    async def _try_stage(self, provisional: WeightManifest) -> TetherError | None:
        """Stage a provisional version; return an error only if it ends the engine."""
        try:
            await self._engine.stage(provisional)
            self._process.metrics.count("weights.drafts")
        except PoisonedError as error:
            return error
        except WeightError as error:
            log.info("weights.draft_failed version=%d error=%s", provisional.version, error)
        except TetherError as error:
            return error
        return None

    async def _report_applied(self, manifest: WeightManifest, pause_ms: float) -> None:
        """Report the served version to the ledger, then to the trainer; new leases use that version."""
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
        self._process.info |= {"version": manifest.version, "pause_ms": round(pause_ms, 2)}
        self._process.metrics.count("weights.applied")
        log.debug("weights.applied version=%d pause_ms=%.1f", manifest.version, pause_ms)

    def _report_failure(self, manifest: WeightManifest, error: Exception, *, poisoned: bool) -> None:
        self._listener.answer(
            WeightFailed(
                engine=self._process.incarnation,
                epoch=manifest.epoch,
                version=manifest.version,
                error=str(error)[:MAX_ERROR_CHARACTERS],
                poisoned=poisoned,
            )
        )
