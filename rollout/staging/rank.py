"""One rank's share of the weights, in the process of the model: the plan, the staging copy and the thread
that fills it.

`stage`, `status` and `cancel` may be called at any time and from any thread, the other methods between two
forward passes. Answers are plain values: the engine's process gets them over whatever leads to its ranks
(`rank_updates.py` is that side).
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
    """What one rank holds of the weights, live and staged."""

    def __init__(self, plan: StagingPlan | SharedPlan, *, architecture: str, tied: bool) -> None:
        """`tied`: input and output embeddings are one tensor. Raises EngineError if `plan` does not reproduce
        the live weights."""
        plan.calibrate()
        self._plan = plan
        self._staging = plan.staging(architecture=architecture, tied=tied)
        self._cuda = torch.cuda.is_available()
        self._device = torch.cuda.current_device() if self._cuda else -1
        self._stream = torch.cuda.Stream() if self._cuda else None
        """Of all fetches: what one has queued is done before what the next one does."""
        self._state = "idle"
        """It is "staging" until the thread that fetches has nothing left to do."""
        self._error = ""
        self._covered = 0
        self._poisoned = False
        self._lock = threading.Lock()
        """Held while the copy changes hands: nothing is written into it while it is committed or given
        back."""
        self.bytes = sum(tensor.nbytes for tensor in plan.live.values())

    def stage(self, manifest: WeightManifest, deadline_s: float) -> dict[str, Any]:
        """Begin to stage in the background; `status` tells how it goes. Returns {"error"}."""
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
        """What is staged or being staged: {"state", "epoch", "version", "digest", "covered", "error",
        "poisoned"}."""
        staged = self._staging.staged if self._state == "staged" else None
        found: dict[str, Any] = {
            "state": self._state,
            "error": self._error,
            "covered": self._covered,
            "poisoned": self._poisoned,
        }
        if staged is not None:
            found |= {"epoch": staged.epoch, "version": staged.version, "digest": staged.digest}
        return found

    def cancel(self) -> dict[str, Any]:
        """Make a running fetch end, or forget what is staged."""
        with self._lock:
            fetching = self._state == "staging"
            if self._state == "staged":
                self._staging.discard()
                self._state = "idle"
        if (
            fetching
        ):  # without the lock: ending a collective may take a while, and a commit does not wait for it
            self._staging.cancel()
        return self.status()

    def commit(self, manifest: WeightManifest) -> dict[str, Any]:
        """Make what is staged live. Returns {"applied", "copy_ms", "error", "poisoned"}."""
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
        """Forget what is staged and give the copy's memory back. Returns {"error"}."""
        with self._lock:
            if self._state == "staging":
                return {"error": "a version is being staged"}
            self._staging.discard()
            self._staging.close()  # what it maps of the trainer's memory stays taken when the trainer ends
            self._state = "asleep"
            self._plan.release()
        return {"error": ""}

    def wake(self) -> dict[str, Any]:
        """Take the copy's memory again; the live weights come with the next commit. Returns {"error"}."""
        try:
            self._plan.restore()
        except EngineError as error:
            return {"error": str(error)}
        if self._state == "asleep":
            self._state = "idle"
        return {"error": ""}

    def live_digest(self) -> tuple[bool, int]:
        """Digest of the live weights by checkpoint name, and whether this rank has the whole of them; what it
        has not counts as zeros."""
        tensors = {}
        whole = True
        for name, tensor, complete in self._plan.gathered():
            tensors[name] = tensor
            whole = whole and complete
        return whole, digest_of(tensors)

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
        except Exception as error:  # whatever it is, the engine's process is told
            with self._lock:
                self._staging.discard()
                self._error, self._state = str(error) or repr(error), "failed"
                self._poisoned = self._poisoned or isinstance(error, PoisonedError)
        else:
            with self._lock:
                self._covered, self._state = covered, "staged"
