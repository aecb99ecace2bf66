"""Stages versions of layers whose weights an engine quantizes or repacks after loading.

Versions contain such a layer in checkpoint layout. The weights fill a *shadow* of the layer, and the engine's
own processing converts them to the tensors it computes with. These are staged, and a commit copies them into
the live tensors, which keep their addresses. No live tensor is written before the commit. A shadow's memory
is allocated when its first bytes arrive and released after processing, so about one shadow exists at a time.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from protocol.device.slice_digests import bits_of
from protocol.errors import EngineSettingsError, WeightError
from protocol.weights.boxes import Box, intersection, size_of
from rollout.staging.loaded_weights import files_by_tensor
from rollout.staging.loader_trace import LoaderTrace, Recorder
from rollout.staging.placement import ExpectedTensor, SlicePlacement
from rollout.staging.places import StagingPlace, StagingRoom, allocate_copies, choose_place
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging import Staging, copy_over
from rollout.staging.staging_plan import StagingPlan

SMALLEST = 8
"""Maximum ratio of loaded to processed bytes; above it, the processed tensors must be hidden somewhere."""

SHADOWS = 2
"""Maximum concurrent shadows: a layer may end in the bucket in which the next one begins."""

Staged = Callable[[torch.Tensor], torch.Tensor]
"""Returns the staged copy of a live tensor, on the live tensor's device."""


class Processing(Protocol):
    """Post-load processing of one layer, as its engine does it."""

    name: str
    """Layer name, which prefixes the names of its tensors."""
    inputs: Mapping[str, torch.Tensor]
    """Parameters that the loader fills, on `meta`; empty: the layer computes with other layers' weights."""

    def live(self) -> dict[str, torch.Tensor]:
        """Return path -> tensor of the live layer."""

    def process(self, inputs: Mapping[str, torch.Tensor], staged: Staged) -> dict[str, torch.Tensor]:
        """Return path in the live layer -> tensor created by processing.

        Args:
            inputs: loaded parameters; may be overwritten.
            staged: returns staged copies of other layers' weights.
        """


