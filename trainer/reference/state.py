"""Saves and loads the training state of transformers models, bit for bit: one safetensors file per rank.

Each file contains the rank's shard of every sharded tensor: its rows of its tensor-parallel part. The state
can be loaded on any number of ranks.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from protocol.errors import SettingsError
from trainer.backends.host_offload import HostOffload, Offloadable
from trainer.reference.optimizer_step import MasterStepper
from trainer.reference.shards import (
    DATA,
    TENSOR,
    Cut,
    joined,
    local_tensor,
    part_shape,
    tensor_cut,
    tensor_parallel_part,
)
from trainer.storage.host_state import HostCopies, HostState

IDENTITY, SHARDED, CUTS, TENSOR_RANKS = "identity", "sharded", "cuts", "tensor_ranks"
MASTER, OPTIMIZER, RNG, STEPS = "master.", "optimizer.", "rng.", "steps"


def rank_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def copy_state(
    copies: HostCopies,
    stepper: MasterStepper,
    identity: dict[str, str],
    device: torch.device,
    rank: int = 0,
) -> HostState:
    """Return this rank's part of a checkpoint, copied to host memory.

    Tensors are `master.NAME`, `optimizer.KEY.NAME` (missing before the first step), `steps` (completed
    steps), `rng.cpu` and `rng.cuda`. The file's metadata contains `identity`, the names of sharded tensors,
    and the splits over tensor-parallel ranks.

    Raises:
        SettingsError: an optimizer's state contains objects other than tensors and numbers.
    """
    tensors: dict[str, torch.Tensor] = {MASTER + name: p.detach() for name, p in stepper.masters.items()}
    sharded = {name for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    for name in stepper.masters:
        for key, value in stepper.optimizer.state.get(stepper.stepped(name), {}).items():
            if value is not None:  # the momentum of torch's SGD may be None
                entry, tensor = f"{OPTIMIZER}{key}.{name}", _as_tensor(value, f"{key!r} of {name}")
                tensors[entry] = tensor
                if MASTER + name in sharded and tensor.ndim:
                    sharded.add(entry)
    tensors[STEPS] = torch.tensor(stepper.steps)
    tensors[RNG + "cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors[RNG + "cuda"] = torch.cuda.get_rng_state(device)
    cuts = {name: cut for name, p in stepper.masters.items() if (cut := tensor_cut(p))}
    divided = {CUTS: cuts, TENSOR_RANKS: _tensor_ranks(stepper.masters)} if cuts else {}
    # a single key, because safetensors writes several keys in arbitrary order
    facts = json.dumps({IDENTITY: identity, SHARDED: sorted(sharded), **divided}, sort_keys=True)
    return HostState(
        {rank_file(rank): copies.copy_all((name, local_tensor(tensor)) for name, tensor in tensors.items())},
        {IDENTITY: facts},
    )


def load_state(
    directory: Path,
    stepper: MasterStepper,
    identity: dict[str, str],
    device: torch.device,
    rank: int = 0,
) -> None:
    """Load a state from `copy_state` on any number of ranks, after validating the whole checkpoint.

    Random states are restored from the rank with the same number. A rank without saved states keeps its own.

    Raises:
        SettingsError: the file is missing, or is from another model or backend. The message names both.
    """
    with ExitStack() as stack:
        saved = _Saved(directory, stack, identity)
        saved.check_shapes(stepper.masters)
        stepper.optimizer.state.clear()
        with torch.no_grad():
            for name, master in stepper.masters.items():
                saved.fill(MASTER + name, local_tensor(master), master)
            for entry in saved.names(OPTIMIZER):
                key, _, name = entry.removeprefix(OPTIMIZER).partition(".")
                stepped = stepper.stepped(name)
                stepper.optimizer.state[stepped][key] = saved.state_of(entry, stepped, stepper.masters[name])
        random = saved.random_states(rank)
        if RNG + "cpu" in random:
            torch.set_rng_state(random[RNG + "cpu"])
        if device.type == "cuda" and RNG + "cuda" in random:
            torch.cuda.set_rng_state(random[RNG + "cuda"], device)
        stepper.steps = int(saved.whole(STEPS))
    stepper.loaded()


class CheckpointedModel(Offloadable):
    """Shard of a transformers model on one rank; saves and offloads the state of its `MasterStepper`."""

    _stepper: MasterStepper
    _model: Any

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        """Prepare saving and offloading for the rank's device."""
        self._host, self._copies = HostOffload(device), HostCopies()
        self._place = device, rank

    def copy_state(self) -> HostState:
        """See `TrainableModel`."""
        return copy_state(self._copies, self._stepper, self._identity(), *self._place)

    def restore(self, directory: Path) -> None:
        """See `TrainableModel`."""
        load_state(directory, self._stepper, self._identity(), *self._place)

    def close(self) -> None:
        """Release the gradients."""
        self._stepper.zero_grad()

    def _modules(self) -> list[torch.nn.Module]:
        """Return the modules that are offloaded together with the stepper's tensors."""
        return [self._model]

    def _offloadable_tensors(self) -> tuple[Iterable[torch.Tensor], Iterable[torch.Tensor]]:
        self._stepper.zero_grad()
        weights = [tensor for model in self._modules() for tensor in (*model.parameters(), *model.buffers())]
        return map(local_tensor, (*weights, *self._stepper.tensors())), ()

    def _identity(self) -> dict[str, str]:
        """Return the identity that a checkpoint of this model must have."""
        raise NotImplementedError


