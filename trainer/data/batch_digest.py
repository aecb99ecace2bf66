"""Digests the batch of a step, so that `tether replay` can tell whether it built the same one.

The digest covers the numbers and arrays that the records and the algorithm determine. What the trainer adds
itself is left out: log-probabilities of other policies, and the choice of measurements.
"""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from numpy.typing import NDArray


class BatchDigest:
    """Digests samples as they come: the arrays of a batch, not how they are divided or padded.

    Each array is an xxh3-128 of its bytes, little-endian, as `Batch` has them; the digest is the xxh3-128 of
    all names, dtypes and digests.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, xxhash.xxh3_128] = {}

    def add(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Add the `token_arrays` of the next sample."""
        for name, values in arrays.items():
            self._tokens.setdefault(f"{name} {values.dtype}", xxhash.xxh3_128()).update(values.data)

    def finish(self, numbers: Mapping[str, float], by_sample: Mapping[str, torch.Tensor]) -> str:
        """Return the digest, 32 hex digits, with the numbers of the step and arrays [N] by sample."""
        state = xxhash.xxh3_128()
        for name, value in numbers.items():
            state.update(f"{name} {value!r}\n".encode())
        for name, values in by_sample.items():
            array = values.numpy()
            state.update(f"{name} {array.dtype} {xxhash.xxh3_128_hexdigest(array.data)}\n".encode())
        for name, digest in self._tokens.items():
            state.update(f"{name} {digest.hexdigest()}\n".encode())
        return state.hexdigest()