class LayerShadow:
    """Memory for one layer's loaded weights, and the staged copy of its processed tensors."""

    def __init__(
        self,
        processing: Processing,
        shapes: Mapping[str, tuple[int, ...]],
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        """Find the tensors that the loader fills.

        Args:
            shapes: checkpoint name -> shape of the whole tensor.
            recorder: recorded copies and fills of the loader.
            device: device of the live layer.

        Raises:
            EngineSettingsError: the loader does not fill a parameter exactly; the message names it.
        """
        self.name = processing.name
        self._processing = processing
        self._inputs = {
            name: torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
            for name, meta in processing.inputs.items()
        }
        trace = LoaderTrace(self._inputs, shapes, recorder.within(self._inputs))
        self.sources = trace.sources_in(self._inputs)
        """Sources as in `StagingPlan`; their targets have memory between `open` and `process`."""
        self._storages = [
            (storage, storage.nbytes())
            for storage in (tensor.untyped_storage() for tensor in self._inputs.values())
        ]
        self.live: dict[str, torch.Tensor] = {}
        """Live tensors created by processing, each storage once."""
        self.copy: dict[str, torch.Tensor] = {}
        """Staged copies of `live`."""
        self.close()

    @property
    def nbytes(self) -> int:
        """Memory during processing, bytes: loaded weights plus processed tensors."""
        return sum(nbytes for _, nbytes in self._storages) + sum(one.nbytes for one in self.live.values())

    @property
    def is_last(self) -> bool:
        """Whether the layer is processed after all others, because it uses their staged tensors."""
        return not self._inputs

    def open(self) -> None:
        """Allocate the memory if it is not allocated."""
        for storage, nbytes in self._storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)

    def close(self) -> None:
        """Release the memory. Idempotent."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def learn(self, files: Mapping[str, Any]) -> None:
        """Process the weights that the live layer was loaded from, and compare with the live tensors.

        Args:
            files: tensor name -> open file; empty: only layouts are compared.

        Raises:
            EngineSettingsError: a tensor differs; the message names the layer and the first such tensor.
        """
        self.open()
        for name, source in self.sources.items():
            tensor = files[name].get_tensor(name) if files else torch.zeros(source.shape)
            for part in source.slices:
                part.fill(tensor)
        try:
            found = self._processing.process(self._inputs, lambda tensor: tensor)
        except Exception as error:
            raise EngineSettingsError(
                f"layer {self.name}: its processing cannot be done again, on a shadow: {error!r}"
            ) from error
        live = self._processing.live()
        seen: set[tuple[object, ...]] = set()
        for path, tensor in found.items():
            if path not in live or _layout(live[path]) != _layout(tensor):
                raise EngineSettingsError(f"layer {self.name}: {path} is not laid out as when it was loaded")
            compared = bool(files) or self.is_last
            if compared and not torch.equal(bits_of(tensor.contiguous()), bits_of(live[path].contiguous())):
                raise EngineSettingsError(
                    f"layer {self.name}: repeated processing does not reproduce {path}, so no version could "
                    "be staged"
                )
            place = (live[path].data_ptr(), *_layout(tensor))
            if place not in seen:
                seen.add(place)
                self.live[path] = live[path].detach()
        loaded = sum(nbytes for _, nbytes in self._storages)
        self.close()
        if sum(tensor.nbytes for tensor in self.live.values()) * SMALLEST < loaded:
            raise EngineSettingsError(
                f"layer {self.name}: processed weights are not reachable as tensors of the layer, so no "
                "version could be copied to them"
            )

    def process(self, staged: Staged) -> None:
        """Process the filled weights, and stage the result.

        Raises:
            WeightError: processing failed; the message names the layer. No version is staged.
        """
        try:
            found = self._processing.process(self._inputs, staged)
            for path, copy in self.copy.items():
                if _layout(found[path]) != _layout(self.live[path]):
                    raise WeightError(f"{path} is laid out in another way than the live one")
                copy.copy_(found[path])
        except Exception as error:
            raise WeightError(f"tensors of layer {self.name} could not be processed: {error!r}") from error
        finally:
            self.close()


class ShadowedPlacement(SlicePlacement):
    """Placement of a version's slices that processes a shadow after its last slice."""

    def __init__(
        self,
        expected: Mapping[str, ExpectedTensor],
        shadows: Sequence[LayerShadow],
        staged: Staged,
        wider: Container[str] = (),
    ) -> None:
        super().__init__(expected, wider)
        owners = {id(source): shadow for shadow in shadows for source in shadow.sources.values()}
        self._shadow_of = {
            name: owners[id(source)] for name, source in expected.items() if id(source) in owners
        }
        self._last = [shadow for shadow in shadows if shadow.is_last]
        self._staged = staged
        self._missing: dict[int, int] = {}
        """id of a shadow -> number of missing elements."""
        self._elements = {id(shadow): 0 for shadow in shadows}
        for name, shadow in self._shadow_of.items():
            self._elements[id(shadow)] += sum(size_of(box) for box in self.wanted.get(name, ()))

    def destination(self, name: str, box: Box) -> torch.Tensor | None:
        return None if name in self._shadow_of else super().destination(name, box)

    def place(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        plain = []
        for name, box, tensor in slices:
            shadow = self._shadow_of.get(name)
            if shadow is None:
                plain.append((name, box, tensor))
                continue
            try:
                shadow.open()
            except RuntimeError as error:
                raise WeightError(f"layer {shadow.name}: no memory for its shadow: {error}") from error
            super().place([(name, box, tensor)])
            shared = [intersection(box, wanted) for wanted in self.wanted.get(name, ())]
            arrived = sum(size_of(part) for part in shared if part is not None)
            left = self._missing.get(id(shadow), self._elements[id(shadow)]) - arrived
            self._missing[id(shadow)] = left
            if not left:
                shadow.process(self._staged)
        super().place(plain)

    def finish(self) -> None:
        super().finish()
        self._missing.clear()
        for shadow in self._last:
            shadow.process(self._staged)


class ShadowedStaging(Staging):
    """Staging that routes slices through shadows of processed layers."""

    def __init__(self, plan: "ShadowedPlan", *, architecture: str, tied: bool) -> None:
        super().__init__(plan.sources(), architecture=architecture, tied=tied)
        self._plan = plan

    def _place(self, *version: Any) -> None:
        try:
            super()._place(*version)
        finally:  # a failed version has partly filled some shadows
            for shadow in self._plan.shadows:
                shadow.close()

    def _placement(self) -> SlicePlacement:
        return ShadowedPlacement(self._sources, self._plan.shadows, self._plan.staged, self._wider)


class ShadowedPlan:
    """Plan for an engine that processes some layers: a `StagingPlan` for plain parameters, plus shadows."""

    def __init__(self, plain: StagingPlan, shadows: Sequence[LayerShadow], place: StagingPlace) -> None:
        """Allocate the shadows' staged copies in `place`."""
        self.shadows = shadows
        self._plain = plain
        self._live, self._copy = dict(plain.live), dict(plain.buffer)
        processed = allocate_copies(place, {path: live for one in shadows for path, live in one.live.items()})
        for shadow in shadows:
            shadow.copy = {path: processed[path] for path in shadow.live}
            self._live |= shadow.live
            self._copy |= shadow.copy
        self._copy_of = {_place(tensor): name for name, tensor in self._live.items()}
        copies = [copy for shadow in shadows for copy in shadow.copy.values() if place != StagingPlace.HOST]
        self._memory = ReleasableMemory(copies)
        self.releasable = plain.releasable + copies
        """As in `StagingPlan`."""

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """Live tensors that versions are copied into."""
        return self._live

    @property
    def unplaced(self) -> set[str]:
        """Names of checkpoint tensors without a shard on this rank."""
        return self._plain.unplaced - {name for shadow in self.shadows for name in shadow.sources}

    def staged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a live tensor's staged copy on its device, or the tensor if versions do not change it."""
        name = self._copy_of.get(_place(tensor))
        return tensor if name is None else self._copy[name].to(tensor.device)

    def sources(self) -> dict[str, ExpectedTensor]:
        """Return the checkpoint tensors of plain parameters and of processed layers, with their targets."""
        sources = self._plain.sources()
        for shadow in self.shadows:
            for name, source in shadow.sources.items():
                if name in sources:
                    raise EngineSettingsError(f"tensor {name} fills two layers, one of them processed")
                sources[name] = source
        return sources

    def staging(self, *, architecture: str, tied: bool) -> Staging:
        """Return a staging that fills the plain buffer and the shadows."""
        return ShadowedStaging(self, architecture=architecture, tied=tied)

    def calibrate(self) -> None:
        """Check that staging the plain live weights reproduces them; shadows were compared at creation."""
        self._plain.calibrate()

    def gathered(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield as `LoaderTrace` does; for processed layers the live tensors, which no version contains."""
        yield from self._plain.gathered()
        for shadow in self.shadows:
            for path, tensor in shadow.live.items():
                yield path, tensor, False

    def release(self) -> None:
        """Release the device memory of buffers, shadows and staged copies. Idempotent."""
        self._plain.release()
        for shadow in self.shadows:
            shadow.close()
        self._memory.release()

    def restore(self) -> None:
        """Reallocate the memory. Idempotent. Raises EngineError if memory is insufficient."""
        self._memory.restore()
        self._plain.restore()

    def apply(self) -> None:
        """Copy the staged tensors over the live ones."""
        copy_over(self._live, self._copy)


def shadowed_plan(
    live: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    recorder: Recorder,
    processings: Sequence[Processing],
    room: StagingRoom,
    model_dir: Path,
) -> ShadowedPlan:
    """Plan the staging of a model with layers that are processed after loading.

    Args:
        live, shapes, recorder: see `LoaderTrace`; live parameters on `meta` are inputs of `processings`.
        processings: one per processed layer, in the engine's processing order.
        model_dir: files that the live weights were loaded from.

    Raises:
        EngineError: a layer cannot be staged, or memory is insufficient.
    """
    plain = {name: tensor for name, tensor in live.items() if not tensor.is_meta}
    device = next(iter(plain.values())).device
    filled = {copy.parameter for copy in recorder.copies}
    shadows = [
        LayerShadow(processing, shapes, recorder, device)
        for processing in processings
        if not processing.inputs or filled & set(processing.inputs)
    ]
    with ExitStack() as stack:
        files = files_by_tensor(stack, model_dir)
        for shadow in shadows:
            shadow.learn(files)
    if room.place == StagingPlace.AUTO:
        room = replace(room, place=StagingPlace.COPY)
    tensors = [*plain.values(), *(tensor for shadow in shadows for tensor in shadow.live.values())]
    largest = max((tensor.nbytes for tensor in tensors), default=0)
    place = choose_place(
        room, tensors, largest, SHADOWS * max((shadow.nbytes for shadow in shadows), default=0)
    )
    if place == StagingPlace.LAYERS:
        raise EngineSettingsError(
            f"setting engine.staging: 'layers' has no copy, and the engine processes {shadows[0].name} after "
            "loading, which may fail; use 'device', 'host' or 'copy'"
        )
    return ShadowedPlan(StagingPlan(plain, shapes, recorder.within(plain), place), shadows, place)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's storage and offset; addresses may change when memory is released and restored."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.dtype
