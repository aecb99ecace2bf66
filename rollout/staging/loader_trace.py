"""Traces an engine's weight loader, to find where each checkpoint tensor goes in its parameters.

The loader runs once on meta tensors with the checkpoint's names. A dispatch mode records every copy into a
live parameter without executing it, so no live byte changes. This covers fused, sharded and padded parameters
of any model. `calibrate` sends the live weights through the plan and expects equal bits. `loaded_weights.py`
detects parameters that were repacked after loading.
"""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.device.slice_digests import bits_of
from protocol.errors import EngineSettingsError
from rollout.staging.placement import ExpectedTensor, Slice
from rollout.staging.staging import WIDENINGS, dtype_name, storage_key, stored_once

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]
"""Loader of a model; takes (checkpoint name, tensor) pairs."""


@dataclass(frozen=True, slots=True)
class Window:
    """Strided part of a storage; offset and strides in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Window":
        """Return the part of its storage that `tensor` covers."""
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def on(self, base: torch.Tensor) -> torch.Tensor:
        """Return a view of this part of the storage of `base`."""
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Copy:
    """One recorded copy of the loader."""

    name: str
    """Checkpoint name of the source."""
    source: Window
    parameter: str
    """Name of the live parameter."""
    target: Window


class LoaderRecord(NamedTuple):
    """Recorded copies and fills of a loader."""

    copies: list[Copy]
    fills: dict[str, list[Window]]
    """`copies`, `fills`: as in `Recorder`."""


class LoaderTrace:
    """Copies from checkpoint tensors to parameters, as a loader would execute them."""

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        recorder: "Recorder | LoaderRecord",
    ) -> None:
        """Store the result of `record`.

        Args:
            live: live parameters, each storage once.
            shapes: checkpoint name -> shape of the whole tensor.
            recorder: recorded copies and fills.

        Raises:
            EngineSettingsError: the loader does not fill a parameter exactly; the message names it.
        """
        self.live = dict(live)
        self._shapes = shapes
        self._copies: dict[str, list[Copy]] = {}
        for copy in recorder.copies:
            self._copies.setdefault(copy.name, []).append(copy)
        self._fills = recorder.fills
        self._check_counts()

    def sources_in(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, ExpectedTensor]:
        """Return the checkpoint tensors that the loader used, with the parts of `parameters` that they fill.

        Args:
            parameters: tensors with the names and layout of the live parameters.
        """
        sources = {}
        for name, copies in self._copies.items():
            parts = tuple(
                Slice(c.source.offset, c.source.size, c.source.stride, c.target.on(parameters[c.parameter]))
                for c in copies
            )
            sources[name] = ExpectedTensor(
                dtype_name(self.live[copies[0].parameter].dtype), self._shapes[name], parts
            )
        return sources

    @property
    def unplaced(self) -> set[str]:
        """Names of checkpoint tensors without a shard on this rank."""
        return self._shapes.keys() - self._copies.keys()

    def copies(self) -> Iterator[Copy]:
        """Yield the loader's copies, grouped by checkpoint tensor in loading order."""
        for copies in self._copies.values():
            yield from copies

    def gathered(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Yield the live weights as checkpoint tensors, the inverse of loading.

        Yields: (name, tensor, whether this rank holds the whole tensor); missing parts are zero.
        """
        for name, copies in self._copies.items():
            tensor = self._gathered(name)
            yield name, tensor, sum(math.prod(copy.source.size) for copy in copies) == tensor.numel()

    def calibrate(self) -> None:
        """Send the live weights through the trace, over inverted bits, and compare; one parameter at a time.

        Raises:
            EngineSettingsError: a parameter differs, because the loader wrote a place twice or not at all;
                the message names the first one.
        """
        filling: dict[str, list[Copy]] = {name: [] for name in self.live}
        for copy in self.copies():
            filling[copy.parameter].append(copy)
        with torch.no_grad():
            for name, live in self.live.items():
                inverted = bits_of(live).clone().bitwise_not_()
                for window in self._fills.get(name, ()):
                    window.on(inverted).copy_(window.on(bits_of(live)))
                for copy in filling[name]:
                    copy.target.on(inverted).copy_(copy.source.on(bits_of(self._gathered(copy.name))))
                if not torch.equal(inverted, bits_of(live)):
                    raise EngineSettingsError(
                        f"parameter {name}: staging the live weights does not reproduce them"
                    )

    def _gathered(self, name: str) -> torch.Tensor:
        """Return one checkpoint tensor of the live weights; shards of other ranks are zero."""
        copies = self._copies[name]
        base = self.live[copies[0].parameter]
        tensor = torch.zeros(self._shapes[name], dtype=base.dtype, device=base.device)
        for copy in copies:
            copy.source.on(tensor).copy_(copy.target.on(self.live[copy.parameter]))
        return tensor

    def _check_counts(self) -> None:
        counts = dict.fromkeys(self.live, 0)
        for copies in self._copies.values():
            for copy in copies:
                counts[copy.parameter] += math.prod(copy.target.size)
        for name, fills in self._fills.items():
            counts[name] += sum(math.prod(window.size) for window in fills)
        for name, tensor in self.live.items():
            if counts[name] != tensor.numel() or not tensor.numel():
                raise EngineSettingsError(
                    f"parameter {name} has {tensor.numel()} elements, the loader wrote {counts[name]}: "
                    "it cannot be staged"
                )


class Recorder(TorchDispatchMode):
    """Dispatch mode that records copies and constant fills of parameters without executing them.

    Any other write to a parameter raises EngineError.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch `parameters`; copies must read from `sources`: checkpoint name -> meta tensor."""
        super().__init__()
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._parameters = {storage_key(tensor): name for name, tensor in parameters.items()}
        if len(self._parameters) != len(parameters):
            raise EngineSettingsError("two parameters share one storage: they cannot be staged")
        self.copies: list[Copy] = []
        self.fills: dict[str, list[Window]] = {}
        """Parameter -> parts filled with a constant."""
        self._joined: dict[int, tuple[torch.Tensor, Sequence[torch.Tensor], int]] = {}
        """Storage of concatenated sources -> (result, sources, dimension)."""

    def within(self, parameters: Container[str]) -> "LoaderRecord":
        """Return the record restricted to these parameters."""
        return LoaderRecord(
            [copy for copy in self.copies if copy.parameter in parameters],
            {name: fills for name, fills in self.fills.items() if name in parameters},
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = args[0] if args else None
        if func is torch.ops.aten.cat.default and all(self._source_of(part) for part in args[0]):
            joined = func(*args, **(kwargs or {}))
            self._joined[joined.untyped_storage()._cdata] = joined, args[0], (*args[1:], 0)[0]
            return joined
        if not isinstance(target, torch.Tensor):
            return func(*args, **(kwargs or {}))
        parameter = self._parameters.get(storage_key(target))
        if self._source_of(target) and _has_its_values(func, target, kwargs or {}):
            return target  # skip the conversion: the recorded copy reads the source
        if parameter is None or not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._record_copy(parameter, target, args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            if target.numel():
                self.fills.setdefault(parameter, []).append(Window.of(target))
        else:
            raise EngineSettingsError(
                f"parameter {parameter}: its loader calls {func}, which cannot be traced"
            )
        return target

    def _source_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the checkpoint tensor that a meta tensor belongs to."""
        return self._sources.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    def _record_copy(self, parameter: str, target: torch.Tensor, source: torch.Tensor) -> None:
        joined, parts, dim = self._joined.get(source.untyped_storage()._cdata, (target, (), 0))
        if parts and Window.of(joined) == Window.of(source) and joined.shape == target.shape:
            for piece, part in zip(
                target.split([part.shape[dim] for part in parts], dim), parts, strict=True
            ):
                self._record_copy(parameter, piece, part)
            return
        name = self._source_of(source)
        if name is None or source.shape != target.shape:
            raise EngineSettingsError(
                f"parameter {parameter}: its loader computes what it copies ({list(source.shape)}), "
                "which cannot be traced"
            )
        self.copies.append(Copy(name, Window.of(source), parameter, Window.of(target)))


def _has_its_values(func: Any, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator copies `tensor` unchanged or to a wider dtype."""
    if func is not torch.ops.aten._to_copy.default:
        return func is torch.ops.aten.clone.default
    dtype = kwargs.get("dtype")
    return dtype is not None and (dtype_name(tensor.dtype), dtype_name(dtype)) in WIDENINGS


def record(
    load: Load,
    parameters: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], Mapping[str, tuple[int, ...]], Recorder]:
    """Run `load` on meta tensors, and record its copies and fills.

    Args:
        parameters: all parameters of the model; tied ones may occur repeatedly.
        shapes: checkpoint name -> shape of the whole tensor.
        dtype: dtype of the meta tensors.

    Returns: arguments of `LoaderTrace`: live parameters (each storage once), `shapes`, and the record.

    Raises:
        EngineSettingsError: the loader does not fill a parameter with plain copies; the message names it.
    """
    live = stored_once(parameters)
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    recorder = Recorder(sources, live)
    with torch.no_grad(), recorder:
        load(iter(sources.items()))
    return live, shapes, recorder
