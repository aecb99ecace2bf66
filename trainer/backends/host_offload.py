"""Moves the trainer's memory from its device to the host while others use the device, and back."""

from collections.abc import Iterable

import torch

from protocol.errors import TetherError

MIB = 1 << 20


class HostOffload:
    """Contents of storages on the host, restored bit for bit.

    Tensors and their views stay the same objects; while they are offloaded they must not be used. The host's
    copies are kept for the next time, as page-locking them, where the device is a GPU, takes long.
    """

    def __init__(self, device: torch.device) -> None:
        """Move tensors between a device and the host."""
        self._device = device
        self._copies: dict[int, torch.Tensor] = {}
        self._away: dict[int, torch.UntypedStorage] = {}
        self._blank: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def in_use(self) -> bool:
        """Whether something is offloaded."""
        return bool(self._away or self._blank)

    @property
    def nbytes(self) -> int:
        """Bytes that were freed on the device, with a copy on the host or without."""
        return sum(self._copies[key].nbytes for key in self._away) + sum(nbytes for _, nbytes in self._blank)

    def offload(self, tensors: Iterable[torch.Tensor], *, blank: Iterable[torch.Tensor] = ()) -> int:
        """Move tensors to the host; returns `nbytes`.

        Args:
            tensors: what to move, if it lies on the device.
            blank: tensors whose memory is freed without a copy; they are zero after `onload`.
        """
        blanks = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in blank)}
        for storage in blanks.values():
            if storage.nbytes() and storage.resizable():
                self._blank.append((storage, storage.nbytes()))
                storage.resize_(0)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # storages on a CPU may be mapped from a file, and cannot be resized then
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
        """Move everything back to the device. Returns at once if they are there.

        Raises:
            TetherError: there is no room for it; the contents stay on the host.
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
    """A rank's part of a trained model, whose memory can move to the host and back."""

    _host: HostOffload

    def offload(self) -> int:
        """Move everything that training has on the device to the host; as `Backend.offload`."""
        if not self._host.in_use:
            tensors, blank = self._held()
            self._host.offload(tensors, blank=blank)
        return self._host.nbytes

    def onload(self) -> None:
        """Move it back; as `Backend.onload`."""
        self._host.onload()

    def _held(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        """Return tensors to keep, and ones whose memory is freed alone, which are zero afterwards."""
        raise NotImplementedError
