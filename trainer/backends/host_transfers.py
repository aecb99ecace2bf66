"""Transfers gradients and parameters between a device and the optimizer's masters in host memory.

Slices of parameters are grouped into chunks. While the host steps a chunk, the device sends the gradients of
the next chunk and receives the new parameters of the previous chunk. The step therefore takes as long as the
slowest of these three operations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from trainer.storage.host_state import page_locked

CHUNK_ELEMENTS = 1 << 26
"""Maximum number of elements in a chunk: 256 MiB of float32. A larger parameter is a chunk of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class HostSlice:
    """Elements of a parameter that this rank steps: the whole parameter or a shard."""

    parameter: torch.Tensor
    master: torch.Tensor
    """float32 on the host."""

    @property
    def values(self) -> torch.Tensor:
        """Elements on the device, flat."""
        raise NotImplementedError

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient on the device, flat, in the dtype of gradient accumulation."""
        raise NotImplementedError

    @property
    def has_gradient(self) -> bool:
        """Whether the parameter has a gradient; otherwise it is not stepped."""
        return True

    @property
    def size(self) -> int:
        return self.master.numel()


def step_chunk(
    optimizer: torch.optim.Optimizer, chunk: Sequence[HostSlice], gradients: Sequence[torch.Tensor]
) -> None:
    """Step the masters of a chunk; no other masters have gradients during the call."""
    for part, gradient in zip(chunk, gradients, strict=True):
        if part.has_gradient:
            part.master.grad = gradient.view_as(part.master)
    optimizer.step()
    for part in chunk:
        part.master.grad = None


class Transfers:
    """Double-buffered copies of gradients from the device and parameters to the device."""

    def __init__(
        self,
        slices: Sequence[HostSlice],
        device: torch.device,
        *,
        gradient_dtype: torch.dtype,
        parameter_dtype: torch.dtype,
    ) -> None:
        """Allocate buffers for two chunks in each direction, page-locked for a GPU.

        Args:
            slices: slices in stepping order.
            gradient_dtype: dtype of the gradients.
            parameter_dtype: dtype of the parameters.
        """
        self.device = device
        self._cuda = device.type == "cuda"
        self._chunks = list(_chunks(slices))
        chunk_elements = max((sum(part.size for part in chunk) for chunk in self._chunks), default=0)
        count = min(2, len(self._chunks))

        def buffers(dtype: torch.dtype) -> list[torch.Tensor]:
            if not self._cuda:
                return [torch.empty(chunk_elements, dtype=dtype) for _ in range(count)]
            return [page_locked(chunk_elements * dtype.itemsize).view(dtype) for _ in range(count)]

        self._gradient_buffers, self._parameter_buffers = buffers(gradient_dtype), buffers(parameter_dtype)
        self._download_stream, self._upload_stream = (
            torch.cuda.Stream(device) if self._cuda else None for _ in range(2)
        )
        self._gradient_events: list[Any] = [None, None]
        self._parameter_events: list[Any] = [None, None]

    def chunks(
        self, factor: float, sent: Callable[[list[torch.Tensor], Any], None]
    ) -> Iterator[tuple[Sequence[HostSlice], list[torch.Tensor]]]:
        """Yield each chunk with its gradients, float32 on the host; then send its masters back.

        Kernels launched after the end of the iterator see the new parameters.

        Args:
            factor: factor of the gradients, at most 1.
            sent: called with the parameters of each chunk, and the event after which they are on the GPU.
        """
        if factor < 1.0 and self._gradient_buffers and self._gradient_buffers[0].dtype is torch.float32:
            torch._foreach_mul_([part.gradient for chunk in self._chunks for part in chunk], factor)
            factor = 1.0
        if self._cuda:
            self._download_stream.wait_stream(torch.cuda.current_stream())  # type: ignore[union-attr]
            self._upload_stream.wait_stream(torch.cuda.current_stream())  # type: ignore[union-attr]
        for number in range(len(self._chunks)):
            if number == 0:
                self._fetch(0)
            if number + 1 < len(self._chunks):
                self._fetch(number + 1)
            _wait(self._gradient_events[number % 2])
            chunk = self._chunks[number]
            sizes = [part.size for part in chunk]
            rows = self._gradient_buffers[number % 2][: sum(sizes)].float()
            yield chunk, list((rows.mul_(factor) if factor < 1.0 else rows).split(sizes))
            self._send(number)
            sent([part.parameter for part in chunk], self._parameter_events[number % 2])
        if self._cuda:
            torch.cuda.current_stream().wait_stream(self._upload_stream)  # type: ignore[arg-type]

    def _fetch(self, number: int) -> None:
        """Copy a chunk's gradients to the host, into the buffer of a chunk that is already stepped."""
        with self._on_stream(self._download_stream):
            for part, row in self._rows(number, self._gradient_buffers):
                if part.has_gradient:
                    row.copy_(part.gradient, non_blocking=self._cuda)
        self._gradient_events[number % 2] = self._event(self._download_stream)

    def _send(self, number: int) -> None:
        """Copy a chunk's masters to the parameters."""
        _wait(self._parameter_events[number % 2])  # the buffer is in use until its previous chunk has left
        for part, row in self._rows(number, self._parameter_buffers):
            row.copy_(part.master.view(-1))
        with self._on_stream(self._upload_stream):
            for part, row in self._rows(number, self._parameter_buffers):
                part.values.copy_(row, non_blocking=self._cuda)
        self._parameter_events[number % 2] = self._event(self._upload_stream)

    def _rows(self, number: int, buffers: list[torch.Tensor]) -> Iterator[tuple[HostSlice, torch.Tensor]]:
        chunk = self._chunks[number]
        sizes = [part.size for part in chunk]
        return zip(chunk, buffers[number % 2][: sum(sizes)].split(sizes), strict=True)

    def _on_stream(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    def _event(self, stream: torch.cuda.Stream | None) -> Any:
        return None if stream is None else stream.record_event()


def _wait(event: Any) -> None:
    if event is not None:
        event.synchronize()


def _chunks(slices: Sequence[HostSlice]) -> Iterator[list[HostSlice]]:
    chunk: list[HostSlice] = []
    for part in slices:
        if chunk and sum(other.size for other in chunk) + part.size > CHUNK_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(part)
    if chunk:
        yield chunk
