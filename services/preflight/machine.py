"""Finds what the devices and directories of this machine do not allow."""

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
    """Yield settings that need a GPU which is not there.

    Args:
        settings: the run's settings.
        gpus: the GPUs that may be used, as `services.settings.automatic.visible_gpus` names them.
    """
    for name in LISTS:
        text = getattr(settings.services, name)
        missing = [gpu for gpu in gpu_list(text) if _is_missing(gpu, gpus)]
        if missing:
            yield Problem(
                f"torch sees no GPU {', '.join(missing)} here, it sees {', '.join(gpus) or 'none'}; "
                "the process would compute on a CPU",
                "leave it out to compute on a CPU; if there is a GPU, check its driver, "
                "CUDA_VISIBLE_DEVICES, and whether torch is a build for CUDA",
                f"services.{name}",
                text,
            )
    if settings.trainer.device == "cuda" and settings.trainer.backend != "scripted" and not gpus:
        yield Problem("torch sees no GPU here", "use auto or cpu", "trainer.device", "cuda")
    on_gpu = settings.trainer.device != "cpu" and bool(gpus)
    for why in fp8_refusals(settings.trainer, on_gpu=on_gpu):
        yield Problem(why, "leave it out to train in bfloat16", "trainer.fp8", settings.trainer.fp8)
    if not gpus and any(engine.name == "vllm" for engine in engines_of(settings)):
        yield from _vllm_without_gpu(settings)


def attention_problems(settings: Settings, model: ModelFacts, gpus: Sequence[str]) -> Iterator[Problem]:
    """Yield reasons why `trainer.attention_backend` cannot compute the model's attention on these GPUs."""
    trainer = settings.trainer
    terms = PLAIN  # fsdp finds the others when it loads the model
    if trainer.backend == "megatron":
        try:
            architecture = architecture_of(dict(model.config), model.place / "config.json")
        except (SettingsError, KeyError, TypeError, ValueError):  # a problem of its own
            return
        terms = AttentionTerms(softcap=architecture.score_softcap, sinks=architecture.family.sinks)
    for why in backend_refusals(trainer, terms, on_gpu=trainer.device != "cpu" and bool(gpus)):
        yield Problem(why, "use torch", "trainer.attention_backend", trainer.attention_backend)


def check_directory(run_dir: Path) -> None:
    """Refuse a run directory in which a start could not write, or would write among other files.

    Raises:
        SettingsError: names the directory and the reason.
    """
    refuse(directory_problems(run_dir))


def directory_problems(run_dir: Path) -> Iterator[Problem]:
    """Yield the reason why a run cannot be written to a directory, if there is one."""
    problem = _unwritable(run_dir) or _foreign(run_dir)
    if problem:
        yield problem


def _unwritable(run_dir: Path) -> Problem | None:
    """Return why a run directory, which may be missing, cannot be written; None if it can."""
    place = run_dir
    try:
        while not place.exists() and not place.is_symlink():  # nothing is made in place of a broken link
            place = place.parent
        with tempfile.TemporaryDirectory(prefix=".tether-", dir=place):
            return None
    except OSError as error:
        reason = error_text(error)
    return Problem(
        f"{place} cannot be written: {reason}", "choose another directory", "run.dir", str(run_dir)
    )


def _foreign(run_dir: Path) -> Problem | None:
    """Return the problem if a directory has files and was never a run's; None if not.

    Logs are no obstacle: the output of `tether up` may be written there.
    """
    with contextlib.suppress(OSError):
        names = sorted(path.name for path in run_dir.iterdir() if path.suffix != ".log")
        if names and not OWN.intersection(names):
            more = ", ..." if len(names) > 3 else ""
            return Problem(
                f"it holds other files ({', '.join(names[:3])}{more}) and no run",
                "choose an empty directory, or one that does not exist",
                "run.dir",
                str(run_dir),
            )
    return None


OWN = frozenset({"settings.json", "logs", "ledger", "model", "archive", "hub.json", "spool.sqlite"})
"""Entries of a run directory, of which even a start that was refused leaves one."""


def _is_missing(gpu: str, gpus: Sequence[str]) -> bool:
    """Return whether a GPU is not among those; one named by UUID is only if there are none, or only UUIDs."""
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
                f"leave it out, or use {others}",
                setting,
                value,
            )
