"""Reads ranges of a checkpoint's parameters for any layout: only those, from mapped files."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import SettingsError
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
from trainer.megatron.checkpoint.shard_mapping import (
    Key,
    Matrices,
    SavedModel,
    Shard,
    is_complete,
    sorted_shards,
)
from trainer.megatron.convert.rules import Rule
from trainer.megatron.layout import Place


def read_description(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's own description.

    Raises:
        SettingsError: the file cannot be read, or is of another format.
    """
    path = directory / LAYOUT
    try:
        description = json.loads(path.read_text())
        if not isinstance(description, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"cannot read {path}: {error}: not a checkpoint of the megatron backend"
        ) from error
    if description.get("format") != FORMAT:
        raise SettingsError(f"{path} is of format {description.get('format')}; this tether reads {FORMAT}")
    return description


def check_model(directory: Path, saved: Mapping[str, Any], model: TrainedModel) -> None:
    """Check that a checkpoint is of the model, and of the adapters, that are trained.

    Raises:
        SettingsError: it is of others; names what differs.
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
    """Return one clause for each value that differs."""
    return "; ".join(
        f"{key} is {before!r} in the checkpoint and {now!r} in the run"
        for key, (before, now) in different.items()
    )


class CheckpointReader:
    """A checkpoint of the current format, open for reading. Tensors are loaded when they are asked for."""

    def __init__(self, directory: Path, saved: Mapping[str, Any], model: TrainedModel) -> None:
        """Open the files of all ranks.

        Args:
            directory: the checkpoint's.
            saved: the result of `read_description`.
            model: the present trained model.

        Raises:
            SettingsError: it is of another model, or lacks a part; names it.
        """
        check_model(directory, saved, model)
        self.directory = directory
        try:
            layout = read_layout(saved["layout"])
        except (KeyError, ValueError) as error:
            raise SettingsError(f"{directory / LAYOUT} describes no layout: {error}") from error
        self.model = SavedModel(replace(model, layout=layout))
        self._now = model
        self._stack = ExitStack()
        self._files: dict[int, Any] = {}
        try:
            self._open_all(layout.stage_ranks * layout.pp)
            self.steps = int(self._files[0].get_tensor(STEPS))
            """Optimizer steps that were made."""
            kinds = (*KINDS, VALUE)
            found = {kind: sorted_shards(self._shards(kind)) for kind in kinds}
            self._shards_of = {(kind, key): shards for kind in kinds for key, shards in found[kind].items()}
            self._check_complete()
        except BaseException:
            self._stack.close()
            raise

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of each parameter that is stepped: before the first step the masters alone."""
        return KINDS if self.steps else (MASTER,)

    def tensor(self, rank: int, name: str) -> torch.Tensor | None:
        """Return another tensor that a rank has written, if it has."""
        file = self._files.get(rank)
        return file.get_tensor(name) if file is not None and name in file.keys() else None  # noqa: SIM118 (not a mapping)

    def flat(self, kind: str, rule: Rule, place: Place, start: int, stop: int) -> torch.Tensor:
        """Return a parameter of this layout as a flat tensor in which only one range is read, the rest is 0.

        Args:
            kind: one of `kinds`, or VALUE for a parameter that the optimizer does not step.
            rule: rule of the parameter.
            place: place of the rank that has the parameter.
            start: first element of the range.
            stop: end of the range.
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
                self._files[rank] = self._stack.enter_context(safe_open(str(path), framework="pt"))
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

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()
