"""Stages and commits one rank's part of the weights, in the process of the model.

`stage`, `status` and `cancel` may be called at any time and from any thread, the other methods between two
forward passes. Answers are plain values, which are sent to the engine's process (`ranks.py` is that side).
"""

import threading
import time
from typing import Any

import torch

from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.staging.loader_trace import StagingPlan
from rollout.staging.shared_weights import SharedPlan
from rollout.staging.staging import digest_of


class RankStaging:
    """One rank's part of the weights, live and staged, and the thread that fills the staging copy."""

    def __init__(self, plan: StagingPlan | SharedPlan, *, architecture: str, tied: bool) -> None:
        """Calibrate `plan` and stage by it.

        Args:
            plan: where the tensors of a version go in this rank.
            architecture: class of the model in transformers; empty: any.
            tied: input and output embeddings are one tensor.

        Raises:
            EngineError: if `plan` does not reproduce the live weights.
        """
        plan.calibrate()
        self._plan = plan
        self._staging = plan.staging(architecture=architecture, tied=tied)
        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda else -1
        self._stream = torch.cuda.Stream() if self._cuda else None
        """Stream of all fetches, so that one fetch's kernels run before the next one's."""
        self._state = "idle"
        """One of idle, staging, staged, failed, asleep; staging until the fetching thread has ended."""
        self._error = ""
        """Why the latest staging failed."""
        self._covered = 0
        """Bytes that the latest staging has verified and placed."""
        self._poisoned = False
        """Whether live weights may be mixed, or this process cannot receive any more."""
        self._lock = threading.Lock()
        """Guards the staging copy: no fetch writes into it while it is committed or released."""
        self.bytes = sum(tensor.nbytes for tensor in plan.live.values())
        """Size of the live parameters that versions contain."""

    def stage(self, manifest: WeightManifest, deadline_s: float) -> dict[str, Any]:
        """Begin to stage in the background; `status` reports the progress. Return {"error"}."""
        with self._lock:
            if self._state == "staging":
                return {"error": "another version is being staged"}
            if self._state == "asleep":
                return {"error": "the engine sleeps, there is no memory to stage in"}
            self._staging.discard()  # a cancel that came too late for the version before
            self._state, self._error, self._covered = "staging", "", 0
            threading.Thread(
                target=self._fetch, args=(manifest, deadline_s), name="tether-stage", daemon=True
            ).start()
        return {"error": ""}

    def status(self) -> dict[str, Any]:
        """Return the state of the staged or incoming version.

        Returns: {"state", "error", "covered", "poisoned"}, and if a version is staged {"epoch", "version",
            "digest"}.
        """
        staged = self._staging.staged if self._state == "staged" else None
        status: dict[str, Any] = {
            "state": self._state,
            "error": self._error,
            "covered": self._covered,
            "poisoned": self._poisoned,
        }
        if staged is not None:
            status |= {"epoch": staged.epoch, "version": staged.version, "digest": staged.digest}
        return status

    def cancel(self) -> dict[str, Any]:
        """End a running fetch, or discard the staged version; return the status."""
        with self._lock:
            fetching = self._state == "staging"
            if self._state == "staged":
                self._staging.discard()
                self._state = "idle"
        if fetching:  # without the lock: ending a collective may take a while, and a commit must not wait
            self._staging.cancel()
        return self.status()

    def commit(self, manifest: WeightManifest) -> dict[str, Any]:
        """Copy the staged version over the live weights.

        Returns: {"applied", "error", "poisoned"}, and if applied {"copy_ms"}.
        """
        with self._lock:
            return self._commit(manifest)

    def _commit(self, manifest: WeightManifest) -> dict[str, Any]:
        start = time.perf_counter()
        if self._poisoned or self._state != "staged":
            return {
                "applied": False,
                "error": f"the rank is {'poisoned' if self._poisoned else self._state}",
                "poisoned": self._poisoned,
            }
        try:
            self._staging.take(manifest)
        except WeightError as error:
            return {"applied": False, "error": str(error), "poisoned": False}
        self._state = "idle"
        self._poisoned = True
        try:
            self._plan.apply()
            if self._cuda:
                torch.cuda.current_stream().synchronize()
        except (RuntimeError, WeightError) as error:
            return {"applied": False, "error": str(error), "poisoned": True}
        self._poisoned = False
        return {
            "applied": True,
            "error": "",
            "poisoned": False,
            "copy_ms": (time.perf_counter() - start) * 1e3,
        }

    def sleep(self) -> dict[str, Any]:
        """Discard the staged version and release the copy's memory. Return {"error"}."""
        with self._lock:
            if self._state == "staging":
                return {"error": "a version is being staged"}
            self._staging.discard()
            self._staging.close()  # memory of the trainer that it maps would outlive the trainer
            self._state = "asleep"
            self._plan.release()
        return {"error": ""}

    def wake(self) -> dict[str, Any]:
        """Take the copy's memory again; the live weights come with the next commit. Return {"error"}."""
        try:
            self._plan.restore()
        except EngineError as error:
            return {"error": str(error)}
        if self._state == "asleep":
            self._state = "idle"
        return {"error": ""}

    def live_digest(self) -> tuple[bool, int]:
        """Return whether this rank has all of the live weights, and their digest by checkpoint name.

        Parts that it does not have count as zeros.
        """
        tensors = {}
        complete = True
        for name, tensor, is_complete in self._plan.gathered():
            tensors[name] = tensor
            complete = complete and is_complete
        return complete, digest_of(tensors)

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
        except Exception as error:  # `status` reports any error to the engine's process
            with self._lock:
                self._staging.discard()
                self._error, self._state = str(error) or repr(error), "failed"
                self._poisoned = self._poisoned or isinstance(error, PoisonedError)
        else:
            with self._lock:
                self._covered, self._state = covered, "staged"
