"""Finds the GPU of a process that an engine's option `device` names by its number."""

import os

from protocol.errors import SettingsError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpu(device: str, number: str) -> str:
    """Return the name of a GPU for CUDA_VISIBLE_DEVICES.

    Args:
        device: the option, for errors.
        number: of the GPU, among the ones that this process sees.

    Raises:
        SettingsError: this process sees fewer.
    """
    given = [item for item in os.environ.get(VISIBLE, "").split(",") if item]
    if given and int(number) >= len(given):
        raise SettingsError(f"option device: {device!r}, but {VISIBLE} names {len(given)} GPUs")
    return given[int(number)] if given else number
