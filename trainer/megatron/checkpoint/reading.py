"""Reads ranges of a checkpoint's parameters for any layout, from memory-mapped files.

A parameter is viewed as a matrix or a stack of matrices; a vector is a matrix with one column. Ranges of a
flat parameter are (start, stop).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import SettingsError
from protocol.host.json_file import read_object
from trainer.megatron.checkpoint.description import (
    FORMAT,
    KINDS,
    LAYOUT,
    MASTER,
    STEPS,
    VALUE,
    TrainedModel,
    parse_name,
    part_name,
    rank_file,
    read_layout,
)
from trainer.megatron.convert.reshard import TensorPlan
from trainer.megatron.convert.rules import Rule
from trainer.megatron.layout import Grid, Layout, Place

Key = tuple[int, int, str]
"""Pipeline stage, rank number in the parameter's grid, name of the parameter in the stage."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Range of a flat parameter in a rank's file."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Matrices:
    """Shape of a rank's part of a parameter, as a stack of matrices."""

    count: int
    rows: int
    columns: int

    @classmethod
    def of(cls, rule: Rule, grid: Grid) -> "Matrices":
        """Return the shape of a rule's parameter on each rank of a grid. Experts are a stack of matrices."""
        shape = rule.local_shape(grid)
        count, matrix = (shape[0], shape[1:]) if rule.expert else (1, shape)
        return cls(count, matrix[0], prod(matrix[1:]))

    def place(self, matrix: int | None, row: int) -> int:
        """Return the index in the flat parameter where a row begins."""
        return ((matrix or 0) * self.rows + row) * self.columns

    def rows_in(self, matrix: int | None, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of a matrix, (first, end), that overlap a flat range."""
        base = self.place(matrix, 0)
        first = max(0, (start - base) // self.columns)
        return first, min(self.rows, -(-(stop - base) // self.columns))


@dataclass(frozen=True, slots=True)
class Block:
    """Block of a saved matrix, and its position in a matrix of the current layout."""

    key: Key
    start: int
    """Index of the first row in the flat saved parameter; whole rows are read."""
    rows: int
    columns: int
    """Number of columns of the saved matrix."""
    column: int
    """First column of the block in the saved matrix."""
    to: tuple[int, int, int]
    """Matrix, row and column of the block's start in the parameter of the current layout."""
    width: int
    """Number of columns of the block."""


class SavedModel:
    """Saved model, with the rows of each tensor on its ranks."""

    def __init__(self, model: TrainedModel) -> None:
        self.layout = model.layout
        self._plans = model.plans()
        self.rules: dict[tuple[int, str], Rule] = {
            (stage, rule.parameter): rule for stage in range(model.layout.pp) for rule in model.rules(stage)
        }
        """(stage, name of a parameter) -> its rule."""

    def sizes(self) -> Iterator[tuple[Key, int]]:
        """Yield the number of elements of every saved parameter, without copies on other ranks."""
        for (stage, name), rule in self.rules.items():
            grid = self.layout.grid(expert=rule.expert)
            for number in range(grid.tp * grid.ep):
                yield (stage, number, name), prod(rule.local_shape(grid))

    def blocks(self, rule: Rule, layout: Layout, place: Place, start: int, stop: int) -> Iterator[Block]:
        """Yield the saved blocks of a range of a parameter. Elements outside all blocks are zero padding.

        Args:
            rule: rule of the parameter.
            layout: layout of this process.
            place: coordinates of the rank with the parameter.
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
    """Return whether sorted shards cover a flat parameter without gaps."""
    end = 0
    for shard in shards:
        if shard.start > end:
            return False
        end = max(end, shard.stop)
    return end == size


def sorted_shards(named_shards: Iterable[tuple[Key, Shard]]) -> Mapping[Key, list[Shard]]:
    """Return the shards of each parameter, sorted by start."""
    result: dict[Key, list[Shard]] = {}
    for key, shard in named_shards:
        result.setdefault(key, []).append(shard)
    for shards in result.values():
        shards.sort(key=lambda shard: (shard.start, shard.stop))
    return result


def read_description(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's description.

    Raises:
        SettingsError: the file cannot be read, or has another format.
    """
    path = directory / LAYOUT
    description = read_object(path, f"cannot read {path}", ": not a checkpoint of the megatron backend")
    if description.get("format") != FORMAT:
        raise SettingsError(f"{path} is of format {description.get('format')}; this tether reads {FORMAT}")
    return description


def check_model(directory: Path, saved: Mapping[str, Any], model: TrainedModel) -> None:
    """Check that a checkpoint has the trained model and the same adapters.

    Raises:
        SettingsError: the checkpoint has another model or other adapters. The message names the differences.
    """
    now = json.loads(json.dumps(model.as_json()))
    before = saved.get("model") or {}
    different = {
        f"model.{key}": (before.get(key), value)
        for key, value in now["model"].items()
        if before.get(key) != value
    }
    if saved.get("lora") != now["lora"]:
        different["lora"] = saved.get("lora"), now["lora"]
    if different:
        raise SettingsError(f"{directory}: the checkpoint is of another model: {listed(different)}")


def listed(different: Mapping[str, tuple[Any, Any]]) -> str:
    """Return one clause per different value."""
    return "; ".join(
        f"{key} is {before!r} in the checkpoint and {now!r} in the run"
        for key, (before, now) in different.items()
    )


class CheckpointReader(ExitStack[None]):
    """Checkpoint of the current format, open for reading within a `with` block.

    Tensors are loaded on demand.
    """

    def __init__(self, directory: Path, saved: Mapping[str, Any], model: TrainedModel) -> None:
        """Open the files of all ranks.

        Args:
            directory: directory of the checkpoint.
            saved: result of `read_description`.
            model: the current trained model.

        Raises:
            SettingsError: the checkpoint has another model, or lacks a part. The message names the
                difference.
        """
        super().__init__()
        check_model(directory, saved, model)
        self.directory = directory
        try:
            layout = read_layout(saved["layout"])
        except (KeyError, ValueError) as error:
            raise SettingsError(f"{directory / LAYOUT} describes no layout: {error}") from error
        self.model = SavedModel(replace(model, layout=layout))
        self._now = model
        self._files: dict[int, Any] = {}
        try:
            self._open_all(layout.stage_ranks * layout.pp)
            self.steps = int(self._files[0].get_tensor(STEPS))
            """Number of completed optimizer steps."""
            kinds = (*KINDS, VALUE)
            found = {kind: sorted_shards(self._shards(kind)) for kind in kinds}
            self._shards_of = {(kind, key): shards for kind in kinds for key, shards in found[kind].items()}
            self._check_complete()
        except BaseException:
            self.close()
            raise

    @property
    def kinds(self) -> tuple[str, ...]:
        """Saved tensors of each updated parameter; before the first step, only masters."""
        return KINDS if self.steps else (MASTER,)

    def tensor(self, rank: int, name: str) -> torch.Tensor | None:
        """Return a rank's tensor with this name, None if missing."""
        file = self._files.get(rank)
        return file.get_tensor(name) if file is not None and name in file.keys() else None  # noqa: SIM118 (not a mapping)

    def flat(self, kind: str, rule: Rule, place: Place, start: int, stop: int) -> torch.Tensor:
        """Return a flat parameter of the current layout, with one range read and zeros elsewhere.

        Args:
            kind: one of `kinds`, or VALUE for a parameter that the optimizer does not update.
            rule: rule of the parameter.
            place: coordinates of the rank with the parameter.
        """
        layout = self._now.layout
        size = Matrices.of(rule, layout.grid(expert=rule.expert))
        result = torch.zeros(size.count, size.rows, size.columns)
        for block in self.model.blocks(rule, layout, place, start, stop):
            rows = self._read(kind, block.key, block.start, block.start + block.rows * block.columns)
            matrix, row, column = block.to
            result[matrix, row : row + block.rows, column : column + block.width] = rows.view(
                block.rows, block.columns
            )[:, block.column : block.column + block.width]
        return result.view(-1)

    def _read(self, kind: str, key: Key, start: int, stop: int) -> torch.Tensor:
        result = torch.empty(stop - start)
        for shard in self._shards_of[kind, key]:
            low, high = max(start, shard.start), min(stop, shard.stop)
            if low < high:
                part = self._files[shard.rank].get_slice(part_name(kind, key[2], shard.start))
                result[low - start : high - start] = part[low - shard.start : high - shard.start]
        return result

    def _open_all(self, ranks: int) -> None:
        for rank in range(ranks):
            path = self.directory / rank_file(rank)
            if not path.exists():
                raise SettingsError(f"the checkpoint lacks {path}: it is incomplete")
            try:
                self._files[rank] = self.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise SettingsError(f"{path} cannot be read: {error}") from error

    def _shards(self, kind: str) -> Iterator[tuple[Key, Shard]]:
        layout = self.model.layout
        for rank, file in self._files.items():
            place = layout.place_of(rank)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                parsed = parse_name(name)
                if parsed is None or parsed[0] != kind:
                    continue
                _, parameter, start = parsed
                rule = self.model.rules.get((place.pp, parameter))
                if rule is None:
                    raise SettingsError(
                        f"{self.directory / rank_file(rank)} holds {parameter}, which no rule maps"
                    )
                number = layout.number_of(place, expert=rule.expert)
                size = prod(file.get_slice(name).get_shape())
                yield (place.pp, number, parameter), Shard(rank, start, start + size)

    def _check_complete(self) -> None:
        for key, size in self.model.sizes():
            is_stepped = (VALUE, key) not in self._shards_of
            for kind in self.kinds if is_stepped else (VALUE,):
                if not is_complete(self._shards_of.get((kind, key), ()), size):
                    stage, number, parameter = key
                    raise SettingsError(
                        f"{self.directory} lacks a part of {kind} of {parameter} (stage {stage}, part "
                        f"{number} of those that ranks have): it is incomplete"
                    )
