"""Plans the staging of a model from its traced loader, in the place that fits."""

import math
from collections.abc import Iterable, Mapping

import torch

from protocol.device.slice_digests import bits_of
from protocol.errors import EngineSettingsError
from rollout.staging.layers import LayeredPlan
from rollout.staging.loader_trace import Load, LoaderRecord, LoaderTrace, Recorder, record
from rollout.staging.placement import ExpectedTensor
from rollout.staging.places import StagingPlace, StagingRoom, allocate_copies, choose_place
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging import Staging, copy_over


class StagingPlan(LoaderTrace):
    """Loader trace with a staging buffer in the parameters' layout, on their device or on the host."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        recorder: Recorder | LoaderRecord,
        place: StagingPlace = StagingPlace.DEVICE,
    ) -> None:
        """Allocate the buffer.

        Args:
            live, shapes, recorder: see `LoaderTrace`.
            place: `DEVICE` or `HOST`, with enough memory for the buffer.

        Raises:
            EngineSettingsError: a parameter is not filled exactly by the loader, or is not dense; the message
                names it.
        """
        super().__init__(live, shapes, recorder)
        self.buffer = allocate_copies(place, self.live)
        for name, tensor in self.buffer.items():
            if tensor.stride() != self.live[name].stride() or self.live[name].storage_offset():
                raise EngineSettingsError(f"parameter {name} is not dense: it cannot be staged")
        self.releasable = [] if place == StagingPlace.HOST else list(self.buffer.values())
        """Device memory of the copy, released during sleep."""
        self._memory = ReleasableMemory(self.releasable)
        self._padding: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(part of the buffer, saved values) of padding, which versions lack; only while released."""

    def staging(self, *, architecture: str, tied: bool) -> Staging:
        """Return a staging that fills the buffer."""
        return Staging(self.sources(), architecture=architecture, tied=tied)

    def sources(self) -> dict[str, ExpectedTensor]:
        """Return the checkpoint tensors that the loader used, with the parts of the buffer that they fill."""
        return self.sources_in(self.buffer)

    def calibrate(self) -> None:
        """Send the live weights through the plan, over a buffer of inverted bits, and compare.

        Raises:
            EngineSettingsError: a parameter differs, because the loader wrote a place twice or not at all;
                the message names the first one.
        """
        with torch.no_grad():
            for name, tensor in self.buffer.items():
                bits_of(tensor).copy_(bits_of(self.live[name])).bitwise_not_()
            for name, fills in self._fills.items():
                for window in fills:
                    window.on(self.buffer[name]).copy_(window.on(self.live[name]))
            sources = self.sources()
            for name, tensor, _ in self.gathered():
                for part in sources[name].slices:
                    part.fill(tensor)
            for name, tensor in self.buffer.items():
                if not torch.equal(bits_of(tensor).to(self.live[name].device), bits_of(self.live[name])):
                    raise EngineSettingsError(
                        f"parameter {name}: staging the live weights does not reproduce them"
                    )

    def release(self) -> None:
        """Release the buffer. The staged version is lost; `sources` stay valid. Idempotent."""
        if not self._padding:
            padding = [
                window.on(self.buffer[name]) for name, fills in self._fills.items() for window in fills
            ]
            self._padding = [(tensor, tensor.cpu().clone()) for tensor in padding]
        self._memory.release()

    def restore(self) -> None:
        """Reallocate the buffer. Idempotent.

        Raises:
            EngineError: memory is insufficient.
        """
        self._memory.restore()
        for tensor, values in self._padding:
            tensor.copy_(values)
        self._padding.clear()

    def apply(self) -> None:
        """Copy the buffer over the live parameters: no allocation, no I/O, no communication."""
        copy_over(self.live, self.buffer)


AnyPlan = StagingPlan | LayeredPlan
"""Plan for versions that are copied into the live parameters."""


def make_plan(
    live: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    recorder: Recorder,
    room: StagingRoom,
) -> AnyPlan:
    """Return a plan for the place selected by settings and free memory.

    Args:
        live, shapes, recorder: see `LoaderTrace`.

    Raises:
        EngineError: the plan cannot be created, or memory is insufficient.
    """
    itemsize = max((tensor.element_size() for tensor in live.values()), default=0)
    largest = max((math.prod(shape) for shape in shapes.values()), default=0) * itemsize
    place = choose_place(room, live.values(), largest)
    if place == StagingPlace.LAYERS:
        return LayeredPlan(live, shapes, recorder)
    return StagingPlan(live, shapes, recorder, place)


def trace(
    load: Load,
    parameters: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    room: StagingRoom,
) -> AnyPlan:
    """Plan the staging of a model.

    Args:
        load, parameters, shapes, dtype: see `record`.

    Raises:
        EngineError: see `record` and `make_plan`.
    """
    return make_plan(*record(load, parameters, shapes, dtype), room)
