"""Maps one megatron parameter to its Hugging Face tensors, and back.

A rule lists segments: ranges of rows (or columns) that are equal in a Hugging Face tensor and in a rank's
part of the megatron parameter. Loading and exporting apply the same list in opposite directions, so a rule
cannot disagree with its inverse. `trainer/megatron/families/` defines the names.
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

    `length` rows of tensor `name` from `start` on are at `local_start` in the parameter of the rank with
    number `rank` in the rule's grid.
    """

    name: str
    start: int
    rank: int
    local_start: int
    length: int
    local_matrix: int | None = None
    """Index of the matrix in a stacked parameter; None for a single matrix or vector."""
    matrix: int | None = None
    """Index of the matrix in a stacked Hugging Face tensor; None for a single matrix or vector."""
    copies: tuple["Segment", ...] = ()
    """In a plan: segments with the same rows on other ranks of the grid."""


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """Rule of one megatron parameter, with the Hugging Face tensors that form it."""

    parameter: str
    """Name in megatron, within its pipeline stage."""

    dim: int = 0
    """Dimension of the segments."""
    owner: bool = True
    """False for a second copy of tensors that another rule exports."""
    expert: bool = False
    """Whether the parameter is a stack of experts, split over `Layout.grid(expert=True)`."""
    exact: bool = False
    """Whether the parameter is always float32."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes, in the order of the export."""

    @abstractmethod
    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        """Return the segments of all ranks of a grid. Replicated rows appear once per rank.

        Raises:
            SettingsError: the tensors cannot be split over the grid.
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
    """One tensor, replicated on every tensor rank."""

    def segments(self, grid: Grid) -> tuple[Segment, ...]:
        return tuple(Segment(self.name, 0, rank, 0, self.shape[self.dim]) for rank in range(grid.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(TensorRule):
    """One tensor in equal parts along `dim`."""

    unit: int = 1
    """Number of rows that stay together on one rank, such as the rows of a head."""

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
    """Whether the checkpoint stores the rows of a query head's output gate after the head's rows. A group
    stores its gates after its queries."""

    names: tuple[str, str, str]
    """Names of the query, key and value tensors."""
    groups: int
    """Number of key-value heads."""
    queries: int
    """Number of query heads per group."""
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
    """Rows of a tensor, repeated for each group."""

    name: str
    first: int
    """First row of the first group."""
    rows: int
    """Number of rows per group."""
    every: int = 0
    """Distance between the first rows of consecutive groups; 0: `rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved(Rule):
    """Row ranges of several tensors, interleaved by group; a rank has whole groups."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of each tensor."""
    stretches: tuple[GroupRows, ...]
    """Rows of one group, in order."""
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
    """Gate and up projection: every rank stores its gate rows, then its up rows."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    """Shape of each of the two tensors, weights or biases."""

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
    """Tensors of another rule, concatenated to one tensor of the checkpoint."""

    name: str
    rule: Rule
    """Rule of the parts; its tensor names are internal."""

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
    """Tensors of all experts of a layer, in a parameter that stacks a rank's experts.

    The first dimension counts experts. `dim` counts within an expert's matrix.
    """

    rules: tuple[Rule, ...]
    """Rules of the experts in order, each for a single expert; all of the same kind and shapes."""
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
    """One checkpoint tensor with a matrix per expert of a layer; a rank has some of the experts.

    Each matrix is split along `dim`, which counts within a matrix, over the ranks that share experts.
    """

    unit: int = 1
    """Number of rows that stay together on one rank."""
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
    """Return the smallest number of rows >= `vocabulary` that splits evenly over `tp` ranks."""
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
    """Return the segments of row ranges that are interleaved by group, for ranks with `part` rows."""
    result: list[Segment] = []
    offset = 0
    for group in range(groups):
        for one in stretches:
            result += _cut(one.name, one.first + group * (one.every or one.rows), offset, one.rows, part)
            offset += one.rows
    return tuple(result)


def _cut(name: str, start: int, offset: int, length: int, part: int) -> list[Segment]:
    """Cut rows at `offset` of the whole parameter at the boundaries of ranks with `part` rows."""
    result = []
    while length:
        rank, local = divmod(offset, part)
        step = min(length, part - local)
        result.append(Segment(name, start, rank, local, step))
        start, offset, length = start + step, offset + step, length - step
    return result
