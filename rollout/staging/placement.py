"""Places the bytes of a version in the staging copy: whole tensors, or slices as they come."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from protocol.errors import WeightError
from protocol.weights.boxes import Box, box_of, disjoint, intersection, relative, shape_of, size_of, whole


@dataclass(frozen=True, slots=True)
class Slice:
    """Strided part of a checkpoint tensor, and the part of the staging buffer that it fills."""

    offset: int
    """Elements from the source's start."""
    size: tuple[int, ...]
    """Shape of both parts."""
    stride: tuple[int, ...]
    """In the source, elements."""
    target: torch.Tensor
    """View of the staging buffer, shape `size`."""

    def fill(self, source: torch.Tensor) -> None:
        """Copy the part out of the contiguous `source`."""
        self.target.copy_(
            source.as_strided(self.size, self.stride, int(source.storage_offset()) + self.offset)
        )


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor that the engine expects in a version."""

    dtype: str
    """As in manifests: "float32"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    slices: tuple[Slice, ...]
    """Parts that go into the staging buffer."""


class SlicePlacement:
    """Slices that a rank wants of a version, and their destinations.

    A target that is no box of its source, such as a permuted one, is filled once the whole tensor is there.
    A target of a wider type gets the values of its source.
    """

    def __init__(self, expected: Mapping[str, ExpectedTensor], wider: Container[str] = ()) -> None:
        """Find the parts that are wanted; the targets of tensors in `wider` have another type."""
        self._wider = wider
        self._places: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        """Name -> boxes, and the parts of the staging copy that they fill, in their shape."""
        self._assembled: dict[str, tuple[Slice, ...]] = {}
        """Name -> parts of the tensors that have to be whole first."""
        self._whole: dict[str, tuple[torch.Tensor, int]] = {}
        """Name -> (tensor in the making, elements that are missing)."""
        self._targets: dict[tuple[str, Box], list[tuple[torch.Tensor, tuple[slice, ...] | None]]] = {}
        """Name and box of a slice that has come before -> see `_targets_of`."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.wanted: dict[str, tuple[Box, ...]] = {}
        """Name -> disjoint boxes; names without a wanted box are absent."""
        for name, source in expected.items():
            self._shapes[name] = source.shape
            boxes = [box_of(source.shape, part.offset, part.size, part.stride) for part in source.slices]
            if None in boxes:
                self._assembled[name] = source.slices
                self.wanted[name] = (whole(source.shape),)
                continue
            filled = [box for box in boxes if box is not None]
            self._places[name] = [
                (box, part.target.view(shape_of(box)))
                for box, part in zip(filled, source.slices, strict=True)
            ]
            if wanted := disjoint(filled):
                self.wanted[name] = wanted

    def destination(self, name: str, box: Box) -> torch.Tensor | None:
        """Return the part of the staging copy that a slice fills, if it goes nowhere else and as it is."""
        targets = [] if name in self._assembled else self._targets_of(name, box)
        is_alone = len(targets) == 1 and targets[0][1] is None and name not in self._wider
        return targets[0][0] if is_alone else None

    def place(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Copy slices of tensors, each (name, box, elements), to where they belong.

        They are copied by one call: each takes Python's time, which an engine's steps need.
        """
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for name, box, tensor in slices:
            if name in self._assembled:
                self._assemble(name, box, tensor)
                continue
            for target, part in self._targets_of(name, box):
                if target.data_ptr() != tensor.data_ptr():  # else it was received there
                    targets.append(target)
                    sources.append(tensor if part is None else tensor[part])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _targets_of(self, name: str, box: Box) -> list[tuple[torch.Tensor, tuple[slice, ...] | None]]:
        """Return the targets that a slice fills, each with the slice's part for it; None: all of it."""
        targets = self._targets.get((name, box))
        if targets is None:
            targets = self._targets[name, box] = []
            for place, target in self._places.get(name, ()):
                shared = intersection(place, box)
                if shared is not None:
                    part = None if shared == box else relative(shared, box)
                    targets.append((target[relative(shared, place)], part))
        return targets

    def finish(self) -> None:
        """Check that every tensor is assembled. Raises WeightError for a half assembled one."""
        if self._whole:
            raise WeightError(f"tensor {next(iter(self._whole))} did not arrive whole")

    def _assemble(self, name: str, box: Box, tensor: torch.Tensor) -> None:
        shape = self._shapes[name]
        if box == whole(shape) and tensor.is_contiguous():
            for part in self._assembled[name]:
                part.fill(tensor)
            return
        tensor_so_far, missing = self._whole.pop(name, (None, size_of(whole(shape))))
        if tensor_so_far is None:
            tensor_so_far = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        tensor_so_far[relative(box, whole(shape))].copy_(tensor)
        if missing > size_of(box):
            self._whole[name] = tensor_so_far, missing - size_of(box)
            return
        for part in self._assembled[name]:
            part.fill(tensor_so_far)
