"""Maps one megatron parameter to the Hugging Face tensors that it is assembled from, and back.

A rule lists segments: stretches of rows (or columns) that are the same in a Hugging Face tensor and in a
rank's part of the megatron parameter. Reading the list from left to right loads, from right to left exports,
so a rule cannot disagree with its inverse. The names are in `trainer/megatron/families/`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

from protocol.errors import SettingsError
from trainer.megatron.layout import Grid


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a Hugging Face tensor that are rows of one rank's parameter, along `Rule.dim`.

    `length` rows of tensor `name` from `start` are at `local_start` of the parameter of the rank with number
    `rank` in the rule's grid.
    """

    name: str
    start: int
    rank: int
    local_start: int
    length: int
    local_matrix: int | None = None
    """Index in a parameter that is a stack of matrices; None if it is one matrix or vector."""
    matrix: int | None = None
    """Index in a Hugging Face tensor that is a stack of matrices; None if it is one matrix or vector."""
    copies: tuple["Segment", ...] = ()
    """In a plan: segments with the same rows on other ranks of the grid."""


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """Rule of one megatron parameter: the Hugging Face tensors that it is assembled from."""

    parameter: str
    """Name in megatron, within its pipeline stage."""

    dim: int = 0
    """Dimension along which segments count."""
    owner: bool = True
    """False for a second copy of tensors that another rule exports."""
    expert: bool = False
    """Whether the parameter is a stack of experts, split over their ranks, `Layout.grid(expert=True)`."""
    exact: bool = False
    """Whether the parameter is float32 even if the others are not."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes, in the order of the export."""

    @abstractmethod
    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        """Return the segments of all ranks of a grid; replicated rows appear once for each rank.

        Raises:
            SettingsError: the tensors cannot be split over so many ranks.
        """

    def local_shape(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape of the parameter on each rank of a grid."""
        shape = list(next(iter(self.shapes.values())))
        shape[self.dim] = max(s.local_start + s.length for s in self.segments(grid))
        return tuple(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule(Rule):
    """Rule of a parameter that is one tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct(TensorRule):
    """One tensor, the same on every tensor rank."""

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        return tuple(Segment(self.name, 0, rank, 0, self.shape[self.dim]) for rank in range(grid.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(TensorRule):
    """One tensor in equal parts along `dim`."""

    unit: int = 1
    """Rows that stay on one rank, such as a head's rows."""

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        units = self.shape[self.dim] // self.unit
        part = self.unit * _share(self.name, units, grid, "rows" if self.unit == 1 else "heads")
        return tuple(Segment(self.name, rank * part, rank, 0, part) for rank in range(grid.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedQKV(Rule):
    """Query, key and value interleaved by group, split in equal parts.

    A group is the query heads of a key-value head, its key head and its value head.
    """

    gated: bool = False
    """Whether the rows of each query head are followed in the checkpoint by the rows of its output's gate. A
    group has its gates after its queries."""

    names: tuple[str, str, str]
    """Tensors of query, key and value."""
    groups: int
    """Key-value heads."""
    queries: int
    """Query heads of one group."""
    head_dim: int
    columns: tuple[int, ...]
    """The hidden size for a weight, empty for a bias."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            name: (self.groups * n * self.head_dim, *self.columns)
            for name, n in zip(self.names, self._heads, strict=True)
        }

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        part = _share(self.parameter, self.groups * sum(self._heads) * self.head_dim, grid)
        stretches = [
            GroupRows(name, 0, heads * self.head_dim)
            for name, heads in zip(self.names, self._heads, strict=True)
        ]
        if self.gated:
            every = stretches[0].rows
            stretches[:1] = [
                GroupRows(self.names[0], head * self.head_dim, self.head_dim, every)
                for first in (0, 1)
                for head in range(first, 2 * self.queries, 2)
            ]
        return _interleaved(stretches, self.groups, part)

    @property
    def _heads(self) -> tuple[int, int, int]:
        return (2 if self.gated else 1) * self.queries, 1, 1


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Rows of a tensor that belong to one group of several."""

    name: str
    first: int
    """The first row of the first group."""
    rows: int
    """Rows of each group."""
    every: int = 0
    """Rows from one group's first to the next one's; 0: as many as a group has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(Rule):
    """Stretches of tensors, group by group; a rank has whole groups."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each tensor."""
    stretches: tuple[GroupRows, ...]
    """Rows of a group, in their order."""
    groups: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self.tensors)

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        groups = _share(self.parameter, self.groups, grid, "heads")
        return _interleaved(
            self.stretches, self.groups, groups * sum(stretch.rows for stretch in self.stretches)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP(Rule):
    """Gate and up projection: every rank holds its rows of the gate, then its rows of the up projection."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    """Shape of each of the two: of weights, or of biases."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self.shape for name in self.names}

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        part = _share(self.parameter, self.shape[0], grid)
        return tuple(
            Segment(name, rank * part, rank, half * part, part)
            for half, name in enumerate(self.names)
            for rank in range(grid.tp)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacked(Rule):
    """The tensors of another rule as one tensor of the checkpoint, in which their rows follow each other."""

    name: str
    rule: Rule
    """Its own names count nowhere else."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        first, *others = self.rule.shapes.values()
        return {self.name: (first[0] + sum(shape[0] for shape in others), *first[1:])}

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        sizes = [shape[0] for shape in self.rule.shapes.values()]
        starts = dict(zip(self.rule.shapes, accumulate([0, *sizes[:-1]]), strict=True))
        return tuple(
            replace(segment, name=self.name, start=starts[segment.name] + segment.start)
            for segment in self.rule.segments(grid)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStack(Rule):
    """The tensors of all experts of a layer, in a parameter that stacks a rank's experts.

    Its first dimension counts experts, so `dim` counts within the matrix of one.
    """

    rules: tuple[Rule, ...]
    """Rules of the experts in order, each as if there were no others; all of the same kind and shapes."""
    expert: bool = True

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for rule in self.rules for name, shape in rule.shapes.items()}

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        here = _experts_of_rank(self.parameter, len(self.rules), grid)
        return tuple(
            replace(segment, rank=segment.rank + grid.tp * (number // here), local_matrix=number % here)
            for number, rule in enumerate(self.rules)
            for segment in rule.segments(grid)
        )

    def local_shape(self, grid: Grid) -> tuple[int, ...]:
        count = _experts_of_rank(self.parameter, len(self.rules), grid)
        return (count, *self.rules[0].local_shape(grid))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor(TensorRule):
    """One tensor of the checkpoint with a matrix for each expert of a layer; a rank has some of them.

    The matrices are split over the ranks that share experts along `dim`, which counts within a matrix.
    """

    unit: int = 1
    """Rows that stay on one rank."""
    expert: bool = True

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        here = _experts_of_rank(self.parameter, self.shape[0], grid)
        part = self._part(grid)
        return tuple(
            Segment(self.name, rank * part, rank + grid.tp * (number // here), 0, part, number % here, number)
            for number in range(self.shape[0])
            for rank in range(grid.tp)
        )

    def local_shape(self, grid: Grid) -> tuple[int, ...]:
        matrix = list(self.shape[1:])
        matrix[self.dim] = self._part(grid)
        return (_experts_of_rank(self.parameter, self.shape[0], grid), *matrix)

    def _part(self, grid: Grid) -> int:
        return self.unit * _share(self.name, self.shape[1 + self.dim] // self.unit, grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary(TensorRule):
    """Embedding or output rows, or output biases, padded with zeros to a multiple of the tensor ranks."""

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        part = padded_vocabulary(self.shape[0], grid.tp) // grid.tp
        return tuple(_cut(self.name, 0, 0, self.shape[0], part))

    def local_shape(self, grid: Grid) -> tuple[int, ...]:
        return (padded_vocabulary(self.shape[0], grid.tp) // grid.tp, *self.shape[1:])


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Return the number of rows, at least `vocabulary`, that splits evenly over `tp` ranks."""
    return -(-vocabulary // tp) * tp


def _experts_of_rank(parameter: str, experts: int, grid: Grid) -> int:
    if experts % grid.ep:
        raise SettingsError(
            f"expert_model_parallel_size = {grid.ep} does not divide the {experts} experts of {parameter}: "
            "choose a divisor"
        )
    return experts // grid.ep


def _share(name: str, size: int, grid: Grid, kind: str = "rows") -> int:
    if size % grid.tp:
        raise SettingsError(
            f"{grid.setting} = {grid.tp} does not divide the {size} {kind} of {name}: choose a divisor"
        )
    return size // grid.tp


def _interleaved(stretches: Iterable[GroupRows], groups: int, part: int) -> tuple[Segment, ...]:
    """Return the segments of stretches that alternate group by group, where ranks have `part` rows."""
    result: list[Segment] = []
    offset = 0
    for group in range(groups):
        for one in stretches:
            result += _cut(one.name, one.first + group * (one.every or one.rows), offset, one.rows, part)
            offset += one.rows
    return tuple(result)


def _cut(name: str, start: int, offset: int, length: int, part: int) -> list[Segment]:
    """Cut rows that are at `offset` of the whole parameter where ranks of `part` rows begin."""
    result = []
    while length:
        rank, local = divmod(offset, part)
        step = min(length, part - local)
        result.append(Segment(name, start, rank, local, step))
        start, offset, length = start + step, offset + step, length - step
    return result
