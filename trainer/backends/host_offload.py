"""Moves the trainer's memory from its device to the host while other processes use the device, and back."""

from collections.abc import Iterable

import torch

from protocol.errors import TetherError

MIB = 1 << 20


class HostOffload:
    """Offloaded storages, whose contents are restored bit for bit.

    Tensors and views stay the same objects, and must not be used while offloaded. Host copies are reused,
    because page-locking them for a GPU is slow.
    """

    def __init__(self, device: torch.device) -> None:
        """Create an empty set of offloaded storages for a device."""
        self._device = device
        self._copies: dict[int, torch.Tensor] = {}
        self._away: dict[int, torch.UntypedStorage] = {}
        self._blank: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def in_use(self) -> bool:
        """Whether any storage is offloaded."""
        return bool(self._away or self._blank)

    @property
    def nbytes(self) -> int:
        """Bytes freed on the device, with or without a host copy."""
        return sum(self._copies[key].nbytes for key in self._away) + sum(nbytes for _, nbytes in self._blank)

    def offload(self, tensors: Iterable[torch.Tensor], *, blank: Iterable[torch.Tensor] = ()) -> int:
        """Move tensors to the host; return `nbytes`.

        Args:
            tensors: tensors to move; tensors on another device are ignored.
            blank: tensors to free without a copy; they are zero after `onload`.
        """
        blanks = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in blank)}
        for storage in blanks.values():
            if storage.nbytes() and storage.resizable():
                self._blank.append((storage, storage.nbytes()))
                storage.resize_(0)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # CPU storages that are mapped from a file cannot be resized
            if (
                storage.nbytes()
                and storage.resizable()
                and tensor.device.type == self._device.type
                and storage._cdata not in blanks
            ):
                self._move_to_host(storage)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self.nbytes

    def onload(self) -> None:
        """Move all storages back to the device.

        Raises:
            TetherError: the device has too little free memory; the contents stay on the host.
        """
        needed, device = self.nbytes, self._device
        if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
            raise TetherError(
                f"the trainer's state takes {needed // MIB} MiB, {free // MIB} MiB are free on {device}: "
                "another process holds its memory, for example an engine that did not sleep"
            )
        for key, storage in self._away.items():
            copy = self._copies[key]
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage(), non_blocking=False)
        self._away.clear()
        for storage, nbytes in self._blank:
            storage.resize_(nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._blank.clear()

    def _move_to_host(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        copy = self._copies.get(key)
        if copy is None or copy.nbytes != nbytes:
            copy = self._copies[key] = torch.empty(
                nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
            )
        copy.untyped_storage().copy_(storage, non_blocking=False)
        storage.resize_(0)
        self._away[key] = storage


class Offloadable:
    """A rank's shard of a trained model, whose memory can move to the host and back."""

    _host: HostOffload

    def offload(self) -> int:
        """Move all training state from the device to the host; as `Backend.offload`."""
        if not self._host.in_use:
            tensors, blank = self._offloadable_tensors()
            self._host.offload(tensors, blank=blank)
        return self._host.nbytes

    def onload(self) -> None:
        """Move the state back to the device; as `Backend.onload`."""
        self._host.onload()

    def _offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Return tensors to copy to the host, and tensors to free without a copy (then zero)."""
        raise NotImplementedError
