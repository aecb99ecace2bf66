"""Reads which tensors a checkpoint has, from the headers of its files. No torch here."""

from pathlib import Path

from protocol.errors import SettingsError


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a directory's safetensors.

    Raises:
        SettingsError: a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(str(path), framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{directory}: {error}") from None
    return shapes
