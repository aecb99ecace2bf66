"""Digests the batch of a step, so that `tether replay` can tell whether it built the same one.

The digest covers the numbers and arrays that the records and the algorithm determine. What the trainer adds
itself is left out: log-probabilities of other policies, and the choice of what is measured.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from trainer.data.samples import NO_VERSION, BatchSample

FORM = "2:"
"""What digests begin with. Those of releases that padded batches begin with nothing."""


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
        """Return the digest, with numbers of the step and arrays [N] that have an entry for each sample."""
        state = xxhash.xxh3_128()
        for name, value in numbers.items():
            state.update(f"{name} {value!r}\n".encode())
        for name, values in by_sample.items():
            array = values.numpy()
            state.update(f"{name} {array.dtype} {xxhash.xxh3_128_hexdigest(array.data)}\n".encode())
        for name, digest in self._tokens.items():
            state.update(f"{name} {digest.hexdigest()}\n".encode())
        return FORM + state.hexdigest()


def padded_digest(
    samples: Iterable[BatchSample], *, step: int, temperature: float, advantages: torch.Tensor
) -> str:
    """Return the digest of earlier releases: 32 hex digits.

    It is the xxh3-128 of a batch whose samples are rows of padded arrays [N, L], array after array. The rows
    are made one at a time.

    Args:
        samples: those of the batch, N of them, at least one.
        step: version that the step starts from.
        temperature: of the behaviour policy.
        advantages: float32 [N].
    """
    samples = list(samples)
    rows, columns = len(samples), max(len(sample) for sample in samples)
    state = xxhash.xxh3_128()

    def head(name: str, dtype: str, *shape: int) -> None:
        state.update(f"{name} torch.{dtype} {list(shape)}\n".encode())

    def by_token(name: str, dtype: str, padding: float = 0) -> None:
        head(name, dtype, rows, columns)
        for sample, advantage in zip(samples, advantages.numpy(), strict=True):
            arrays = sample.token_arrays(step)
            arrays["advantages"] = np.where(arrays["loss_mask"], advantage, np.float32(0))
            row = np.full(columns, padding, dtype=dtype)
            row[: len(sample)] = arrays[name]
            state.update(row.data)

    def by_sample(name: str, dtype: str, values: Iterable[float]) -> None:
        head(name, dtype, rows)
        state.update(np.array(list(values), dtype=dtype).data)

    state.update(f"step {step!r}\n".encode())
    by_token("tokens", "int64")
    by_sample("sequence_lengths", "int64", (len(sample) for sample in samples))
    by_token("loss_mask", "bool")
    by_token("sampled_mask", "bool")
    by_token("behaviour_logprobs", "float32")
    by_token("versions", "int32", padding=int(NO_VERSION))
    by_token("advantages", "float32")
    by_sample("group_index", "int64", (sample.row for sample in samples))
    by_sample("rewards", "float32", (sample.reward for sample in samples))
    state.update(f"temperature {temperature!r}\n".encode())
    return state.hexdigest()
