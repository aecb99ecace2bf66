"""Shares the live weights with a trainer that computes with them (transport `shared`).

The weights are in memory that the trainer can map, and there is no staging copy. Staging maps and verifies
the trainer's master weights; a commit converts them into the live weights.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from protocol.device.shared_layout import BUFFERS, PARAMETERS, TRANSPORT
from protocol.device.shared_tensors import SharedTensors
from protocol.device.slice_digests import digests_of
from protocol.errors import EngineError, UnfitVersion, WeightError
from protocol.messages import WeightManifest
from rollout.engines.base import Served
from rollout.staging.loader_trace import LoaderTrace, Recorder, Window
from rollout.staging.placement import ExpectedTensor
from rollout.staging.staging import Staging, contiguous_stride
from rollout.weights.base import WeightReceiver
from rollout.weights.checked import CheckedReceiver
from rollout.weights.shared import SharedReceiver


class SharedStaging(Staging):
    """Staging without a copy: a version is staged when the converted masters have the right digests.

    `apply` performs the commit's copy. The trainer does not change the masters until the engine reports that
    it serves the version. If the trainer wrote to the masters too early, because it confused this engine with
    another, the version is refused before the copy, or not reported as applied after it.
    """

    widenings = frozenset()

    def __init__(
        self, sources: Mapping[str, ExpectedTensor], *, architecture: str = "", tied: bool = False
    ) -> None:
        """Expect versions of these tensors.

        Args:
            sources: checkpoint name -> expected tensor, which fills exactly one part of a live parameter.
            architecture: class name of the model in transformers; empty: any.
            tied: whether input and output embeddings are tied in this engine.
        """
        unplaced = {name: ExpectedTensor(source.dtype, source.shape, ()) for name, source in sources.items()}
        super().__init__(unplaced, architecture=architecture, tied=tied)
        self._live = {name: source.slices[0].target for name, source in sources.items()}
        self._shared = SharedReceiver()
        self._taken: WeightManifest | None = None
        self._masters: dict[str, torch.Tensor] = {}

    def fetch(self, manifest: WeightManifest, deadline_s: float) -> int:
        check_transport(manifest)
        covered = super().fetch(manifest, deadline_s)
        try:
            self._masters_of(manifest)
        except WeightError:
            self.discard()
            raise
        return covered

    def take(self, manifest: WeightManifest) -> Served:
        served = super().take(manifest)
        self._taken, self._masters = manifest, self._masters_of(manifest)
        return served

    def apply(self) -> None:
        """Convert the masters of the taken version into the live parameters, and unmap them.

        Raises:
            WeightError: the trainer has started to write to the masters; the live weights may be mixed.
        """
        taken, masters = self._taken, self._masters
        assert taken is not None
        with torch.no_grad():
            for name, target in self._live.items():
                target.copy_(masters[name])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
            # GPU memory becomes undefined when the process that owns it ends
            self.check_live(taken)
        self._shared.masters(taken)
        self._taken, self._masters = None, {}
        self._shared.close()

    def check_live(self, manifest: WeightManifest) -> None:
        """Check the live parameters against the digests of a version.

        Raises:
            WeightError: a tensor differs; the message names the first one.
        """
        self.check(manifest)
        expected = {entry.name: entry.digest for entry in manifest.tensors}
        for name, found in zip(self._live, digests_of(self._live.values()), strict=True):
            if found != expected[name]:
                raise WeightError(
                    f"version {manifest.version}: {name} is not what the trainer's masters gave "
                    "when they were verified"
                )

    def discard(self) -> None:
        super().discard()
        self._taken, self._masters = None, {}
        self._shared.close()

    def _masters_of(self, manifest: WeightManifest) -> dict[str, torch.Tensor]:
        """Return the trainer's master of each live tensor, viewed in the live shape.

        Raises:
            UnfitVersion: a tensor has an incompatible layout; the message names it.
            WeightError: see `SharedReceiver.masters`.
        """
        self.check(manifest)
        masters = self._shared.masters(manifest)
        found: dict[str, torch.Tensor] = {}
        for name, target in self._live.items():
            master = masters[name]
            try:
                found[name] = master.view(target.shape)
            except RuntimeError as error:
                raise UnfitVersion(
                    f"tensor {name} is interleaved with others in the trainer, {list(master.shape)} "
                    f"of strides {master.stride()}, and not in this engine: "
                    "layouts of engine and trainer differ"
                ) from error
        return found

    def _receiver_of(self, manifest: WeightManifest) -> WeightReceiver:
        self._receiver = receiver = CheckedReceiver(self._shared)
        return receiver


def check_transport(manifest: WeightManifest) -> None:
    """Refuse versions of every transport except `shared`.

    Raises:
        UnfitVersion: the manifest names another transport.
    """
    if manifest.transport != TRANSPORT:
        raise UnfitVersion(
            f"version {manifest.version} comes by {manifest.transport}, "
            f"this engine accepts only the transport {TRANSPORT}"
        )


class SharedPlan(LoaderTrace):
    """Loader trace without a buffer: every checkpoint tensor is one dense part of a live parameter."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]], recorder: Recorder
    ) -> None:
        """Store the result of `record`.

        Args:
            live, shapes, recorder: see `LoaderTrace`.

        Raises:
            EngineError: a tensor is not one dense part of a parameter; the message names it.
        """
        super().__init__(live, shapes, recorder)
        for name, copies in self._copies.items():
            whole = Window(0, shapes[name], contiguous_stride(shapes[name]))
            if len(copies) != 1 or copies[0].source != whole or copies[0].target.stride != whole.stride:
                raise EngineError(
                    f"tensor {name} is not one dense part of a parameter: "
                    "weights.transport 'shared' cannot serve this model"
                )
        self._staging: SharedStaging | None = None

    def views(self) -> dict[str, torch.Tensor]:
        """Return checkpoint name -> view of the live weights."""
        return {
            name: copies[0].target.on(self.live[copies[0].parameter]) for name, copies in self._copies.items()
        }

    def staging(self, *, architecture: str, tied: bool) -> SharedStaging:
        """Create the staging that `apply` commits from."""
        self._staging = SharedStaging(self.sources_in(self.live), architecture=architecture, tied=tied)
        return self._staging

    def release(self) -> None:
        """Raise EngineError: the trainer computes with this memory."""
        raise EngineError("the trainer computes with the live weights: their memory cannot be released")

    def restore(self) -> None:
        """Return immediately: no memory was released."""

    def apply(self) -> None:
        """Commit the taken version. Raises WeightError, see `SharedStaging`."""
        assert self._staging is not None
        self._staging.apply()


def share_parameters(
    model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]
) -> tuple[SharedTensors, dict[str, torch.Tensor]]:
    """Move a model's parameter objects into memory that other processes can map.

    Args:
        buffers: name -> buffer that the trainer compares with its own.

    Returns: the memory, and copies of `buffers` in it.

    Raises:
        EngineError: shared memory is not available.
    """
    parameters = list(model.parameters())
    try:
        shared = SharedTensors([*parameters, *buffers.values()])
    except WeightError as error:
        raise EngineError(f"the parameters cannot be shared: {error}") from error
    for parameter, tensor in zip(parameters, shared.tensors, strict=False):
        parameter.data = tensor
    return shared, dict(zip(buffers, shared.tensors[len(parameters) :], strict=True))


def describe(
    shared: SharedTensors,
    path: Path,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Write the file through which the trainer finds the shared tensors.

    Args:
        shared: memory of all the tensors.
        parameters: checkpoint name -> live weight.
        buffers: name -> buffer that the trainer compares with its own.

    Raises:
        EngineError: the file cannot be written.
    """
    try:
        shared.write(path, {PARAMETERS: parameters, BUFFERS: buffers})
    except WeightError as error:
        raise EngineError(str(error)) from error
