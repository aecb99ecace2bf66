"""Memory of an engine: room for the staging copy, and giving memory back while the engine sleeps."""

from collections.abc import Iterable

import psutil  # type: ignore[import-untyped]
import torch

from protocol.errors import EngineError

MIB = 1 << 20
RECEIVING_BYTES = 512 * MIB
"""On a GPU, what comes of a version takes so much beside the staging copy: pieces on their way, and those
that are not hashed yet."""


class ReleasableMemory:
    """The storages of some tensors: given back and taken again. The tensors stay the same objects, and their
    views are valid again.

    In between nobody may touch them: they point nowhere.
    """

    def __init__(self, dropped: Iterable[torch.Tensor], kept: Iterable[torch.Tensor] = ()) -> None:
        """`dropped`: their contents are lost; `kept`: theirs wait in host memory. Where a storage is in both,
        it is dropped."""
        lost, held = _storages(dropped), _storages(kept)
        self._kept = {key: storage for key, storage in held.items() if key not in lost}
        self._sizes = {key: (storage, storage.nbytes()) for key, storage in (lost | self._kept).items()}
        self._saved: dict[int, torch.UntypedStorage] = {}

    def release(self) -> None:
        """Nothing changes if it has been given back."""
        for key, storage in self._kept.items():
            if storage.nbytes():
                self._saved[key] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
                self._saved[key].copy_(storage)
        for storage, _ in self._sizes.values():
            storage.resize_(0)
        empty_cache()

    def restore(self) -> None:
        """Raises EngineError if there is no room; it can be tried again then. Nothing changes if it has not
        been given back."""
        try:
            for storage, nbytes in self._sizes.values():
                if storage.nbytes() != nbytes:
                    storage.resize_(nbytes)
        except RuntimeError as error:
            total = sum(nbytes for _, nbytes in self._sizes.values())
            raise EngineError(f"no room for the {_mib(total)} MiB that were given back: {error}") from error
        for key in list(self._saved):
            self._kept[key].copy_(self._saved.pop(key))


def check_room(tensors: Iterable[torch.Tensor], staging_mb: int) -> None:
    """Before a copy of `tensors` is allocated on their device.

    Args:
        staging_mb: how much the copy may take, MiB; 0: as much as is free.

    Raises:
        EngineError: with the numbers and the settings that decide them.
    """
    tensors = list(tensors)
    needed = sum(tensor.nbytes for tensor in tensors)
    if 0 < staging_mb * MIB < needed:
        raise EngineError(
            f"engine.staging_mb is {staging_mb}, a copy of the parameters takes {_mib(needed)} MiB: set it to that, or to 0"
        )
    device = tensors[0].device if tensors else torch.device("cpu")
    free = _free_bytes(device)
    on_gpu = device.type == "cuda"
    needed += RECEIVING_BYTES if on_gpu else 0
    if needed > free:
        smaller = "engine.memory_fraction" if on_gpu else "engine.kv_cache_mb"
        raise EngineError(
            f"staging takes {_mib(needed)} MiB beside the live parameters, {free // MIB} MiB are free on {device}: lower {smaller}, "
            "or spread the engine over more devices (engine.tensor_parallel_size)"
        )


def empty_cache() -> None:
    """Give what the allocator holds unused to the other processes on the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _mib(nbytes: int) -> int:
    """Rounded up."""
    return -(-nbytes // MIB)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage once."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
