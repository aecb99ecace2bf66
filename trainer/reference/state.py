"""Saves and loads the reference backend's checkpoint: one safetensors file, bit for bit."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import SettingsError
from trainer.optimizers.registry import STATE_KEYS
from trainer.storage.host_state import HostCopies, HostState

PART = "rank_00000.safetensors"
IDENTITY = "identity"
MASTER, OPTIMIZER, RNG = "master.", "optimizer.", "rng."


def copy_state(
    copies: HostCopies,
    masters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    identity: dict[str, str],
    device: torch.device,
) -> HostState:
    """Return what goes into `PART`, copied to host memory.

    Tensors are `master.NAME`, `optimizer.KEY.NAME` (absent before the first step), `rng.cpu` and `rng.cuda`;
    `identity` goes into the file's metadata.
    """
    tensors = {MASTER + name: parameter.detach() for name, parameter in masters.items()}
    for name, parameter in masters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            # bitsandbytes counts steps in an int
            tensors[f"{OPTIMIZER}{key}.{name}"] = torch.as_tensor(value)
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
) -> None:
    """Load what `copy_state` returned; checks the whole file against the model before it changes anything.

    Raises:
        SettingsError: no such file, or one of another model or layout; names both.
    """
    try:
        with safe_open(str(directory / PART), framework="pt") as file:
            found = json.loads((file.metadata() or {}).get(IDENTITY, "{}"))
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise SettingsError(f"checkpoint {directory}: not one of the reference backend: {error}") from error
    if found != identity:
        raise SettingsError(
            f"checkpoint {directory} was made by {_listed(found)}; this trainer is {_listed(identity)}"
        )
    _check_shapes(directory, masters, tensors)
    optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in masters.items():
            parameter.copy_(tensors[MASTER + name])
            for key in STATE_KEYS:
                value = tensors.get(f"{OPTIMIZER}{key}.{name}")
                if value is not None:
                    optimizer.state[parameter][key] = _on(device, key, value)
    torch.set_rng_state(tensors[RNG + "cpu"])
    if device.type == "cuda" and RNG + "cuda" in tensors:
        torch.cuda.set_rng_state(tensors[RNG + "cuda"], device)


def _on(device: torch.device, key: str, value: torch.Tensor) -> torch.Tensor | int:
    """Return an entry of a parameter's state where its optimizer has it."""
    if key == "step":
        return value if value.is_floating_point() else int(value)
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
