"""Divides samples between data-parallel replicas, and packs a replica's samples into micro-batches.

Families of rows, which share tokens, are packed whole where they fit.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from trainer.data.prefix_tree import RowFamily


def balance(costs: Sequence[float], pieces: int) -> list[list[int]]:
    """Divide samples into pieces of about equal cost.

    The dearest sample goes first, each to the piece that is the cheapest by then, so the dearest piece is at
    most 4/3 of the best one (Graham 1969).

    Returns:
        For each piece the indices of its samples, ascending; empty ones if there are too few samples.
    """
    queue = [(0.0, piece) for piece in range(pieces)]
    result: list[list[int]] = [[] for _ in range(pieces)]
    for sample in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, piece = heapq.heappop(queue)
        result[piece].append(sample)
        heapq.heappush(queue, (total + costs[sample], piece))
    return [sorted(piece) for piece in result]


def pack(
    lengths: Sequence[int], budget: int, most: int, counts: Sequence[int] | None = None
) -> list[list[int]]:
    """Pack samples, or families of them, into as few micro-batches as first-fit decreasing finds.

    Args:
        lengths: tokens of each.
        budget: tokens of a micro-batch; a longer one is alone in it.
        most: samples of a micro-batch.
        counts: samples of each; None: 1.

    Returns:
        For each micro-batch the indices of its members. The fullest come first, so that too large a budget
        runs out of memory at the beginning of a step.
    """
    counts = [1] * len(lengths) if counts is None else counts
    passes: list[list[int]] = []
    rooms: list[int] = []
    places: list[int] = []
    first = 0  # no pass before it can take the shortest sample
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
            places.append(most)
        passes[place].append(sample)
        rooms[place] -= lengths[sample]
        places[place] -= counts[sample]
    order = sorted(range(len(passes)), key=lambda i: rooms[i])
    return [passes[place] for place in order]


def fill_groups(passes: Sequence[Sequence[int]], lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divide micro-batches until their number is a multiple of `size`; where none can be, add empty ones.

    Args:
        passes: indices of the samples of each.
        lengths: tokens of each sample.
        size: micro-batches of a group.

    Returns:
        The micro-batches, the fullest first.
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


def pack_padded(lengths: Sequence[int], budget: int, most: int) -> list[list[int]]:
    """Pack samples into micro-batches that are padded to their longest one, so that little is padded.

    Args:
        lengths: tokens of each sample.
        budget: tokens of a micro-batch with its padding; a longer sample is one of its own.
        most: samples of a micro-batch.

    Returns:
        For each micro-batch the indices of its samples, longest first, as are the micro-batches.
    """
    passes: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        last = passes[-1] if passes else []
        if last and len(last) < most and (len(last) + 1) * lengths[last[0]] <= budget:
            last.append(sample)
        else:
            passes.append([sample])
    return passes


Size = Callable[[RowFamily], int]
"""Returns the tokens that take as much memory as a family."""


def pack_families(
    families: Sequence[RowFamily], budget: int, *, most: int, size: Size = attrgetter("tokens")
) -> list[list[RowFamily]]:
    """Return the families, or parts of them, of each micro-batch; one without any if there are none.

    A family that is larger than a micro-batch is cut.

    Args:
        families: rows with the tokens that they share.
        budget: tokens of a micro-batch, at most, unless one row has more.
        most: rows of a micro-batch, at most.
        size: of a family.
    """
    parts = [part for family in families for part in _fitting(family, budget, most, size)]
    found = pack([size(part) for part in parts], budget, most, [len(part.rows) for part in parts])
    return [[parts[index] for index in one] for one in found] or [[]]


def _fitting(family: RowFamily, budget: int, most: int, size: Size) -> Iterator[RowFamily]:
    """Yield parts of a family that each fit a micro-batch, or are a single row."""
    for part in family.cut(budget, most):
        rows = len(part.rows)
        if rows == 1 or size(part) <= budget:
            yield part
            continue
        for half in (range(rows // 2), range(rows // 2, rows)):
            yield from _fitting(part.part(half), budget, most, size)
