"""Combines the digest sums of pieces on several ranks into the digests of whole tensors."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from protocol.messages import WeightManifest
from protocol.weights.digests import digests_of_sums, rows_of
from protocol.weights.slices import sum_span


class PieceRows:
    """Positions of all ranks' piece sums among the tensors' row sums; equal for every version."""

    def __init__(self, blank: WeightManifest) -> None:
        self._sizes = [entry.nbytes for entry in blank.tensors]
        self._firsts = list(accumulate(map(rows_of, self._sizes), initial=0))
        self.pieces = [
            [sum_span(blank.tensors[piece.tensor], piece.box) for piece in part.pieces]
            for part in blank.parts
        ]
        """By rank and piece: span (first, end) of the tensor's rows that the piece covers, end exclusive."""
        self._runs = [self._joined(blank, part) for part in range(len(blank.parts))]
        """By rank: (first row among all tensors' rows, index of the rank's first sum, rows) of contiguous
        sums."""

    def digests(self, sums: Sequence[NDArray[np.int64]]) -> list[int]:
        """Return the tensors' digests from each rank's sums, concatenated by piece."""
        total = np.zeros(self._firsts[-1], np.int64)
        for runs, part in zip(self._runs, sums, strict=True):
            for row, first, count in runs:
                total[row : row + count] += part[first : first + count]
        return digests_of_sums(total, self._sizes)

    def _joined(self, blank: WeightManifest, part: int) -> list[tuple[int, int, int]]:
        runs: list[tuple[int, int, int]] = []
        position = 0
        for piece, (first, end) in zip(blank.parts[part].pieces, self.pieces[part], strict=True):
            row, count = self._firsts[piece.tensor] + first, end - first
            if runs and runs[-1][0] + runs[-1][2] == row:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + count)
            else:
                runs.append((row, position, count))
            position += count
        return runs
