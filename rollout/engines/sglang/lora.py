"""Updates one LoRA adapter of SGLang in its slot; named adapters use the other slots.

SGLang loads an adapter once and copies it into tensors that its kernels read. An update stages and commits
these tensors like parameters. SGLang itself must never load or move the adapter again. SGLang's loader
stacks, slices and pads tensors differently for each layer. The destination of each element is found by
loading element numbers instead of weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from rollout.engines.named_adapters import write_peft
from rollout.staging.loader_trace import Copy, Recorder, Window
from rollout.staging.places import StagingRoom
from rollout.staging.staging_plan import AnyPlan, make_plan

NAME = "policy"
"""Name of the adapter in versions, used by requests that name no adapter."""
NO_TENSORS: Mapping[str, torch.Tensor] = {}
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that SGLang fuses into one layer; it needs adapters of all or none of them."""
NOTHING = 0
"""Number of an element that no tensor of a version provides."""


def write_adapter(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    lora: LoraConfig,
    dtype: str,
    given: Mapping[str, torch.Tensor] = NO_TENSORS,
) -> None:
    """Write an adapter into a new directory; it is a no-op if `given` is empty.

    Args:
        shapes: checkpoint name -> shape of the model's tensors.
        lora: rank and modules of the adapter; modules that SGLang fuses with them are added.
        given: PEFT name -> nonzero A or B.
    """
    modules = {target.last for target in adapter_targets(shapes, lora)}
    fused = LoraConfig(lora.rank, lora.alpha, _with_fused(sorted(modules), shapes))
    tensors = {
        name: given.get(name, torch.zeros(shape)).to(getattr(torch, dtype))
        for name, shape in adapter_shapes(adapter_targets(shapes, fused), lora.rank).items()
    }
    directory.mkdir()
    write_peft(directory, tensors, lora.rank)


def trace_adapter(manager: Any, shapes: Mapping[str, tuple[int, ...]], staging_mb: int) -> AnyPlan:
    """Plan the staging of the slot of the adapter `NAME`.

    Loads every adapter into its slot. Afterwards SGLang can neither load nor drop adapters.

    Args:
        manager: SGLang's LoRAManager with the adapter, and a slot for each of its adapters.
        shapes: name -> shape of the adapter's tensors in versions.
        staging_mb: see `EngineConfig`.

    Raises:
        EngineError: SGLang has no destination for a tensor, or rearranges it in an untraceable way.
    """
    (uid,) = (uid for uid, ref in manager.lora_refs.items() if ref.lora_name == NAME)
    manager.fetch_new_loras(set(manager.loras))
    pool = manager.memory_pool
    numbered = Numbered.of(shapes)
    loaded = _load_numbers(manager, uid, numbered)
    live = {name: tensor for name, tensor in _buffers(pool).items() if loaded[name].any()}
    recorder = Recorder({}, live)
    for name in live:
        copies, recorder.fills[name] = numbered.found_in(name, loaded[name])
        recorder.copies += copies
    missing = sorted(set(shapes) - {copy.name for copy in recorder.copies})
    if missing:
        raise EngineSettingsError(
            f"SGLang has no parameter for tensor {missing[0]}: remove its layer from lora.target_modules"
        )
    pool.load_lora_weight_to_buffer = pool.remove_lora = _refuse
    return make_plan(live, shapes, recorder, StagingRoom(mb=staging_mb))


