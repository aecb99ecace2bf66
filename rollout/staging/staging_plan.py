"""Plans the staging of a model whose loader was traced, in the place that fits."""

import math
from collections.abc import Iterable, Mapping

import torch

from protocol.device.slice_digests import bits_of
from protocol.errors import EngineSettingsError
from rollout.staging.layers import LayeredPlan
from rollout.staging.loader_trace import Load, LoaderRecord, LoaderTrace, Recorder, record
from rollout.staging.placement import ExpectedTensor
from rollout.staging.places import StagingPlace, StagingRoom, choose, empty_in
from rollout.staging.releasable_memory import ReleasableMemory
from rollout.staging.staging import Staging, copy_over


class StagingPlan(LoaderTrace):
    """Loader trace with a staging buffer of the parameters' layout, on their device or on the host."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        recorder: Recorder | LoaderRecord,
        place: StagingPlace = StagingPlace.DEVICE,
    ) -> None:
        """Allocate the buffer.

        Args:
            live: see `LoaderTrace`.
            shapes: see `LoaderTrace`.
            recorder: see `LoaderTrace`.
            place: `DEVICE` or `HOST`, where there is room for the buffer.

        Raises:
            EngineSettingsError: naming a parameter that the loader does not fill exactly, or that is
                not dense.
        """
        super().__init__(live, shapes, recorder)
        self.buffer = empty_in(place, self.live)
        for name, tensor in self.buffer.items():
            if tensor.stride() != self.live[name].stride() or self.live[name].storage_offset():
                raise EngineSettingsError(f"parameter {name} is not dense: it cannot be staged")
        self.releasable = [] if place == StagingPlace.HOST else list(self.buffer.values())
        """Memory of the device that the copy takes: an engine that sleeps gives it back."""
        self._memory = ReleasableMemory(self.releasable)
        self._padding: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(part of the buffer, its values) of the padding, which no version brings; while released."""

    def staging(self, *, architecture: str, tied: bool) -> Staging:
        """Return a staging that fills the buffer."""
        return Staging(self.sources(), architecture=architecture, tied=tied)

    def sources(self) -> dict[str, ExpectedTensor]:
        """Return the checkpoint tensors that the loader used, and the parts of the buffer that they fill."""
        return self.sources_in(self.buffer)

    def calibrate(self) -> None:
        """Send the live weights through the plan, over a buffer of inverted bits, and compare.

        Raises:
            EngineSettingsError: naming the first parameter that comes out different: the loader wrote one
                place twice, or left one out.
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
        """Release the buffer's memory. What was staged is lost; `sources` stay valid. Idempotent."""
        if not self._padding:
            padding = [
                window.on(self.buffer[name]) for name, fills in self._fills.items() for window in fills
            ]
            self._padding = [(tensor, tensor.cpu().clone()) for tensor in padding]
        self._memory.release()

    def restore(self) -> None:
        """Take the buffer's memory again. Idempotent.

        Raises:
            EngineError: there is no room.
        """
        self._memory.restore()
        for tensor, values in self._padding:
            tensor.copy_(values)
        self._padding.clear()

    def apply(self) -> None:
        """Copy the buffer over the live parameters: no allocation, no I/O, no communication."""
        copy_over(self.live, self.buffer)


AnyPlan = StagingPlan | LayeredPlan
"""A plan for versions that are copied into the live parameters."""


def make_plan(
    live: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    recorder: Recorder,
    room: StagingRoom,
) -> AnyPlan:
    """Return the plan for the place that the settings and the free memory choose.

    Args:
        live: see `LoaderTrace`.
        shapes: see `LoaderTrace`.
        recorder: see `LoaderTrace`.
        room: settings of the staging copy.

    Raises:
        EngineError: as the plan; or there is no room for what staging takes.
    """
    itemsize = max((tensor.element_size() for tensor in live.values()), default=0)
    largest = max((math.prod(shape) for shape in shapes.values()), default=0) * itemsize
    place = choose(room, live.values(), largest)
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
        load: see `record`.
        parameters: see `record`.
        shapes: see `record`.
        dtype: see `record`.
        room: settings of the staging copy.

    Raises:
        EngineError: as `record` and `make_plan`.
    """
    return make_plan(*record(load, parameters, shapes, dtype), room)
