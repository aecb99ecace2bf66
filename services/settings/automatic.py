"""Chooses machine-dependent settings whose value is `auto` or absent.

On a CPU: eager mode, the transport shm, float32 (bfloat16 if the processor multiplies it in hardware), and
one thread per core. On GPUs: bfloat16, CUDA graphs, ipc or nccl, and separate GPUs for trainer and engines if
there are enough. RUN_DIR/settings.json stores the chosen values.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from protocol.host.machine import has_bfloat16, usable_cores
from rollout.environments.registry import is_light
from services.settings.processes import VISIBLE, gpu_list
from services.settings.sections import Settings

AUTO = "auto"
GPU_ENGINES = ("megatron", "sglang", "vllm")
"""Engines made for GPUs. All other engines compute in float32 on GPUs, too."""
MEMORY_ADMITTING_ENGINES = ("sglang", "vllm")
"""Engines with CUDA graphs that start a request once their KV cache has room for it."""
GPU_MAX_RUNNING, DEFAULT_MAX_RUNNING = 512, 64
"""Maximum number of requests in a batch: for these engines on a GPU, and for all others."""
MIN_GROUPS_IN_FLIGHT = 32
"""Minimum number of groups that a worker may hold."""
ENGINE_ONLY_SHARE, BESIDE_TRAINER_SHARE, COLOCATED_SHARE = 0.85, 0.4, 0.5
"""Memory share of a GPU for engines: without the trainer, next to it, and during their turn."""

MAX_GPU_RANK_THREADS = 16
"""Maximum number of CPU threads per trainer rank on a GPU: they only copy, and step offloaded state."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware facts that automatic settings depend on."""

    gpus: Sequence[str] = ()
    """Usable GPUs, see `visible_gpus`."""
    cores: int = 1
    """Number of usable physical cores."""
    bfloat16: bool = False
    """Whether the processor multiplies bfloat16 matrices in hardware."""


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Return the hardware of this machine that a run's processes may use."""
    return Machine(visible_gpus(environ), usable_cores(), has_bfloat16())


def split_automatic(values: dict[str, Any]) -> list[str]:
    """Remove every `auto` from nested tables of settings; return the settings to choose automatically.

    The result contains the keys of `AUTOMATIC` that were `auto` or absent.
    """
    names = []
    for dotted in AUTOMATIC:
        section, name = dotted.split(".")
        table = values.get(section, {})
        if not isinstance(table, dict):
            continue  # refused when the settings are validated
        if table.get(name, AUTO) == AUTO:
            table.pop(name, None)
            names.append(dotted)
    return names


