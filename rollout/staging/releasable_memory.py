"""Releases an engine's memory during sleep."""

from collections.abc import Callable, Iterable

import torch

from protocol.errors import EngineError
from rollout.staging.places import in_mib


class ReleasableMemory:
    """Tensor storages that can be released and restored.

    The tensor objects stay the same, and their views are valid again after `restore`. While released they
    have no memory and must not be used.
    """

    def __init__(
        self,
        dropped: Iterable[torch.Tensor],
        kept: Iterable[torch.Tensor] = (),
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Collect the storages of the tensors.

        Args:
            dropped: tensors whose contents are discarded.
            kept: tensors whose contents are saved in host memory; a storage in both is dropped.
            before: called first by `release`, to drop users of the storages' addresses.
        """
        self._before = before
        discarded, preserved = _storages(dropped), _storages(kept)
        self._kept = {key: storage for key, storage in preserved.items() if key not in discarded}
        self._sizes = {key: (storage, storage.nbytes()) for key, storage in (discarded | self._kept).items()}
        self._saved: dict[int, torch.UntypedStorage] = {}
        """Saved contents of `_kept` in host memory while released."""

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self._before()
        for key, storage in self._kept.items():
            if storage.nbytes():
                self._saved[key] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
                self._saved[key].copy_(storage)
        for storage, _ in self._sizes.values():
            storage.resize_(0)
        empty_cache()

    def restore(self) -> None:
        """Reallocate the memory. Idempotent.

        Raises:
            EngineError: memory is insufficient; the call may be repeated.
        """
        try:
            for storage, nbytes in self._sizes.values():
                if storage.nbytes() != nbytes:
                    storage.resize_(nbytes)
        except RuntimeError as error:
            total = sum(nbytes for _, nbytes in self._sizes.values())
            raise EngineError(f"no room for the {in_mib(total)} MiB that were released: {error}") from error
        for key in list(self._saved):
            self._kept[key].copy_(self._saved.pop(key))


def empty_cache() -> None:
    """Release the CUDA allocator's unused cache to other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return each storage once, by identity."""
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
