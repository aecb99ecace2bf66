"""Plans one rank's part of a transfer to one engine rank, and computes the sums of unsent elements.

With these sums h, the engine rank verifies the rest of every tensor, see `protocol/weights/slices.py`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch

from protocol.device.slice_digests import SliceSums
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative
from protocol.weights.slices import BucketSizes, Transfer, decode_wanted, sum_span, transfer_of
from trainer.weights.served.receiver_connection import ReceiverConnection
from trainer.weights.served.version_server import ServedVersion


class PartChannel:
    """One rank's end of a connection to an engine rank; subclasses send the bytes and sums."""

    def __init__(self, device: torch.device, part: int, sizes: BucketSizes) -> None:
        """Send the pieces of rank `part` from this device, in buckets of these sizes."""
        self.device = device
        self.part = part
        self.sizes = sizes
        self.discarded: frozenset[str] = frozenset()
        """Tensors that the receiver discards before the next version."""
        self._wanted: bytes | None = None
        self._plan: Transfer | None = None
        self._stream: torch.cuda.Stream | None = None

    def plan(self, connection: ReceiverConnection, manifest: WeightManifest) -> Transfer:
        """Return the plan for the receiver's request, which is cached for all versions of a layout.

        Raises:
            WeightError: the receiver requests a slice that does not exist.
        """
        if self._plan is None or connection.wanted != self._wanted:
            wanted, self.discarded = decode_wanted(connection.wanted, manifest)
            self._plan = transfer_of(manifest, self.part, wanted, self.sizes, self.discarded)
            self._wanted = connection.wanted
        return self._plan

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context for GPU work on a stream other than the trainer's.

        All versions use the same stream, because torch keeps freed memory for the stream that allocated it.
        """
        if self.device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._stream)

    def sums(
        self, connection: ReceiverConnection, served: ServedVersion, plan: Transfer, end: float
    ) -> torch.Tensor:
        """Return the sums of all elements that `plan` does not send, in its order; wait for their inputs.

        The sums of unsent parts of partly sent pieces are computed from the published bytes.

        Returns:
            int64 [rows of the plan], on the pieces' device if sums were computed there.
        """
        manifest, pieces = served.manifest, served.manifest.parts[self.part].pieces
        begins = list(accumulate((last - first for _, first, last in plan.spans), initial=0))
        spans = list(zip(plan.spans, begins, strict=False))
        count = len(plan.unsent)
        unsent = SliceSums(begins[count], self.device if count else torch.device("cpu"))
        for rest, ((tensor, first, _), begin) in zip(plan.unsent, spans[:count], strict=True):
            whole, origin = served.streamed.full(rest.piece, connection, end), pieces[rest.piece].box
            for box in rest.boxes:
                unsent.add(whole[relative(box, origin)], manifest.tensors[tensor].shape, box, begin - first)
        unsent.launch()
        if not plan.unrequested:
            return unsent.total
        others = torch.zeros(plan.rows - begins[count], dtype=torch.int64)
        begin_of = {tensor: begin - begins[count] for (tensor, _, _), begin in spans[count:]}
        rows = {part: _rows_before(manifest, part) for part in {part for part, _ in plan.unrequested}}
        for part, number in plan.unrequested:
            piece = manifest.parts[part].pieces[number]
            first, last = sum_span(manifest.tensors[piece.tensor], piece.box)
            begin, row = begin_of[piece.tensor] + first, rows[part][number]
            collected = served.collected.full(part, connection, end)[row : row + last - first]
            others[begin : begin + last - first] += collected
        return torch.cat([unsent.total, others.to(unsent.total.device)])


def _rows_before(manifest: WeightManifest, part: int) -> Sequence[int]:
    """Return the number of sums before each piece of a rank."""
    spans = (sum_span(manifest.tensors[piece.tensor], piece.box) for piece in manifest.parts[part].pieces)
    return list(accumulate((last - first for first, last in spans), initial=0))
