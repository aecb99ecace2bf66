"""Starts the model process, calls it from the decoding thread, and shares memory with it.

memory = the tensors of a staged version, each aligned | logits, float32 [slots, V]
"""

import asyncio
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from protocol.device.shared_tensors import reserved
from protocol.errors import EngineError
from protocol.messages import TensorEntry
from protocol.weights.buckets import ALIGNMENT, manifest_digest
from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.rank_processes import RankProcesses
from rollout.engines.multi_process.rank_rpc import start_error
from rollout.staging.staging import dtype_name

MODULE = "rollout.engines.sglang_jax.model_process"


class ModelProcess:
    """Process of one model under the interpreter `engine.python`; implements `Slots` for its KV cache.

    Calls block until they are answered; none may come from the event loop's thread.
    """

    def __init__(self, config: EngineConfig, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process; `name` is the engine's name, for errors.

        Raises:
            EngineError: the process ends, or is not ready within `start_timeout_s`.
        """
        self._file = os.memfd_create("tether-sglang-jax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self._ranks = RankProcesses(
                MODULE, config, name, loop, self._file, config.python, _variables(config)
            )
        except EngineError:
            os.close(self._file)
            raise

    @property
    def ended(self) -> str:
        """Why the process can no longer be called; empty while it can."""
        return self._ranks.ended

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process's `JaxModel` and return the result.

        Raises:
            EngineError: the method raised, or the process has ended.
        """
        return self._ranks.call(method, *arguments)[0]

    def load(self, *arguments: Any) -> dict[str, tuple[int, ...]]:
        """Load a model; return name -> shape of its tensors.

        Raises:
            EngineError: the model cannot be loaded.
        """
        try:
            return {name: tuple(shape) for name, shape in self.call("load", *arguments)}
        except EngineError as error:
            raise start_error(str(error))(f"{error}{self._ranks.log_tail(0)}") from error

    def share(
        self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, slots: int, vocab: int
    ) -> dict[str, torch.Tensor]:
        """Allocate shared memory for staged tensors and logits; return the staged tensors.

        Args:
            shapes: name -> shape of each tensor that versions change.
            slots: number of sequences in the KV cache.
        """
        places, end = [], 0
        for shape in shapes.values():
            places.append(end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        nbytes = end + 4 * slots * vocab
        memory = self._memory = reserved(self._file, nbytes)
        self._logits = torch.frombuffer(memory, dtype=torch.float32, offset=end).view(slots, vocab)
        self.call("share", list(shapes), nbytes, places, end)
        self._staged = {
            name: torch.frombuffer(memory, dtype=dtype, offset=place, count=torch.Size(shape).numel()).view(
                shape
            )
            for (name, shape), place in zip(shapes.items(), places, strict=True)
        }
        return self._staged

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Prefill slots from `first` on; return logits [N, V], which the next pass overwrites."""
        self.call("prefill", first, sequences)
        return self._logits[: len(sequences)]

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append a token to each slot in use; return logits [B, V], which the next pass overwrites."""
        self.call("decode", tokens, lengths)
        return self._logits[: len(tokens)]

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot `source` to slot `target`; `source` becomes free."""
        self.call("move", source, target)

    def apply(self) -> None:
        """Switch the computation to the staged version; see `Committable`."""
        self.call("replace")

    def release(self) -> None:
        """Drop weights, KV cache and the staged version; see `Releasable`."""
        if not self._ranks.ended:
            self.call("release")
            self._memory.madvise(mmap.MADV_REMOVE)

    def restore(self) -> None:
        """Reallocate the memory; see `Releasable`.

        Raises:
            EngineError: memory is insufficient.
        """
        try:
            os.posix_fallocate(self._file, 0, len(self._memory))
        except OSError as error:
            raise EngineError(f"no room for a staged version: {error.strerror}") from error
        self.call("restore")

    def digest(self) -> int:
        """Return the digest that a manifest of the live tensors would have."""
        entries = zip(self._staged.items(), self.call("digests"), strict=True)
        return manifest_digest(
            [
                TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0, tensor.nbytes, digest)
                for (name, tensor), digest in entries
            ]
        )

    def close(self) -> None:
        """End the process and remove its files. Idempotent; callable from the event loop's thread."""
        self._ranks.close()
        if self._file >= 0:
            with suppress(OSError):  # already closed after an allocation failure
                os.close(self._file)
            self._file = -1


def _variables(config: EngineConfig) -> dict[str, str]:
    """Return additional environment variables of the process, including `engine.environment`."""
    threads = f"--xla_cpu_multi_thread_eigen={'true' if config.threads > 1 else 'false'}"
    return {
        **{name: os.environ.get(name, "1") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")},
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {threads}".strip(),
        **config.environment,
        "JAX_PLATFORMS": "cpu",
    }