class _Saved:
    """Open files of a checkpoint."""

    def __init__(self, directory: Path, stack: ExitStack, identity: dict[str, str]) -> None:
        self._directory = directory
        try:
            paths = sorted(directory.glob("rank_*.safetensors")) or [directory / rank_file(0)]
            self._files: list[Any] = [
                stack.enter_context(safe_open(str(path), framework="pt")) for path in paths
            ]
            facts = json.loads((self._files[0].metadata() or {}).get(IDENTITY, "{}"))
        except (OSError, SafetensorError, json.JSONDecodeError) as error:
            raise SettingsError(
                f"checkpoint {directory}: not one of the {identity['backend']} backend: {error}"
            ) from error
        if facts.get(IDENTITY) != identity:
            raise SettingsError(
                f"checkpoint {directory} was made by {_listed(facts.get(IDENTITY, {}))}; this trainer is "
                f"{_listed(identity)}"
            )
        self._sharded = frozenset(facts[SHARDED])
        self._cuts: dict[str, Cut] = {name: tuple(cut) for name, cut in facts.get(CUTS, {}).items()}
        self._tensor_ranks = int(facts.get(TENSOR_RANKS, 1))

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names of tensors with a prefix."""
        return sorted(name for name in self._files[0].keys() if name.startswith(prefix))  # noqa: SIM118

    def check_shapes(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Check that saved masters have the model's names and shapes."""
        there = {name.removeprefix(MASTER): self._shape(name) for name in self.names(MASTER)}
        here = {name: tuple(parameter.shape) for name, parameter in masters.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                shapes = there.get(name, "absent"), here.get(name, "absent")
                raise SettingsError(
                    f"checkpoint {self._directory} is of another model: {name} is {shapes[0]} there and "
                    f"{shapes[1]} here"
                )

    def fill(self, name: str, local: torch.Tensor, master: torch.Tensor) -> None:
        """Copy this rank's shard of a saved tensor, which is sharded like a master."""
        if not isinstance(master, DTensor):
            local.copy_(self.whole(name))
            return
        tensor_ranks, tensor_rank = _tensor_ranks({"": master}), 0
        if tensor_cut(master):
            tensor_rank = master.device_mesh.get_local_rank(TENSOR)
        data = master.device_mesh[DATA] if master.device_mesh.ndim > 1 else master.device_mesh
        rows = part_shape(master, tensor_ranks)[0]
        first = min(data.get_local_rank() * -(-rows // data.size()), rows)
        if tensor_ranks == (self._tensor_ranks if self._cut(name) else 1):
            local.copy_(self._rows(name, first, first + local.shape[0], tensor_rank))
            return
        part = tensor_parallel_part(self.whole(name), tensor_cut(master), tensor_rank, tensor_ranks)
        local.copy_(part[first : first + local.shape[0]])

    def state_of(self, name: str, stepped: torch.Tensor, master: torch.Tensor) -> torch.Tensor | int | float:
        """Return a saved entry of a tensor's optimizer state, on the device where the optimizer keeps it.

        int64 and float64 scalars become Python numbers. torch keeps its step counts on the CPU.
        """
        if name in self._sharded and isinstance(master, DTensor):
            state = torch.zeros_like(stepped)
            self.fill(name, local_tensor(state), master)
            return state
        value = self.whole(name)
        if value.ndim == 0:
            return value.item() if value.dtype in (torch.int64, torch.float64) else value
        return value.to(stepped.device)

    def whole(self, name: str) -> torch.Tensor:
        """Return a whole saved tensor, joined from its shards."""
        cut = self._cut(name)
        shards = [
            [file.get_tensor(name) for file in self._files_of(name, rank)]
            for rank in range(self._tensor_ranks if cut else 1)
        ]
        return joined([torch.cat(part) if len(part) > 1 else part[0] for part in shards], cut)

    def random_states(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the random states of a rank; empty if the checkpoint has fewer ranks."""
        if rank >= len(self._files):
            return {}
        file = self._files[rank]
        return {name: file.get_tensor(name) for name in file.keys() if name.startswith(RNG)}  # noqa: SIM118

    def _cut(self, name: str) -> Cut | None:
        """Return the split of a saved tensor over tensor-parallel ranks.

        Moments are split like their masters.
        """
        if name not in self._sharded:
            return None
        name = name.removeprefix(MASTER)
        return self._cuts.get(name.split(".", 2)[2] if name.startswith(OPTIMIZER) else name)

    def _files_of(self, name: str, tensor_rank: int) -> list[Any]:
        """Return the files with the shards of a tensor-parallel rank's part of a tensor."""
        return self._files[tensor_rank :: self._tensor_ranks] if name in self._sharded else self._files[:1]

    def _rows(self, name: str, start: int, stop: int, tensor_rank: int) -> torch.Tensor:
        """Return rows of a tensor-parallel rank's part of a tensor."""
        if name not in self._sharded:
            return self.whole(name)[start:stop]
        rows, first = [], 0
        for file in self._files_of(name, tensor_rank):
            part = file.get_slice(name)
            count = part.get_shape()[0]
            begin, end = max(start - first, 0), min(stop - first, count)
            if begin < end:
                rows.append(part[begin:end])
            first += count
        return torch.cat(rows) if rows else self._files[0].get_slice(name)[:0]

    def _shape(self, name: str) -> tuple[int, ...]:
        shapes = [file.get_slice(name).get_shape() for file in self._files_of(name, 0)]
        shape = list(shapes[0])
        if len(shapes) > 1:
            shape[0] = sum(other[0] for other in shapes)
        if cut := self._cut(name):
            shape[cut[0]] *= self._tensor_ranks
        return tuple(shape)


def _tensor_ranks(masters: Mapping[str, torch.Tensor]) -> int:
    """Return the number of tensor-parallel ranks that split masters; 1 if none is split."""
    meshes = (m.device_mesh for m in masters.values() if isinstance(m, DTensor) and tensor_cut(m))
    return next((mesh[TENSOR].size() for mesh in meshes), 1)


def _as_tensor(value: object, what: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, int | float):
        raise SettingsError(
            f"setting optimizer.name: its state {what} is a {type(value).__name__}, which no checkpoint can "
            "hold; keep tensors and numbers"
        )
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _listed(identity: dict[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in sorted(identity.items())) or "an unknown writer"
