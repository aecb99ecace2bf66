"""Finds conflicts with the devices and directories of this machine."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.errors import SettingsError, error_text
from services.preflight.model import ModelFacts, engines_of
from services.preflight.problem import Problem, refuse
from services.settings.processes import gpu_list
from services.settings.sections import Settings
from trainer.layers.attention.terms import PLAIN, AttentionTerms, backend_refusals
from trainer.layers.fp8 import fp8_refusals
from trainer.megatron.families.reading import architecture_of

LISTS = ("trainer_gpus", "rollout_gpus", "eval_gpus", "reward_gpus")
"""Settings of `[services]` that name GPUs."""


def device_problems(settings: Settings, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield settings that need a missing GPU.

    Args:
        settings: settings of the run.
        gpus: usable GPUs, as from `services.settings.automatic.visible_gpus`.
    """
    for name in LISTS:
        text = getattr(settings.services, name)
        missing = [gpu for gpu in gpu_list(text) if _is_missing(gpu, gpus)]
        if missing:
            yield Problem(
                f"torch sees no GPU {', '.join(missing)} here, it sees {', '.join(gpus) or 'none'}; "
                "the process would compute on a CPU",
                "remove the setting to compute on a CPU; if there is a GPU, check its driver, "
                "CUDA_VISIBLE_DEVICES, and whether torch is a build for CUDA",
                f"services.{name}",
                text,
            )
    if settings.trainer.device == "cuda" and settings.trainer.backend != "scripted" and not gpus:
        yield Problem("torch sees no GPU here", "use auto or cpu", "trainer.device", "cuda")
    on_gpu = settings.trainer.device != "cpu" and bool(gpus)
    for why in fp8_refusals(settings.trainer, on_gpu=on_gpu):
        yield Problem(why, "remove the setting to train in bfloat16", "trainer.fp8", settings.trainer.fp8)
    if not gpus and any(engine.name == "vllm" for engine in engines_of(settings)):
        yield from _vllm_without_gpu(settings)


def attention_problems(settings: Settings, model: ModelFacts, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield reasons why `trainer.attention_backend` cannot compute the model's attention on these GPUs."""
    trainer = settings.trainer
    terms = PLAIN  # fsdp detects other terms when it loads the model
    if trainer.backend == "megatron":
        try:
            architecture = architecture_of(dict(model.config), model.place / "config.json")
        except (SettingsError, KeyError, TypeError, ValueError):  # reported by the model's check
            return
        terms = AttentionTerms(softcap=architecture.score_softcap, sinks=architecture.family.sinks)
    for why in backend_refusals(trainer, terms, on_gpu=trainer.device != "cpu" and bool(gpus)):
        yield Problem(why, "use torch", "trainer.attention_backend", trainer.attention_backend)


def check_directory(run_dir: Path) -> None:
    """Reject a run directory that cannot be written, or that contains foreign files.

    Raises:
        SettingsError: the directory is unsuitable; the message has its path and the reason.
    """
    refuse(directory_problems(run_dir))


def directory_problems(run_dir: Path) -> Iterator[Problem]:
    """Yield a problem if a run cannot be written to a directory."""
    problem = _unwritable(run_dir) or _foreign(run_dir)
    if problem:
        yield problem


def _unwritable(run_dir: Path) -> Problem | None:
    """Return a problem if a run directory, which may be missing, cannot be written; else None."""
    place = run_dir
    try:
        while not place.exists() and not place.is_symlink():  # a broken link is not replaced
            place = place.parent
        with tempfile.TemporaryDirectory(prefix=".tether-", dir=place):
            return None
    except OSError as error:
        reason = error_text(error)
    return Problem(
        f"{place} cannot be written: {reason}", "choose another directory", "run.dir", str(run_dir)
    )


def _foreign(run_dir: Path) -> Problem | None:
    """Return a problem if a directory contains files and never belonged to a run; else None.

    Logs are ignored, because the output of `tether up` may be written to the directory.
    """
    with contextlib.suppress(OSError):
        names = sorted(path.name for path in run_dir.iterdir() if path.suffix != ".log")
        if names and not RUN_DIR_ENTRIES.intersection(names):
            more = ", ..." if len(names) > 3 else ""
            return Problem(
                f"it holds other files ({', '.join(names[:3])}{more}) and no run",
                "choose an empty directory, or one that does not exist",
                "run.dir",
                str(run_dir),
            )
    return None


RUN_DIR_ENTRIES = frozenset(
    {"settings.json", "logs", "ledger", "model", "archive", "hub.json", "spool.sqlite"}
)
"""Entries of a run directory; even a refused start creates at least one of them."""


def _is_missing(gpu: str, gpus: Sequence[str]) -> bool:
    """Return whether a GPU is not in `gpus`; a UUID is comparable only with UUIDs or an empty list."""
    comparable = not gpus or all(name.isdecimal() == gpu.isdecimal() for name in gpus)
    return comparable and gpu not in gpus


def _vllm_without_gpu(settings: Settings) -> Iterator[Problem]:
    requests = {
        "colocated.enabled": (settings.colocated.enabled, "sleep", "hf, megatron or sglang"),
        "engine.enable_sleep_mode": (settings.engine.enable_sleep_mode, "sleep", "sglang"),
        "trainer.routing_replay": (
            settings.trainer.routing_replay,
            "record experts",
            "hf, megatron or sglang",
        ),
        "engine.enable_return_routed_experts": (
            settings.engine.enable_return_routed_experts,
            "record experts",
            "hf, megatron or sglang",
        ),
    }
    for setting, (value, action, others) in requests.items():
        if value:
            yield Problem(
                f"vLLM cannot {action} on a CPU, and torch sees no GPU here",
                f"remove the setting, or use {others}",
                setting,
                value,
            )
