"""Says before a start how much memory the trainer is expected to take on its GPUs."""

import os
from collections.abc import Mapping

from protocol.device.shared_layout import TRANSPORT
from services.preflight.model import ModelFacts
from services.settings.automatic import visible_gpus
from services.settings.sections import Settings
from trainer.megatron.architecture.reading import architecture_of
from trainer.megatron.memory.budget import TOKENS_MOST, TOKENS_STEP
from trainer.megatron.memory.expected import GIB, Workload, expected_memory


def workload_of(settings: Settings, model: ModelFacts) -> Workload:
    """Return what the memory of a rank of the backend `megatron` depends on.

    Raises:
        SettingsError: the backend does not support the model.
    """
    return Workload(
        architecture=architecture_of(dict(model.config), model.place / "config.json"),
        parallel=settings.parallel,
        trainer=settings.trainer,
        optimizer=settings.optimizer,
        adapters=settings.lora,
        reference=settings.algorithm.kl_coef > 0,
        shared=settings.weights.transport == TRANSPORT,
    )


def expected_gb(settings: Settings, model: ModelFacts) -> float | None:
    """Return the expected peak of a rank, GiB; with the smallest budget if the trainer is to choose it.

    None for other backends than `megatron`.
    """
    if settings.trainer.backend != "megatron":
        return None
    tokens = settings.trainer.micro_batch_tokens or TOKENS_STEP
    return expected_memory(workload_of(settings, model), tokens).peak / GIB


def describe_memory(
    settings: Settings, model: ModelFacts, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return a line with the expected peak of the trainer's ranks; none where it is not on a GPU."""
    trainer = settings.trainer
    if trainer.backend != "megatron" or trainer.device == "cpu" or not visible_gpus(environ):
        return []
    return [f"memory   {memory_text(workload_of(settings, model))}"]


def memory_text(work: Workload) -> str:
    """Return the expected peak of a rank at its budget, or at the smallest and the largest one."""
    if tokens := work.trainer.micro_batch_tokens:
        expected = expected_memory(work, tokens)
        return f"expected peak of a trainer rank at {tokens} tokens a micro-batch: {expected}"
    least, most = (expected_memory(work, tokens) for tokens in (TOKENS_STEP, TOKENS_MOST))
    return (
        f"expected peak of a trainer rank: {least} at {TOKENS_STEP} tokens a micro-batch, "
        f"{most.peak / GIB:.1f} GiB at {TOKENS_MOST}; it chooses what fits its GPU"
    )