def choose_automatic(settings: Settings, names: Sequence[str], machine: Machine) -> Settings:
    """Return the settings with an automatic value for each of `names`.

    Args:
        settings: settings with defaults in place of the automatic values.
        names: keys of `AUTOMATIC`.
        machine: hardware of the run's machine.
    """
    for dotted in (dotted for dotted in AUTOMATIC if dotted in names):
        section, name = dotted.split(".")
        changed = replace(getattr(settings, section), **{name: AUTOMATIC[dotted](settings, machine)})
        settings = replace(settings, **{section: changed})
    return settings


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the NVIDIA GPUs that a process may use, named as in CUDA_VISIBLE_DEVICES.

    Returns no GPUs if torch is a build without CUDA. Reads only files, because importing torch takes seconds.
    """
    if not _torch_has_cuda():
        return []
    if VISIBLE in environ:
        return [name for name in gpu_list(environ[VISIBLE]) if name != "-1"]
    nodes = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((node[1] for node in nodes if node), key=int)


def _torch_has_cuda() -> bool:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    version = Path(spec.submodule_search_locations[0], "version.py")
    return re.search(r"^cuda\b.*= *'", version.read_text(), re.MULTILINE) is not None


def _engine_on_gpu(settings: Settings, machine: Machine) -> bool:
    return bool(machine.gpus) and settings.engine.name in GPU_ENGINES


def _trainer_on_gpu(settings: Settings, machine: Machine) -> bool:
    return bool(machine.gpus) and settings.trainer.backend != "scripted" and settings.trainer.device != "cpu"


def _has_separate_gpus(settings: Settings) -> bool:
    """Return whether trainer and engines have disjoint lists of GPUs."""
    trainer, engines = (
        set(gpu_list(names)) for names in (settings.services.trainer_gpus, settings.services.rollout_gpus)
    )
    return bool(trainer and engines) and not trainer & engines


def _unreserved_gpus(settings: Settings, machine: Machine) -> list[str]:
    """Return the GPUs that neither the evaluation nor reward models use."""
    services = settings.services
    reserved = [*gpu_list(services.eval_gpus), *gpu_list(services.reward_gpus)]
    return [name for name in machine.gpus if name not in reserved]


def _wants_split(settings: Settings, machine: Machine) -> bool:
    gpus_needed = settings.ranks_per_host + settings.engine.tensor_parallel_size
    return (
        _engine_on_gpu(settings, machine)
        and _trainer_on_gpu(settings, machine)
        and len(_unreserved_gpus(settings, machine)) >= gpus_needed
        and not settings.colocated.enabled
        and settings.weights.transport != "shared"
    )


def _trainer_gpus(settings: Settings, machine: Machine) -> str:
    if settings.services.rollout_gpus or not _wants_split(settings, machine):
        return ""
    return ",".join(_unreserved_gpus(settings, machine)[: settings.ranks_per_host])


def _rollout_gpus(settings: Settings, machine: Machine) -> str:
    if not _wants_split(settings, machine):
        return ""
    trainer_gpus = gpu_list(settings.services.trainer_gpus)
    return ",".join(name for name in _unreserved_gpus(settings, machine) if name not in trainer_gpus)


def _engine_dtype(settings: Settings, machine: Machine) -> str:
    is_fast = _engine_on_gpu(settings, machine) or _multiplies_bfloat16(settings, machine)
    return "bfloat16" if is_fast and settings.engine.name in GPU_ENGINES else "float32"


def _trainer_dtype(settings: Settings, machine: Machine) -> str:
    is_fast = _trainer_on_gpu(settings, machine) or _multiplies_bfloat16(settings, machine)
    return "bfloat16" if is_fast and settings.engine.dtype == "bfloat16" else "float32"


def _multiplies_bfloat16(settings: Settings, machine: Machine) -> bool:
    """Return whether bfloat16 is faster on the processor; a model made from scratch is too small."""
    return machine.bfloat16 and bool(settings.model.path) and settings.trainer.backend != "scripted"


def _ranks_sharing_cores(settings: Settings) -> tuple[int, int]:
    """Return the numbers of trainer ranks and engine ranks among which the cores are divided.

    A model made from scratch is too small for more than one thread, so both numbers are 0. No core is
    assigned twice: waiting threads spin and slow each other down severely.
    """
    if not settings.model.path:
        return 0, 0
    engines = settings.services.rollout_workers + (settings.eval.every > 0)
    return (
        0 if settings.trainer.backend == "scripted" else settings.ranks_per_host,
        0 if settings.engine.name == "scripted" else engines * settings.engine.tensor_parallel_size,
    )


def _engine_threads(settings: Settings, machine: Machine) -> int:
    ranks, engines = _ranks_sharing_cores(settings)
    if not engines or _engine_on_gpu(settings, machine):
        return 1
    return max(1, machine.cores // (ranks + engines))


def _trainer_threads(settings: Settings, machine: Machine) -> int:
    ranks, engines = _ranks_sharing_cores(settings)
    if not ranks:
        return 1
    share = max(1, (machine.cores - engines * settings.engine.threads) // ranks)
    return min(share, MAX_GPU_RANK_THREADS) if _trainer_on_gpu(settings, machine) else share


def _enforce_eager(settings: Settings, machine: Machine) -> bool:
    recaptures_at_wake = (
        settings.colocated.enabled and settings.engine.name not in MEMORY_ADMITTING_ENGINES
    )  # at every wake
    return recaptures_at_wake or not (bool(machine.gpus) and settings.engine.name in GPU_ENGINES)


def _max_running(settings: Settings, machine: Machine) -> int:
    is_large = bool(machine.gpus) and settings.engine.name in MEMORY_ADMITTING_ENGINES
    return GPU_MAX_RUNNING if is_large else DEFAULT_MAX_RUNNING


def _groups_in_flight(settings: Settings, machine: Machine) -> int:
    """Return the groups that rule F allows, at most two engine batches and at least `MIN_GROUPS_IN_FLIGHT`.

    With fewer groups, slots of finished samples stay empty until the last sample of their group ends
    (results/waves.md). Environments that are not light may hold a connection, a sandbox or a process per
    sample; they get `MIN_GROUPS_IN_FLIGHT`.
    """
    if not is_light(settings.environment):
        return MIN_GROUPS_IN_FLIGHT
    allowed = (settings.bound.max_staleness + 1) * settings.bound.groups_per_step
    two_batches = 2 * -(-settings.engine.max_running // settings.sampling.samples_per_prompt)
    return max(MIN_GROUPS_IN_FLIGHT, min(allowed, two_batches))


def _memory_fraction(settings: Settings, machine: Machine) -> float:
    if settings.colocated.enabled:
        return COLOCATED_SHARE
    shares_with_trainer = _trainer_on_gpu(settings, machine) and not _has_separate_gpus(settings)
    places = gpu_list(settings.services.rollout_gpus) or machine.gpus
    engines = max(1, len(places) // settings.engine.tensor_parallel_size)
    engines_per_gpu = -(-settings.services.rollout_workers // engines)
    share = BESIDE_TRAINER_SHARE if shares_with_trainer else ENGINE_ONLY_SHARE
    return max(0.01, round(share / max(1, engines_per_gpu), 2))


def _transport(settings: Settings, machine: Machine) -> str:
    if not (_engine_on_gpu(settings, machine) and _trainer_on_gpu(settings, machine)):
        return "shm"
    is_remote = settings.weights.host not in ("127.0.0.1", "localhost", "::1")
    return "nccl" if is_remote or _has_separate_gpus(settings) else "ipc"


def _trainer_memory_fraction(settings: Settings, machine: Machine) -> float:
    shares_with_engines = (
        _trainer_on_gpu(settings, machine)
        and _engine_on_gpu(settings, machine)
        and not _has_separate_gpus(settings)
        and not settings.colocated.enabled
    )
    if not shares_with_engines:
        return 1.0
    engines = max(1, len(machine.gpus) // settings.engine.tensor_parallel_size)
    engines_per_gpu = -(-settings.services.rollout_workers // engines)
    return max(0.01, round(1.0 - engines_per_gpu * settings.engine.memory_fraction, 2))


AUTOMATIC: Mapping[str, Callable[[Settings, Machine], Any]] = {
    "services.trainer_gpus": _trainer_gpus,
    "services.rollout_gpus": _rollout_gpus,
    "engine.dtype": _engine_dtype,
    "engine.enforce_eager": _enforce_eager,
    "engine.max_running": _max_running,
    "rollout.groups_in_flight": _groups_in_flight,
    "engine.memory_fraction": _memory_fraction,
    "engine.threads": _engine_threads,
    "trainer.dtype": _trainer_dtype,
    "trainer.threads": _trainer_threads,
    "trainer.memory_fraction": _trainer_memory_fraction,
    "trainer.micro_batch_tokens": lambda settings, machine: 0,  # by the trainer, on its device
    "weights.transport": _transport,
}
"""Setting -> function that chooses its value from the settings and the machine.

The order matters: later functions read earlier choices."""
