"""Copies the bytes of a version into the staging copy, as whole tensors or as slices in order of arrival."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import torch

from protocol.errors import WeightError
from protocol.weights.boxes import Box, box_of, disjoint, intersection, relative, shape_of, size_of, whole


@dataclass(frozen=True, slots=True)
class Slice:
    """Strided part of a checkpoint tensor, and the part of the staging buffer that it fills."""

    offset: int
    """Offset from the source's start, elements."""
    size: tuple[int, ...]
    """Shape of both parts."""
    stride: tuple[int, ...]
    """Strides in the source, elements."""
    target: torch.Tensor
    """View of the staging buffer with shape `size`."""

    def fill(self, source: torch.Tensor) -> None:
        """Copy the part out of the contiguous `source`."""
        self.target.copy_(
            source.as_strided(self.size, self.stride, int(source.storage_offset()) + self.offset)
        )


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Tensor that the engine expects in a version."""

    dtype: str
    """dtype name as in manifests, such as "float32"."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    slices: tuple[Slice, ...]
    """Parts that go into the staging buffer."""


class SlicePlacement:
    """Slices of a version that a rank needs, and their destinations.

    A target that is not a box of its source, such as a permuted one, is filled after the whole tensor has
    arrived. A target with a wider dtype gets the converted values.
    """

    def __init__(self, expected: Mapping[str, ExpectedTensor], wider: Container[str] = ()) -> None:
        """Compute the needed parts; targets of tensors in `wider` have another dtype."""
        self._wider = wider
        self._places: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        """Name -> (box, matching part of the staging copy with the box's shape)."""
        self._assembled: dict[str, tuple[Slice, ...]] = {}
        """Name -> parts of tensors that must be assembled first."""
        self._whole: dict[str, tuple[torch.Tensor, int]] = {}
        """Name -> (partly assembled tensor, number of missing elements)."""
        self._targets: dict[tuple[str, Box], list[tuple[torch.Tensor, tuple[slice, ...] | None]]] = {}
        """(name, box) of earlier slices -> result of `_targets_of`."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.wanted: dict[str, tuple[Box, ...]] = {}
        """Name -> disjoint boxes; names without a needed box are absent."""
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
        """Return the target of a slice, if there is only one and no conversion is needed; else None."""
        targets = [] if name in self._assembled else self._targets_of(name, box)
        is_alone = len(targets) == 1 and targets[0][1] is None and name not in self._wider
        return targets[0][0] if is_alone else None

    def place(self, slices: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Copy slices, each (name, box, elements), to their destinations.

        A single call copies all slices, because each call takes Python time that the engine's steps need.
        """
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for name, box, tensor in slices:
            if name in self._assembled:
                self._assemble(name, box, tensor)
                continue
            for target, part in self._targets_of(name, box):
                if target.data_ptr() != tensor.data_ptr():  # otherwise it was received in place
                    targets.append(target)
                    sources.append(tensor if part is None else tensor[part])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _targets_of(self, name: str, box: Box) -> list[tuple[torch.Tensor, tuple[slice, ...] | None]]:
        """Return the targets of a slice, each with the matching part of the slice; None: the whole slice."""
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
        """Raise WeightError if a tensor is only partly assembled."""
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
