"""Adds up the sums h that prove to an engine rank what it does not receive of a version."""

from collections.abc import Callable, Sequence

import torch

from protocol.device.slice_digests import SliceSums
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative
from protocol.weights.slices import sum_span
from trainer.weights.parts.plans import SenderPlan, Spans

Numbered = Callable[[int], torch.Tensor]
"""Returns a piece, or the sums of one, by its number; waits for it."""


def rest_sums(
    manifest: WeightManifest, part: int, plan: SenderPlan, published: Numbered, device: torch.device
) -> torch.Tensor:
    """Return the sums of the unsent parts of partly sent pieces, from the published bytes.

    Returns:
        int64 [rows of `plan.rests`] on the pieces' device.
    """
    sums = SliceSums(_rows(plan.rests), device)
    position = 0
    for rest, (tensor, first, last) in zip(plan.transfer.rests, plan.rests, strict=True):
        entry, piece = manifest.tensors[tensor], manifest.parts[part].pieces[rest.piece]
        whole = published(rest.piece)
        for box in rest.boxes:
            sums.add(whole[relative(box, piece.box)], entry.shape, box, position - first)
        position += last - first
    sums.launch()
    return sums.total


def untouched_sums(manifest: WeightManifest, plan: SenderPlan, collected: Numbered) -> torch.Tensor:
    """Return the sums of all ranks' pieces without a wanted element.

    Args:
        manifest: the version.
        plan: rank 0's plan.
        collected: returns the sums of a piece; they are numbered over all parts.

    Returns:
        int64 [rows of `plan.untouched_spans`] on the CPU.
    """
    sums = torch.zeros(_rows(plan.untouched_spans), dtype=torch.int64)
    total, position = sums.numpy(), 0
    begins = {}
    for tensor, first, last in plan.untouched_spans:
        begins[tensor] = position - first
        position += last - first
    numbers = _piece_numbers(manifest)
    for part, number in plan.untouched:
        piece = manifest.parts[part].pieces[number]
        first, last = sum_span(manifest.tensors[piece.tensor], piece.box)
        begin = begins[piece.tensor]
        total[begin + first : begin + last] += collected(numbers[part] + number).numpy()
    return sums


def _rows(spans: Spans) -> int:
    return sum(last - first for _, first, last in spans)


def _piece_numbers(manifest: WeightManifest) -> Sequence[int]:
    """Return for each part how many pieces the parts before it have."""
    numbers, total = [], 0
    for part in manifest.parts:
        numbers.append(total)
        total += len(part.pieces)
    return numbers
