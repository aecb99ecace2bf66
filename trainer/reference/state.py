"""Saves and loads the reference backend's checkpoint: one safetensors file, bit for bit."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import SettingsError
from trainer.storage.host_state import HostCopies, HostState

PART = "rank_00000.safetensors"
IDENTITY = "identity"
MASTER, OPTIMIZER, RNG, STEPS = "master.", "optimizer.", "rng.", "steps"


def copy_state(
    copies: HostCopies,
    masters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: int,
    identity: dict[str, str],
    device: torch.device,
) -> HostState:
    """Return what goes into `PART`, copied to host memory.

    Tensors are `master.NAME`, `optimizer.KEY.NAME` (absent before the first step), `steps` that were made,
    `rng.cpu` and `rng.cuda`; `identity` goes into the file's metadata.

    Raises:
        SettingsError: an optimizer keeps something else than tensors and numbers of a parameter.
    """
    tensors = {MASTER + name: parameter.detach() for name, parameter in masters.items()}
    for name, parameter in masters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # torch's SGD has a momentum of None where it has none
                tensors[f"{OPTIMIZER}{key}.{name}"] = _as_tensor(value, f"{key!r} of {name}")
    tensors[STEPS] = torch.tensor(steps)
    tensors[RNG + "cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[RNG + "cuda"] = torch.cuda.get_rng_state(device)
    # one key: safetensors writes several in any order
    return HostState(
        {PART: copies.copy_all(tensors.items())}, {IDENTITY: json.dumps(identity, sort_keys=True)}
    )


def load_state(
    directory: Path,
    masters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: dict[str, str],
    device: torch.device,
) -> int:
    """Load what `copy_state` returned; checks the whole file against the model before it changes anything.

    Returns:
        The steps that were made.

    Raises:
        SettingsError: no such file, or one of another model or layout; names both.
    """
    try:
        with safe_open(str(directory / PART), framework="pt") as file:
            recorded = json.loads((file.metadata() or {}).get(IDENTITY, "{}"))
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise SettingsError(f"checkpoint {directory}: not one of the reference backend: {error}") from error
    if recorded != identity:
        raise SettingsError(
            f"checkpoint {directory} was made by {_listed(recorded)}; this trainer is {_listed(identity)}"
        )
    _check_shapes(directory, masters, tensors)
    optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(tensors[MASTER + name])
    for name, value in tensors.items():
        if name.startswith(OPTIMIZER):
            key, _, of = name.removeprefix(OPTIMIZER).partition(".")
            optimizer.state[masters[of]][key] = _on(device, value)
    torch.set_rng_state(tensors[RNG + "cpu"])
    if device.type == "cuda" and RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RNG + "cuda"], device)
    return int(tensors[STEPS])


def _as_tensor(value: object, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, int | float):
        raise SettingsError(
            f"setting optimizer.name: its state {what} is a {type(value).__name__}, which no checkpoint can "
            "hold; keep tensors and numbers"
        )
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor | int | float:
    """Return an entry of a parameter's state where its optimizer has it.

    int64 and float64 without a dimension were Python's numbers; torch keeps its counts on the CPU.
    """
    if value.ndim == 0:
        return value.item() if value.dtype in (torch.int64, torch.float64) else value
    return value.to(device)


def _check_shapes(
    directory: Path, masters: dict[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor]
) -> None:
    saved = {
        name.removeprefix(MASTER): tuple(t.shape) for name, t in tensors.items() if name.startswith(MASTER)
    }
    wanted = {name: tuple(p.shape) for name, p in masters.items()}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            there, here = saved.get(name, "absent"), wanted.get(name, "absent")
            raise SettingsError(
                f"checkpoint {directory} is of another model: {name} is {there} there and {here} here"
            )


def _listed(identity: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(identity.items())) or "an unknown writer"