@dataclass(frozen=True, slots=True)
class Numbered:
    """Tensors with consecutively numbered elements, for tracing a loader."""

    names: Sequence[str]
    starts: torch.Tensor
    """[N] number of each tensor's first element."""
    tensors: Mapping[str, torch.Tensor]
    """Name -> int64 numbers of the tensor's elements."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Numbered":
        """Return element numbers for tensors of these shapes."""
        starts, tensors, number = [], {}, NOTHING + 1
        for name, shape in shapes.items():
            count = int(torch.Size(shape).numel())
            starts.append(number)
            tensors[name] = torch.arange(number, number + count).reshape(shape)
            number += count
        return cls(tuple(shapes), torch.tensor(starts), tensors)

    def found_in(self, parameter: str, numbers: torch.Tensor) -> tuple[list[Copy], list[Window]]:
        """Return the copies that produce `numbers` from the tensors, and the rows that no copy fills.

        Args:
            parameter: name of the parameter, for copies and errors.
            numbers: [..., C] dense; contents of the parameter after loading the numbered tensors.

        Raises:
            EngineError: a row is not a contiguous part of one tensor's row.
        """
        rows = numbers.reshape(-1, numbers.shape[-1])
        columns = rows.shape[-1]
        first, owners = rows[:, 0], self._owners(rows[:, 0])
        expected = (first[:, None] + torch.arange(columns)).where(first[:, None] != NOTHING, NOTHING)
        if not torch.equal(rows, expected) or not torch.equal(owners, self._owners(rows[:, -1])):
            raise EngineError(
                f"SGLang rearranges the rows of adapter tensor {parameter}: it cannot be updated in place"
            )
        copies, fills = [], []
        for begin, end, stride in _runs(first.tolist(), owners.tolist()):
            target = Window(begin * columns, (end - begin, columns), (columns, 1))
            owner = int(owners[begin])
            if owner < 0:
                fills.append(target)
                continue
            source = Window(int(first[begin] - self.starts[owner]), target.size, (stride, 1))
            copies.append(Copy(self.names[owner], source, parameter, target))
        return copies, fills

    def _owners(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return [R] index of the tensor of each number; -1 for `NOTHING`."""
        return torch.bucketize(numbers.contiguous(), self.starts, right=True) - 1


def _runs(numbers: Sequence[int], owners: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group equidistant rows of one tensor into runs (begin, end, distance)."""
    runs: list[tuple[int, int, int]] = []
    begin = 0
    for end in range(1, len(numbers) + 1):
        distance = numbers[end - 1] - numbers[end - 2] if end - begin > 1 else 1
        if end < len(numbers) and owners[end] == owners[begin]:
            step = numbers[end] - numbers[end - 1]
            if owners[begin] < 0 or (step > 0 and (end - begin == 1 or step == distance)):
                continue
        runs.append((begin, end, distance))
        begin = end
    return runs


def _load_numbers(manager: Any, uid: str, numbered: Numbered) -> dict[str, torch.Tensor]:
    """Return the slot's tensors as they would be after loading `numbered`; the live slot is not written."""
    from sglang.srt.lora.lora import LoRAAdapter

    pool = manager.memory_pool
    shapes = checkpoint_shapes(Path(manager.lora_refs[uid].lora_path))
    tensors = {name: numbered.tensors.get(name, torch.full(shape, NOTHING)) for name, shape in shapes.items()}
    adapter = LoRAAdapter(
        uid,
        manager.configs[uid],
        manager.base_hf_config,
        manager.load_config,
        manager.lora_backend,
        base_model=manager.base_model,
    )
    adapter.initialize_weights_from_tensors(tensors)
    real = pool.A_buffer, pool.B_buffer
    pool.A_buffer, pool.B_buffer = (
        {
            module: [torch.full(tensor.shape, NOTHING) for tensor in tensors]
            for module, tensors in buffers.items()
        }
        for buffers in real
    )
    try:
        pool.load_lora_weight_to_buffer(
            uid,
            pool.buffer_id_to_uid.index(uid),
            adapter,
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
        return _buffers(pool)
    finally:
        pool.A_buffer, pool.B_buffer = real


def _buffers(pool: Any) -> dict[str, torch.Tensor]:
    return {
        f"{module}.{layer}.{side}": tensor
        for side, buffers in (("a", pool.A_buffer), ("b", pool.B_buffer))
        for module, tensors in buffers.items()
        for layer, tensor in enumerate(tensors)
    }


def _with_fused(modules: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the target modules and the model's modules that SGLang fuses with them."""
    present = {name.removesuffix(".weight").rpartition(".")[2] for name in shapes}
    more = [part for group in FUSED if set(group) & set(modules) for part in group if part in present]
    return tuple(dict.fromkeys([*modules, *more]))


def _refuse(*unused: Any) -> None:
    raise EngineError(
        "SGLang was about to load or drop an adapter: the one that is trained must stay in its slot"
    )
