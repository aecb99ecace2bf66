"""Copies versions out of the trainer's GPU memory by CUDA IPC handle, on the same host: `location` is "HOST:PORT".

    receiver -> sender   {"version": v, "epoch": e}
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}  a handle where `n` is new on this connection
    receiver -> sender   {"done": v}                                                      the memory may be written again

Memory of the GPU that the engine uses is read where it lies. That of another, which need not be visible to this process, comes bucket by
bucket over the link by the copy engines, into two buffers in turns, while the bucket before is looked at.
"""

import base64
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.entries import Deadline, Verification, in_buckets, view
from rollout.weights.line import Line, parse_address


class IpcReceiver:
    """Keeps the mappings for the next version. Used by one thread at a time; `close` may come from another."""

    def __init__(self) -> None:
        self._location = ""
        self._line: Line | None = None
        self._mapped: dict[int, torch.Tensor] = {}
        self._buffers: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def tensors(self, manifest: WeightManifest, deadline_s: float) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        if not torch.cuda.is_available():
            raise WeightError(f"version {manifest.version}: transport ipc hands over GPU memory, and this engine has no GPU; use shm")
        deadline = Deadline(manifest, deadline_s)
        complete = False
        try:
            line, answer = self._ask(manifest, deadline)
            mapped = [self._map(found) for found in answer["buckets"]]
            if len(mapped) != len(manifest.buckets):
                raise WeightError(f"version {manifest.version}: {len(mapped)} buckets, the manifest has {len(manifest.buckets)}")
            here = answer["gpu"] == str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            check = Verification(manifest)
            for entries, bucket in self._local(manifest, mapped) if not here else self._in_place(manifest, mapped):
                for entry in entries:
                    tensor = view(entry, bucket)
                    check.add(entry, tensor)
                    yield entry, tensor
            check.finish(deadline, line.hung_up)
            line.done(manifest, deadline)
            complete = True
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise WeightError(f"version {manifest.version} from {manifest.location}: {error}") from error
        finally:
            if not complete:
                with suppress(RuntimeError):
                    torch.cuda.current_stream().synchronize()  # hanging up frees the memory to be written again
                self.close()

    def close(self) -> None:
        """Hang up and unmap."""
        with self._lock:
            line, self._line = self._line, None
            self._mapped = {}
        if line is not None:
            line.close()

    def _ask(self, manifest: WeightManifest, deadline: Deadline) -> tuple[Line, dict[str, Any]]:
        """Ask for a version, on the connection that there is; on a new one if the sender has closed it in the meantime."""
        if self._line is not None and self._location == manifest.location:
            with suppress(OSError, ValueError):
                return self._line, self._line.ask(manifest, deadline)
        self.close()
        self._location = manifest.location
        self._line = line = Line(*parse_address(manifest.location, manifest.location), deadline)
        return line, line.ask(manifest, deadline)

    def _map(self, found: dict[str, Any]) -> torch.Tensor:
        """The memory of a bucket in this process, [bytes] uint8."""
        number = int(found["memory"])
        if number not in self._mapped:
            _, *parts = found["handle"]
            handle, nbytes, offset, counter, counter_offset, event, _ = (
                base64.b64decode(part) if isinstance(part, str) else part for part in parts
            )
            # Mapped under our own GPU, whichever it is on; what was published is complete, so there is no event to wait for.
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device(), handle, nbytes, offset, counter, counter_offset, event, False
            )
            self._mapped[number] = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        return self._mapped[number]

    def _in_place(self, manifest: WeightManifest, mapped: list[torch.Tensor]) -> Iterator[tuple[list[TensorEntry], torch.Tensor]]:
        for index, entries in in_buckets(manifest):
            yield list(entries), mapped[index][: manifest.buckets[index]]

    def _local(self, manifest: WeightManifest, mapped: list[torch.Tensor]) -> Iterator[tuple[list[TensorEntry], torch.Tensor]]:
        """Every bucket in memory of our own; it is overwritten when the next but one is asked for."""
        nbytes = max(manifest.buckets, default=0)
        if not self._buffers or len(self._buffers[0]) < nbytes:
            self._buffers = []
            self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        looking, copying = torch.cuda.current_stream(), torch.cuda.Stream()

        def begin(index: int) -> torch.cuda.Event:
            copying.wait_stream(looking)  # at the bucket that was in this buffer
            with torch.cuda.stream(copying):
                self._buffers[index % 2][: manifest.buckets[index]].copy_(mapped[index][: manifest.buckets[index]], non_blocking=True)
                return copying.record_event()

        order = list(in_buckets(manifest))
        coming = begin(0) if order else None
        for index, entries in order:
            here, coming = coming, begin(index + 1) if index + 1 < len(order) else None
            assert here is not None
            looking.wait_event(here)
            yield list(entries), self._buffers[index % 2][: manifest.buckets[index]]
