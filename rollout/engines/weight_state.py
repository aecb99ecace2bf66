"""Tracks which weight version is live and whether requests may run on it.

Every engine, and every SGLang rank, keeps one `WeightState`. It copies no weights: its owner does that inside
`commit` or after `release`, and the state says which version is served afterwards.

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
        """The live version; as in a fresh engine before the first commit and after `release`."""
        self.released = False
        """Whether there are no weights to generate with: true from `release` to the next commit."""
        self.asleep = False
        """Whether the memory is released: true from `release` to `wake`."""
        self.poisoned = ""
        """Why live weights may be mixed, or the memory half released; empty while neither is so."""
        self._changing = False
        self._pending_commits = 0

    @property
    def committing(self) -> bool:
        """Whether a commit runs or waits for its turn; no version may be staged meanwhile."""
        return self._pending_commits > 0

    @property
    def admits_requests(self) -> bool:
        """Whether new requests may be submitted: there are weights, and they are not being changed."""
        return not (self._changing or self.released)

    @contextmanager
    def pending_commit(self) -> Iterator[None]:
        """Count as `committing` while the body runs."""
        self._pending_commits += 1
        try:
            yield
        finally:
            self._pending_commits -= 1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Admit no requests while the body, a commit or a rename, runs. Not reentrant."""
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    @contextmanager
    def commit(self, manifest: WeightManifest) -> Iterator[None]:
        """Serve `manifest` if the body succeeds, which copies its weights over the live ones.

        The body must raise a plain WeightError only if it has changed no live weight. If it raises anything
        else, cancellation included, some weights may have been copied, and the state is poisoned.

        Raises:
            WeightError: by the body; the live weights are untouched.
            PoisonedError: for every other failure of the body, or if the state was poisoned before.
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
        """Record that the weights of `served` are live, completely."""
        self.served = served
        self.released = False

    def renamed(self, epoch: str, version: int) -> Served:
        """Return the live weights under another name, without a change to the state.

        Raises:
            WeightError: if no version is live.
        """
        if self.served.version < 0:
            raise WeightError(f"no version is served that could be renamed to version {version}")
        return Served(epoch, version, self.served.digest)

    def release(self) -> None:
        """Record that the memory is being released: no version is served until the next commit."""
        self.asleep = self.released = True
        self.served = Served()

    def wake(self) -> None:
        """Record that the memory was taken again; the live weights come with the next commit."""
        self.asleep = False

    @contextmanager
    def poisoned_by_failure(self, step: str) -> Iterator[None]:
        """Poison the state if the body fails or is cancelled; `step` names it in the reason."""
        try:
            yield
        except BaseException as error:
            reason = f"{step}: {error}" if isinstance(error, EngineError) else f"{step} did not end"
            self.poisoned = self.poisoned or reason
            raise
