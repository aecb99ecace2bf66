"""Starts the process with the model, calls it from the decoding thread, and shares memory with it.

memory = the tensors of a staged version, each aligned | logits, float32 [slots, V]
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import rollout
from protocol.device.shared_tensors import reserved
from protocol.errors import EngineError, EngineSettingsError
from protocol.messages import TensorEntry
from protocol.weights.buckets import ALIGNMENT, manifest_digest
from rollout.engines.base import EngineConfig
from rollout.engines.multi_process.parent_watch import OWNER
from rollout.engines.multi_process.rank_rpc import RankRpcClient, socket_path, start_error
from rollout.staging.staging import dtype_name

POLL_S = 0.05
LOG_TAIL = 600
"""Characters of the process's log that an error quotes."""


class ModelProcess:
    """Process of one model under the interpreter `engine.python`; the slots of its KV cache are `Slots`.

    All calls wait for their answers; none may come from the event loop's own thread.
    """

    def __init__(self, config: EngineConfig, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Start the process; `name` is the engine's, in errors.

        Raises:
            EngineError: it ends, or is not there within `start_timeout_s`.
        """
        self._loop = loop
        self.ended = ""
        """Why the process cannot be called any more; empty while it can."""
        self._directory = Path(tempfile.mkdtemp(prefix="tether-sglang-jax-"))
        self._file = os.memfd_create("tether-sglang-jax", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._client = RankRpcClient(name, self._lost, timeout_s=config.start_timeout_s)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._started(config)
            self._connect(config.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the process's `JaxModel` and return its value.

        Raises:
            EngineError: it raises, or the process has ended.
        """
        return asyncio.run_coroutine_threadsafe(
            self._client.call_first(method, *arguments), self._loop
        ).result()

    def load(self, *arguments: Any) -> dict[str, tuple[int, ...]]:
        """Load a model; returns name -> shape of each tensor of a version.

        Raises:
            EngineError: it cannot be loaded.
        """
        try:
            return {name: tuple(shape) for name, shape in self.call("load", *arguments)}
        except EngineError as error:
            raise start_error(str(error))(f"{error}{self._log_tail()}") from error

    def share(
        self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, slots: int, vocab: int
    ) -> dict[str, torch.Tensor]:
        """Make the memory for a staged version and for logits; returns the tensors of the version."""
        places, end = [], 0
        for shape in shapes.values():
            places.append(end)
            end += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        nbytes = end + 4 * slots * vocab
        memory = reserved(self._file, nbytes)
        self._logits = torch.frombuffer(memory, dtype=torch.float32, offset=end).view(slots, vocab)
        self.call("share", nbytes, places, end)
        self._staged = {
            name: torch.frombuffer(memory, dtype=dtype, offset=place, count=torch.Size(shape).numel()).view(
                shape
            )
            for (name, shape), place in zip(shapes.items(), places, strict=True)
        }
        return self._staged

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """See `Slots`; the logits are overwritten by the next pass."""
        self.call("prefill", first, sequences)
        return self._logits[: len(sequences)]

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """See `Slots`; the logits are overwritten by the next pass."""
        self.call("decode", tokens, lengths)
        return self._logits[: len(tokens)]

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """See `Slots`: nothing is recorded."""
        return None

    def move(self, source: int, target: int) -> None:
        """See `Slots`."""
        self.call("move", source, target)

    def apply(self) -> None:
        """Compute with the tensors of the staged version from now on; see `Committable`."""
        self.call("replace")

    def digest(self) -> int:
        """Return the digest that a manifest of the tensors would have that it computes with."""
        entries = zip(self._staged.items(), self.call("digests"), strict=True)
        return manifest_digest(
            [
                TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0, 0, tensor.nbytes, digest)
                for (name, tensor), digest in entries
            ]
        )

    def close(self) -> None:
        """End the process and remove its files. Idempotent; may come from the event loop's thread."""
        self.ended = self.ended or "is closed"
        self._loop.call_soon_threadsafe(self._client.close)
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._file >= 0:
            with suppress(OSError):  # closed already, because there was no memory
                os.close(self._file)
            self._file = -1
        shutil.rmtree(self._directory, ignore_errors=True)

    def _started(self, config: EngineConfig) -> "subprocess.Popen[bytes]":
        python = config.python or sys.executable
        command = [
            python,
            "-m",
            "rollout.engines.sglang_jax.model_process",
            str(self._directory),
            str(self._file),
        ]
        try:
            with (self._directory / "log").open("wb") as log:
                return subprocess.Popen(
                    command,
                    env=_environment(config),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(self._file,),
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineSettingsError(f"setting engine.python: {python}: {error.strerror}") from error

    def _connect(self, timeout_s: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        path = socket_path(self._directory, 0)
        while not path.exists():
            if self._process.poll() is not None:
                raise EngineError(
                    f"sglang-jax's process ended with code {self._process.returncode}{self._log_tail()}"
                )
            if time.monotonic() > deadline:
                raise EngineError(
                    f"sglang-jax's process did not start within {timeout_s:g} s{self._log_tail()}"
                )
            time.sleep(POLL_S)
        asyncio.run_coroutine_threadsafe(self._client.connect([path]), self._loop).result()

    def _lost(self) -> None:
        self.ended = f"sglang-jax's process has ended{self._log_tail()}"

    def _log_tail(self) -> str:
        with suppress(OSError):
            lines = (self._directory / "log").read_text(errors="replace").splitlines()
            return f"; its log: {' / '.join(line.strip() for line in lines[-8:])[-LOG_TAIL:]}"
        return ""


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the process's environment: this one's, without our settings, and with `engine.environment`."""
    given = dict(config.environment)
    path = [
        str(Path(rollout.__file__).parents[1]),
        given.pop("PYTHONPATH", ""),
        os.environ.get("PYTHONPATH", ""),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TETHER_")}
    threads = f"--xla_cpu_multi_thread_eigen={'true' if config.threads > 1 else 'false'}"
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **kept,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {threads}".strip(),
        **given,
        "JAX_PLATFORMS": "cpu",
        OWNER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
    }
