"""Receives a version through a process group of two made for this update: `location` is "HOST:PORT/BACKEND".

    receiver -> sender   {"version": v, "epoch": e}            one line of JSON over TCP
    sender -> receiver   {"store_port": p} or {"error": text}  one line
    both                 TCPStore(HOST, p), group of rank 0 (sender) and rank 1, the buckets broadcast by rank 0 in order

Pairwise groups: an engine that hangs or dies cannot hold up the others, and a member that leaves needs no rebuild. The
default process group of the engine is not touched. An aborted collective may return with partial buffers, so only digests count.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.entries import Deadline, in_buckets, verify, view

BACKENDS = ("gloo", "nccl")
MAX_LINE = 4096
"""Bytes of the sender's answer."""


class NcclReceiver:
    """Rank 1 of a group of two; the group lives as long as one call of `tensors`."""

    def __init__(self) -> None:
        self._group: Any = None
        self._lock = threading.Lock()

    def tensors(self, manifest: WeightManifest, deadline_s: float) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        deadline = Deadline(manifest, deadline_s)
        host, port, backend = parse_location(manifest.location)
        try:
            with socket.create_connection((host, port), timeout=deadline.remaining("connecting")) as line:
                store_port = _ask(line, manifest, deadline)
                self._group = _join(host, store_port, backend, deadline)
                for index, entries in in_buckets(manifest):
                    bucket = self._receive(manifest.buckets[index], backend, deadline, index)
                    for entry in entries:
                        tensor = view(entry, bucket)
                        verify(entry, tensor)
                        yield entry, tensor
        except (OSError, RuntimeError, ValueError) as error:
            raise WeightError(f"version {manifest.version} from {manifest.location}: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Abort the group if there is one; wakes a thread that waits in a collective."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, AttributeError):
                group.abort()

    def _receive(self, nbytes: int, backend: str, deadline: Deadline, index: int) -> torch.Tensor:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        bucket = torch.empty(nbytes, dtype=torch.uint8, device=device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline.remaining(f"receiving bucket {index}"))
        work = self._group.broadcast([bucket], options)
        # nccl's wait only orders streams; a watchdog aborts the communicator so that the synchronisation below always ends
        watchdog = threading.Timer(deadline.remaining(f"receiving bucket {index}"), self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            work.wait()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        finally:
            watchdog.cancel()
        deadline.remaining(f"receiving bucket {index}")
        return bucket


def parse_location(location: str) -> tuple[str, int, str]:
    """Split "HOST:PORT/BACKEND".

    Raises:
        WeightError: if it is not of that form or the backend is not known.
    """
    address, _, backend = location.partition("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or backend not in BACKENDS:
        raise WeightError(f"location {location!r} is not HOST:PORT/BACKEND with a backend of {', '.join(BACKENDS)}")
    return host, int(port), backend


def _ask(line: socket.socket, manifest: WeightManifest, deadline: Deadline) -> int:
    line.sendall(json.dumps({"version": manifest.version, "epoch": manifest.epoch}).encode() + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        line.settimeout(deadline.remaining("waiting for the sender's answer"))
        part = line.recv(MAX_LINE)
        answer += part
        if not part or len(answer) > MAX_LINE:
            raise WeightError(f"the sender of version {manifest.version} hung up or does not speak our protocol")
    found = json.loads(answer)
    if not isinstance(found, dict) or not isinstance(found.get("store_port"), int):
        detail = found.get("error") if isinstance(found, dict) else found
        raise WeightError(f"the sender refused version {manifest.version}: {detail}")
    return int(found["store_port"])


def _join(host: str, port: int, backend: str, deadline: Deadline) -> Any:
    timeout = timedelta(seconds=deadline.remaining("joining the group"))
    store = TCPStore(host, port, 2, False, timeout)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, 1, 2, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, 1, 2, options)
