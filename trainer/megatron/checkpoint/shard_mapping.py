"""Maps a parameter of one layout to the saved shards of another that have its rows: pure, no torch.

A parameter is seen as a stack of matrices, or as one matrix; a vector is a matrix of one column. Ranges of a
flat parameter are (start, stop).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.convert.reshard import TensorPlan
from trainer.megatron.convert.rules import Rule
from trainer.megatron.layout import Grid, Layout, Place

Key = tuple[int, int, str]
"""Pipeline stage, number of the rank in the grid of the parameter, name of the parameter there."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of a flat parameter that a rank's file holds."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Matrices:
    """Shape of a rank's part of a parameter, seen as matrices."""

    count: int
    rows: int
    columns: int

    @classmethod
    def of(cls, rule: Rule, grid: Grid) -> "Matrices":
        """Return the shape of a rule's parameter on each rank of a grid; experts are a stack of matrices."""
        shape = rule.local_shape(grid)
        count, matrix = (shape[0], shape[1:]) if rule.expert else (1, shape)
        return cls(count, matrix[0], prod(matrix[1:]))

    def place(self, matrix: int | None, row: int) -> int:
        """Return the index in the flat parameter at which a row begins."""
        return ((matrix or 0) * self.rows + row) * self.columns

    def rows_in(self, matrix: int | None, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of a matrix, (first, end), that overlap a flat range."""
        base = self.place(matrix, 0)
        first = max(0, (start - base) // self.columns)
        return first, min(self.rows, -(-(stop - base) // self.columns))


@dataclass(frozen=True, slots=True)
class Block:
    """Block of a saved matrix, and its place in a matrix of this layout."""

    key: Key
    start: int
    """Index in the flat saved parameter at which the first row begins; rows are read whole."""
    rows: int
    columns: int
    """Columns of the saved matrix."""
    column: int
    """First column of the block in the saved matrix."""
    to: tuple[int, int, int]
    """Matrix, row and column of the block's start in the parameter of this layout."""
    width: int
    """Columns of the block."""


class SavedModel:
    """Saved model whose ranks have the rows of each tensor."""

    def __init__(self, model: TrainedModel) -> None:
        self.layout = model.layout
        self._plans = model.plans()
        self.rules: dict[tuple[int, str], Rule] = {
            (stage, rule.parameter): rule for stage in range(model.layout.pp) for rule in model.rules(stage)
        }
        """Stage and name of a parameter -> its rule."""

    def sizes(self) -> Iterator[tuple[Key, int]]:
        """Yield the number of elements of every saved parameter, copies on other ranks left out."""
        for (stage, name), rule in self.rules.items():
            grid = self.layout.grid(expert=rule.expert)
            for number in range(grid.tp * grid.ep):
                yield (stage, number, name), prod(rule.local_shape(grid))

    def blocks(self, rule: Rule, layout: Layout, place: Place, start: int, stop: int) -> Iterator[Block]:
        """Yield the saved blocks of a range of a parameter; elements in no block are padding, zero.

        Args:
            rule: rule of the parameter.
            layout: layout of this process.
            place: place of the rank that has the parameter.
            start: first element of the range in the flat parameter.
            stop: end of the range.
        """
        grid = layout.grid(expert=rule.expert)
        number = layout.number_of(place, expert=rule.expert)
        segments = [segment for segment in rule.segments(grid) if segment.rank == number]
        here = Matrices.of(rule, grid)
        for segment in segments:
            plan = self._plans[segment.name]
            first, end = here.rows_in(segment.local_matrix, start, stop)
            for piece in plan.pieces:
                begin = max(piece.start, segment.start)
                length = min(piece.start + piece.length, segment.start + segment.length) - begin
                if piece.matrix != segment.matrix or length <= 0:
                    continue
                key = plan.stage, piece.rank, plan.parameter
                there = self._matrices(plan)
                source, local = (
                    piece.local_start + begin - piece.start,
                    segment.local_start + begin - segment.start,
                )
                if plan.dim == 0:
                    low, high = max(local, first), min(local + length, end)
                    if low < high:
                        begins = there.place(piece.local_matrix, source + low - local)
                        to, columns = (segment.local_matrix or 0, low, 0), there.columns
                        yield Block(key, begins, high - low, columns, 0, to, columns)
                elif first < end:
                    yield Block(
                        key,
                        there.place(piece.local_matrix, first),
                        end - first,
                        there.columns,
                        source,
                        (segment.local_matrix or 0, first, local),
                        length,
                    )

    def _matrices(self, plan: TensorPlan) -> Matrices:
        rule = self.rules[plan.stage, plan.parameter]
        return Matrices.of(rule, self.layout.grid(expert=rule.expert))


def is_complete(shards: Iterable[Shard], size: int) -> bool:
    """Return whether sorted shards cover a flat parameter without a gap."""
    end = 0
    for shard in shards:
        if shard.start > end:
            return False
        end = max(end, shard.stop)
    return end == size


def sorted_shards(named_shards: Iterable[tuple[Key, Shard]]) -> Mapping[Key, list[Shard]]:
    """Return the shards of each parameter, sorted by their start."""
    result: dict[Key, list[Shard]] = {}
    for key, shard in named_shards:
        result.setdefault(key, []).append(shard)
    for shards in result.values():
        shards.sort(key=lambda shard: (shard.start, shard.stop))
    return result
