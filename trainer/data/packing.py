"""Assigns samples to data-parallel replicas, and packs a replica's samples into micro-batches.

Families of rows with shared tokens are packed whole if they fit.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from trainer.data.prefix_tree import RowFamily


def balance(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Split samples into pieces of about equal cost.

    Greedy: each sample, most expensive first, goes to the cheapest piece. The most expensive piece costs at
    most 4/3 of the optimum (Graham 1969).

    Returns:
        Sample indices of each piece, ascending. Pieces are empty if there are too few samples.
    """
    queue = [(0.0, piece) for piece in range(pieces)]
    result: list[list[int]] = [[] for _ in range(pieces)]
    for sample in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, piece = heapq.heappop(queue)
        result[piece].append(sample)
        heapq.heappush(queue, (total + costs[sample], piece))
    return [sorted(piece) for piece in result]


def pack(
    lengths: Sequence[int], budget: int, max_rows: int, counts: Sequence[int] | None = None
) -> list[list[int]]:
    """Pack items (samples or families) into micro-batches by first-fit decreasing.

    Args:
        lengths: tokens of each item.
        budget: tokens per micro-batch; a longer item gets its own micro-batch.
        max_rows: samples per micro-batch.
        counts: samples of each item; None: 1.

    Returns:
        Item indices of each micro-batch. The fullest micro-batches come first, so too large a budget runs out
        of memory at the beginning of a step.
    """
    counts = [1] * len(lengths) if counts is None else counts
    passes: list[list[int]] = []
    rooms: list[int] = []
    places: list[int] = []
    first = 0  # passes before this one have no space for the shortest sample
    shortest = min(lengths, default=0)
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while first < len(passes) and (rooms[first] < shortest or not places[first]):
            first += 1
        for place in range(first, len(passes)):
            if lengths[sample] <= rooms[place] and counts[sample] <= places[place]:
                break
        else:
            place = len(passes)
            passes.append([])
            rooms.append(budget)
            places.append(max_rows)
        passes[place].append(sample)
        rooms[place] -= lengths[sample]
        places[place] -= counts[sample]
    order = sorted(range(len(passes)), key=lambda i: rooms[i])
    return [passes[place] for place in order]


def fill_groups(passes: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Split micro-batches until their number is a multiple of `size`, and add empty ones if needed.

    Args:
        passes: sample indices of each micro-batch.
        lengths: tokens of each sample.
        size: micro-batches per group.

    Returns:
        The micro-batches, fullest first.
    """
    queue = [(-sum(lengths[i] for i in samples), list(samples)) for samples in passes]
    heapq.heapify(queue)
    whole: list[tuple[int, list[int]]] = []
    while queue and (len(queue) + len(whole)) % size:
        total, samples = heapq.heappop(queue)
        if len(samples) < 2:
            whole.append((total, samples))
            continue
        for half in balance([lengths[i] for i in samples], 2):
            heapq.heappush(queue, (-sum(lengths[samples[i]] for i in half), [samples[i] for i in half]))
    found = [samples for _, samples in sorted(whole + queue)]
    return found + [[]] * (-len(found) % size)


def pack_padded(lengths: Sequence[int], budget: int, max_rows: int) -> list[list[int]]:
    """Pack samples into micro-batches that are padded to their longest sample, with little padding.

    Args:
        lengths: tokens of each sample.
        budget: tokens per micro-batch including padding; a longer sample gets its own micro-batch.
        max_rows: samples per micro-batch.

    Returns:
        Sample indices of each micro-batch. Samples and micro-batches are ordered longest first.
    """
    passes: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        last = passes[-1] if passes else []
        if last and len(last) < max_rows and (len(last) + 1) * lengths[last[0]] <= budget:
            last.append(sample)
        else:
            passes.append([sample])
    return passes


Size = Callable[[RowFamily], int]
"""Family -> its memory use, as an equivalent number of tokens."""


def pack_families(
    families: Sequence[RowFamily], budget: int, *, max_rows: int, size: Size = attrgetter("tokens")
) -> list[list[RowFamily]]:
    """Return the families of each micro-batch; one empty micro-batch if there are no families.

    A family that does not fit into a micro-batch is cut into parts.

    Args:
        families: families of all rows.
        budget: token limit of a micro-batch; only a single row may exceed it.
        max_rows: row limit of a micro-batch.
        size: size of a family.
    """
    parts = [part for family in families for part in _fitting_parts(family, budget, max_rows, size)]
    found = pack([size(part) for part in parts], budget, max_rows, [len(part.rows) for part in parts])
    return [[parts[index] for index in one] for one in found] or [[]]


def _fitting_parts(family: RowFamily, budget: int, max_rows: int, size: Size) -> Iterator[RowFamily]:
    """Yield parts of a family. Each part fits a micro-batch or is a single row."""
    for part in family.cut(budget, max_rows):
        rows = len(part.rows)
        if rows == 1 or size(part) <= budget:
            yield part
            continue
        for half in (range(rows // 2), range(rows // 2, rows)):
            yield from _fitting_parts(part.part(half), budget, max_rows, size)
