"""Reads whole tensors, rows or boxes from a checkpoint directory."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from protocol.errors import SettingsError
from protocol.weights.boxes import Box

INDEX = "model.safetensors.index.json"


class SafetensorsReader(ExitStack[None]):
    """Context manager with the tensors of a checkpoint directory by name, in one file or several.

    Files are memory-mapped, and closed at the end of `with`.
    """

    def __init__(self, model_dir: Path) -> None:
        """Open the directory.

        Raises:
            SettingsError: the directory has no safetensors, or its index names a missing file.
        """
        super().__init__()
        self.model_dir = model_dir
        self._open: dict[str, Any] = {}
        index = model_dir / INDEX
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            missing = sorted(name for name in set(self._files.values()) if not (model_dir / name).exists())
        else:
            files = sorted(path.name for path in model_dir.glob("*.safetensors"))
            missing = [] if files else ["*.safetensors"]
            self._files = {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118 (not a mapping)
        if missing:
            raise SettingsError(
                f"{model_dir} lacks {', '.join(missing)}: the model must be a complete safetensors checkpoint"
            )

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._file(self._files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, under its name in the file."""
        return str(self._file(self._files[name]).get_slice(name).get_dtype())

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor, in the checkpoint's dtype."""
        return self._file(self._files[name]).get_tensor(name)  # type: ignore[no-any-return]

    def rows(self, name: str, dim: int, start: int, length: int, matrix: int | None = None) -> torch.Tensor:
        """Return `length` rows (dim 0) or columns (dim 1) of a tensor, in the checkpoint's dtype.

        For a stack of matrices, `matrix` is the index of the matrix. A scalar is returned as it is.
        """
        part = self._file(self._files[name]).get_slice(name)
        if not part.get_shape():
            return self.whole(name)
        cut = slice(start, start + length)
        if matrix is None:
            result: torch.Tensor = part[cut] if dim == 0 else part[:, cut]
        else:
            result = part[matrix, cut] if dim == 0 else part[matrix, :, cut]
        return result

    def box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor, in the checkpoint's dtype."""
        file = self._file(self._files[name])
        cut = tuple(slice(first, stop) for first, stop in box)
        found: torch.Tensor = file.get_slice(name)[cut] if cut else file.get_tensor(name)
        return found

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self.enter_context(safe_open(str(self.model_dir / name), framework="pt"))
        return self._open[name]
