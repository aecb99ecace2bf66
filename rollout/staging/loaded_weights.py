"""Compares live weights with the files that they were loaded from, to find repacked parameters.

An engine may rearrange a loaded parameter for its kernels without changing its shape. Copying a version over
it in the loader's layout would then compute wrong results.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from protocol.device.slice_digests import bits_of
from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.boxes import box_of
from protocol.weights.draft_head import has_head
from rollout.staging.loader_trace import Copy, LoaderTrace, Window

ELEMENTS = 1 << 16
"""Maximum elements to compare per tensor, unless a single row has more."""


def check_loaded(trace: LoaderTrace, model_dir: Path) -> None:
    """Check that no live parameter is repacked; arguments: see `repacked`.

    Raises:
        EngineError: a parameter differs from its file; the message names the first one.
    """
    for parameter, tensor in repacked(trace, model_dir):
        raise EngineSettingsError(
            f"parameter {parameter}: it does not hold {tensor} where the loader wrote it. It was "
            "repacked after loading, and a version copied over it would compute something else: use "
            "engine.name 'hf' or 'megatron', which repack nothing, or another device"
        )


def repacked(trace: LoaderTrace, model_dir: Path) -> Iterator[tuple[str, str]]:
    """Compare the start of the first and last tensor in every parameter with the model's files.

    Parameters of a trained draft head are skipped.

    Args:
        trace: trace of the loader, before any version is committed.
        model_dir: model directory. Without safetensors, weights are random and the comparison is skipped.

    Yields: (differing parameter, name of the tensor that it should contain).

    Raises:
        EngineError: a file cannot be read; the message names it.
    """
    places: dict[str, list[Copy]] = {}
    for copy in trace.copies():
        if not has_head([copy.name]):  # the model's files do not contain a draft head's tensors
            places.setdefault(copy.parameter, []).append(copy)
    try:
        with ExitStack() as stack:
            files = files_by_tensor(stack, model_dir)
            for parameter, copies in places.items():
                for copy in {id(copy): copy for copy in (copies[0], copies[-1])}.values():
                    if files and not _holds(trace.live[parameter], copy, files[copy.name]):
                        yield parameter, copy.name
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{model_dir}: {error}") from error


def files_by_tensor(stack: ExitStack, model_dir: Path) -> dict[str, Any]:
    """Open a model's safetensors for the lifetime of `stack`; return tensor name -> file."""
    paths = sorted(model_dir.glob("*.safetensors"))
    files = [stack.enter_context(safe_open(str(path), framework="pt")) for path in paths]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)


def _holds(live: torch.Tensor, copy: Copy, file: Any) -> bool:
    written = _read(file, copy.name, _beginning(copy.source)).to(live.device, live.dtype)
    found = _beginning(copy.target).on(live)
    return torch.equal(bits_of(written.contiguous()), bits_of(found.contiguous()))


def _beginning(window: Window) -> Window:
    """Return the first rows of a window."""
    if not window.size:
        return window
    row = max(1, math.prod(window.size[1:]))
    rows = min(window.size[0], max(1, ELEMENTS // row))
    return Window(window.offset, (rows, *window.size[1:]), window.stride)


def _read(file: Any, name: str, window: Window) -> torch.Tensor:
    """Return a part of a tensor; if the part is a box, only this part is read."""
    part = file.get_slice(name)
    shape = tuple(part.get_shape())
    box = box_of(shape, window.offset, window.size, window.stride) if shape else None
    if box is None:
        tensor: torch.Tensor = file.get_tensor(name)
        return window.on(tensor)
    found: torch.Tensor = part[tuple(slice(start, stop) for start, stop in box)]
    return found.view(window.size)
