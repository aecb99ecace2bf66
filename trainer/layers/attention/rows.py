"""Reads and changes some rows of arrays: neighbours as they lie, others by their indices."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows, at least one, each of which is there once."""

    index: torch.Tensor
    """int64 [n]."""
    first: int | None
    """The first of them, if they are neighbours in their order."""

    @classmethod
    def at(cls, index: torch.Tensor) -> "Rows":
        """Return the rows with these indices, int64 [n], on the host."""
        first = int(index[0])
        run = torch.arange(first, first + len(index))
        return cls(index, first if torch.equal(index, run) else None)

    def to(self, device: torch.device) -> "Rows":
        """Return them with the indices on a device."""
        return replace(self, index=to_device(self.index, device))

    def take(self, array: torch.Tensor) -> torch.Tensor:
        """Return these rows of an array [T, ...], a view if they are neighbours."""
        if self.first is None:
            return array.index_select(0, self.index)
        return array.narrow(0, self.first, len(self.index))

    def put(self, array: torch.Tensor, values: torch.Tensor) -> None:
        """Replace these rows of an array by `values` [n, ...]."""
        if self.first is None:
            array.index_copy_(0, self.index, values)
        else:
            self.take(array).copy_(values)

    def add(self, array: torch.Tensor, values: torch.Tensor) -> None:
        """Add `values` [n, ...] to these rows of an array."""
        if self.first is None:
            array.index_add_(0, self.index, values.to(array.dtype))
        else:
            self.take(array).add_(values)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
