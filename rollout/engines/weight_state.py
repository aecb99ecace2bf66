"""Tracks the live weight version, and whether requests may run on it.

Every engine, and every SGLang rank, has one `WeightState`. It copies no weights: its owner copies them inside
`commit` or after `release`, and the state records the served version.

    served   --commit-->   serves the new version | unchanged (WeightError) | poisoned (any other failure)
    served   --release-->  released  --commit-->  serves the new version

Poisoned is final: the engine must be closed and its process must exit.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import EngineError, PoisonedError, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served


class WeightState:
    """State of the live weights of one engine or rank."""

    def __init__(self) -> None:
        self.served = Served()
        """Live version; as in a fresh engine before the first commit and after `release`."""
        self.released = False
        """Whether there are no weights to generate with: from `release` to the next commit."""
        self.asleep = False
        """Whether memory is released: from `release` to `wake`."""
        self.poisoned = ""
        """Why live weights may be mixed or memory partly released; empty if neither is the case."""
        self._changing = False
        self._pending_commits = 0

    @property
    def committing(self) -> bool:
        """Whether a commit runs or is pending; no version may be staged meanwhile."""
        return self._pending_commits > 0

    @property
    def admits_requests(self) -> bool:
        """Whether requests may be submitted: weights are live and not changing."""
        return not (self._changing or self.released)

    @contextmanager
    def pending_commit(self) -> Iterator[None]:
        """Count as `committing` inside the body."""
        self._pending_commits += 1
        try:
            yield
        finally:
            self._pending_commits -= 1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Admit no requests inside the body (a commit or rename). Not reentrant."""
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    @contextmanager
    def commit(self, manifest: WeightManifest) -> Iterator[None]:
        """Serve `manifest` if the body, which copies its weights over the live ones, succeeds.

        The body may raise a plain WeightError only if it has not changed any live weight. After any other
        exception, including cancellation, some weights may have been copied, and the state is poisoned.

        Raises:
            WeightError: the body raised it; the live weights are untouched.
            PoisonedError: the body failed in another way, or the state was already poisoned.
        """
        if self.poisoned:
            raise PoisonedError(self.poisoned)
        try:
            yield
        except PoisonedError as error:
            self.poisoned = str(error)
            raise
        except WeightError:
            raise
        except BaseException as error:
            self.poisoned = f"the commit of version {manifest.version} did not end: {error!r}"
            raise PoisonedError(self.poisoned) from error
        self.serve(Served(manifest.epoch, manifest.version, manifest.digest))

    def serve(self, served: Served) -> None:
        """Record that the weights of `served` are completely live."""
        self.served = served
        self.released = False

    def renamed(self, epoch: str, version: int) -> Served:
        """Return the live version under a new name; the state is unchanged.

        Raises:
            WeightError: no version is live.
        """
        if self.served.version < 0:
            raise WeightError(f"no version is served that could be renamed to version {version}")
        return Served(epoch, version, self.served.digest)

    def release(self) -> None:
        """Record that memory is released: no version is served until the next commit."""
        self.asleep = self.released = True
        self.served = Served()

    def wake(self) -> None:
        """Record that memory was reallocated; the next commit provides the weights."""
        self.asleep = False

    @contextmanager
    def poisoned_by_failure(self, step: str) -> Iterator[None]:
        """Poison the state if the body fails or is cancelled; `step` names the body in the reason."""
        try:
            yield
        except BaseException as error:
            reason = f"{step}: {error}" if isinstance(error, EngineError) else f"{step} did not end"
            self.poisoned = self.poisoned or reason
            raise
