"""Reads the layers' sliding windows from a config.json."""

from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from trainer.megatron.families.table import Family

KINDS = {"full_attention": False, "sliding_attention": True}
"""Entry of `layer_types` -> whether the layer has a window."""


def windows_of(
    path: Path, config: dict[str, Any], family: Family, layers: int, positions: int
) -> tuple[int, ...]:
    """Return the window of each layer, 0 for unlimited.

    A window that covers the model's positions counts as unlimited, unless layers with a window have their own
    rotary embedding.

    Args:
        path: path of config.json, for errors.
        config: content of the file.
        family: family of the model.
        layers: number of layers.
        positions: longest sequence of the model, in tokens.

    Raises:
        SettingsError: the family does not support the windows in config.json, or a kind of layer is unknown.
    """
    window = config.get("sliding_window")
    kinds = _has_windows(path, config, family, layers)
    if not family.local_rope and (window is None or window >= positions):
        return (0,) * layers
    if not family.windows:
        if any(kinds) or config.get("use_sliding_window"):
            raise SettingsError(
                f"{path}: sliding_window = {window} is not supported in {config['model_type']}"
            )
        return (0,) * layers
    if family.windows == "switch" and not config.get("use_sliding_window"):
        kinds = [False] * layers
    if any(kinds) and not window:
        raise SettingsError(f"{path}: sliding_window = {window} is not supported with layers that have one")
    return tuple(int(window or 0) * kind for kind in kinds)


def _has_windows(path: Path, config: dict[str, Any], family: Family, layers: int) -> list[bool]:
    """Return whether each layer has a window."""
    types = config.get("layer_types")
    if types is None or family.delta:
        return [_has_window_by_default(config, family, layer) for layer in range(layers)]
    if len(types) != layers or set(types) - set(KINDS):
        raise SettingsError(
            f"{path}: layer_types must name {layers} layers, each {' or '.join(sorted(KINDS))}: {types}"
        )
    kinds = [KINDS[kind] for kind in types]
    if family.windows == "all" and not all(kinds) and config.get("sliding_window") is not None:
        raise SettingsError(
            f"{path}: layer_types is not supported in {config['model_type']}, whose layers are alike: {types}"
        )
    return kinds


def _has_window_by_default(config: dict[str, Any], family: Family, layer: int) -> bool:
    """Return whether a layer has a window in a config.json without `layer_types`."""
    if not family.windows:
        return False
    if family.windows == "switch":
        return layer >= int(config.get("max_window_layers", 28))
    every = int(config.get("sliding_window_pattern") or family.full_every) if family.full_every else 0
    return not every or (layer + 1) % every != 0
