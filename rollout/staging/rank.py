"""Stages and commits one rank's shard of the weights, in the model's process.

`stage`, `status` and `cancel` may be called at any time and from any thread; other methods run between two
forward passes. Results are sent to the engine's process (`ranks.py`).
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from protocol.errors import EngineError, PoisonedError, UnfitVersion, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.rank_status import RankCommit, RankState, RankStatus
from rollout.staging.staging import Staging


class RankPlan(Protocol):
    """Mapping of a version's tensors to a rank's parameters: `AnyPlan` or a replacement."""

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """Live parameters that versions change."""

    @property
    def unplaced(self) -> Iterable[str]:
        """Tensors of the model without a shard on the rank."""

    def calibrate(self) -> None:
        """Raise EngineError if the plan does not reproduce the live weights."""

    def staging(self, *, architecture: str, tied: bool) -> Staging:
        """Return the staging of versions."""

    def gathered(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield (name, live tensor, whether the rank holds the whole tensor); missing parts are zero."""

    def apply(self) -> None:
        """Copy the taken version over the live weights."""

    def release(self) -> None:
        """Release the memory of the copy. Idempotent."""

    def restore(self) -> None:
        """Reallocate the copy. Raises EngineError if memory is insufficient."""


class RankStaging:
    """Live and staged weights of one rank, with the thread that fills the staging copy."""

    def __init__(self, plan: RankPlan, *, architecture: str, tied: bool) -> None:
        """Calibrate `plan` and create its staging.

        Args:
            plan: mapping of a version's tensors to this rank.
            architecture: class name of the model in transformers; empty: any.
            tied: whether input and output embeddings are tied.

        Raises:
            EngineError: `plan` does not reproduce the live weights.
        """
        plan.calibrate()
        self._plan = plan
        self._staging = plan.staging(architecture=architecture, tied=tied)
        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda else -1
        self._stream = torch.cuda.Stream() if self._cuda else None
        """Stream of all fetches, which orders the kernels of consecutive fetches."""
        self._state = RankState.IDLE
        self._error, self._covered, self._poisoned, self._unfit = "", 0, False, False
        """As in `RankStatus`."""
        self._lock = threading.Lock()
        """Guards the staging copy: no fetch writes to it during a commit or release."""
        self.bytes = sum(tensor.nbytes for tensor in plan.live.values())
        """Size of the live parameters that versions contain, bytes."""
        self.unplaced = sorted(plan.unplaced)
        """Tensors of the model without a shard on this rank."""

    def divide(self, unowned: Sequence[str]) -> None:
        """Accept versions with tensors that belong only to other ranks.

        Args:
            unowned: tensors of `unplaced` that belong to no rank.
        """
        self._staging.owned_by_others = frozenset(self.unplaced) - frozenset(unowned)

    def stage(self, manifest: WeightManifest, deadline_s: float) -> str:
        """Start staging in the background, see `status`. Return the reason of a refusal, or ""."""
        with self._lock:
            if self._state == RankState.STAGING:
                return "another version is being staged"
            if self._state == RankState.ASLEEP:
                return "the engine sleeps, there is no memory to stage in"
            self._staging.discard()  # clear a cancel that came too late for the previous version
            self._state, self._error, self._covered, self._unfit = RankState.STAGING, "", 0, False
            threading.Thread(
                target=self._fetch, args=(manifest, deadline_s), name="tether-stage", daemon=True
            ).start()
        return ""

    def status(self) -> RankStatus:
        """Return the state of the staging copy, and the version in it."""
        with self._lock:
            version = self._staging.staged if self._state == RankState.STAGED else None
            staged = None if version is None else Served(version.epoch, version.version, version.digest)
            return RankStatus(self._state, self._error, self._covered, self._poisoned, self._unfit, staged)

    def cancel(self) -> RankStatus:
        """Cancel a running fetch, or discard the staged version; return the status."""
        with self._lock:
            fetching = self._state == RankState.STAGING
            if self._state == RankState.STAGED:
                self._staging.discard()
                self._state = RankState.IDLE
        if fetching:  # outside the lock: ending a collective may take long, and a commit must not wait for it
            self._staging.cancel()
        return self.status()

    def commit(self, manifest: WeightManifest) -> RankCommit:
        """Copy the staged version over the live weights."""
        with self._lock:
            return self._commit(manifest)

    def _commit(self, manifest: WeightManifest) -> RankCommit:
        if self._cuda:
            torch.cuda.current_stream().synchronize()  # a step in flight is no pause
        start = time.perf_counter()
        if self._poisoned or self._state != RankState.STAGED:
            reason = f"the rank is {'poisoned' if self._poisoned else self._state}"
            return RankCommit(False, reason, self._poisoned)
        try:
            self._staging.take(manifest)
        except WeightError as error:
            return RankCommit(False, str(error))
        self._state = RankState.IDLE
        self._poisoned = True
        try:
            self._plan.apply()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
        except (RuntimeError, WeightError) as error:
            return RankCommit(False, str(error), poisoned=True)
        self._poisoned = False
        return RankCommit(True, copy_ms=(time.perf_counter() - start) * 1e3)

    def sleep(self) -> str:
        """Discard the staged version and release the copy. Return the reason of a refusal, or ""."""
        with self._lock:
            if self._state == RankState.STAGING:
                return "a version is being staged"
            self._staging.discard()
            self._staging.close()  # mapped memory of the trainer would otherwise outlive the trainer
            self._state = RankState.ASLEEP
            self._plan.release()
        return ""

    def wake(self) -> str:
        """Reallocate the copy; the next commit provides the weights. Return why it failed, or ""."""
        try:
            self._plan.restore()
        except EngineError as error:
            return str(error)
        with self._lock:
            if self._state == RankState.ASLEEP:
                self._state = RankState.IDLE
        return ""

    def live_digest(self) -> tuple[bool, int]:
        """Return (whether this rank holds all live weights, their digest by checkpoint name).

        Missing parts count as zeros.
        """
        parts = [not self._staging.owned_by_others]

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor, is_complete in self._plan.gathered():
                parts.append(is_complete)
                yield name, tensor

        found = self._staging.live_digest(named())
        return all(parts), found

    def _fetch(self, manifest: WeightManifest, deadline_s: float) -> None:
        try:
            if self._stream is None:
                covered = self._staging.fetch(manifest, deadline_s)
            else:
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(self._stream):
                    try:
                        covered = self._staging.fetch(manifest, deadline_s)
                    finally:
                        self._stream.synchronize()
        except Exception as error:  # `status` reports errors to the engine's process
            with self._lock:
                self._staging.discard()
                self._error, self._state = str(error) or repr(error), RankState.FAILED
                self._poisoned = self._poisoned or isinstance(error, PoisonedError)
                self._unfit = isinstance(error, UnfitVersion)
        else:
            with self._lock:
                self._covered, self._state = covered, RankState.STAGED
