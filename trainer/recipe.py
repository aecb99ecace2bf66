"""Validates the sections of a recipe against each other. Does not import torch."""

from protocol.choices import is_own
from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig, WeightConfig


def check_recipe(
    algorithm: AlgorithmConfig,
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    lora: LoraConfig,
    *,
    samples: int,
    samples_setting: str = "sampling.samples_per_prompt",
) -> None:
    """Validate algorithm, corrections, updates per step and optimizer against each other.

    Args:
        samples: number of samples in a step.
        samples_setting: setting of the number of samples per group, for error messages.

    Raises:
        SettingsError: a setting does not fit. The message names the first such setting and its valid values.
    """
    for is_wrong, problem in (
        *_problems_of_algorithm(algorithm, trainer, samples, samples_setting),
        *_problems_of_optimizer(optimizer, trainer, lora),
    ):
        if is_wrong:
            raise SettingsError(f"setting {problem}")


def check_publishing(trainer: TrainerConfig, steps: int, max_staleness: int) -> None:
    """Check that samples stay within the bound until the next published version.

    Args:
        max_staleness: E.

    Raises:
        SettingsError: they do not; the message names both settings.
    """
    every = trainer.publish_every
    if (oldest := (every or steps) - 1) > max_staleness:
        remedy = f"{max_staleness + 1} or fewer" if every else "every few steps (trainer.publish_every)"
        raise SettingsError(
            f"setting trainer.publish_every: with {every} a step trains samples that are {oldest} versions "
            f"old, and bound.max_staleness {max_staleness} allows less; publish {remedy}, or set "
            f"bound.max_staleness to {oldest}"
        )


def check_files(weights: WeightConfig) -> None:
    """Check that the transport supports `weights.delta` and `weights.url`, if set.

    Raises:
        SettingsError: the transport does not; the message names both settings.
    """
    if weights.delta and weights.transport not in ("disk", "http", "nccl", "shm"):
        raise SettingsError(
            f"setting weights.delta: weights.transport {weights.transport!r} sends whole versions; "
            "use disk, http, nccl or shm, or remove the setting"
        )
    if weights.url and weights.transport != "http":
        raise SettingsError(
            f"setting weights.url: engines do not read versions by URL with weights.transport "
            f"{weights.transport!r}; use http, or remove the setting"
        )


def check_schedule(optimizer: OptimizerConfig) -> None:
    """Validate the settings of the learning rate's decay.

    Raises:
        SettingsError: a setting does not fit; the message names the setting.
    """
    style, steps = optimizer.lr_decay_style, optimizer.lr_decay_steps
    if style == "constant" or is_own(style):
        return
    if steps <= optimizer.lr_warmup_steps:
        raise SettingsError(
            f"setting optimizer.lr_decay_steps: {steps} is not after the warm-up of "
            f"{optimizer.lr_warmup_steps}; with lr_decay_style {style!r} it says when the learning rate has "
            "reached min_lr"
        )
    if optimizer.min_lr > optimizer.lr:
        raise SettingsError(f"setting optimizer.min_lr: {optimizer.min_lr:g} is above lr, {optimizer.lr:g}")
    if style == "WSD" and not 0 < optimizer.lr_wsd_decay_steps <= steps - optimizer.lr_warmup_steps:
        raise SettingsError(
            f"setting optimizer.lr_wsd_decay_steps: {optimizer.lr_wsd_decay_steps} must be between 1 and "
            f"{steps - optimizer.lr_warmup_steps}, the steps from the warm-up to lr_decay_steps"
        )


def _problems_of_algorithm(
    algorithm: AlgorithmConfig, trainer: TrainerConfig, samples: int, samples_setting: str
) -> tuple[tuple[bool, str], ...]:
    profile_steps = trainer.profile_steps
    return (
        (
            bool(profile_steps) and (len(profile_steps) != 2 or profile_steps[0] > profile_steps[1]),
            f"trainer.profile_steps: {list(profile_steps)} is not the first and the last step to profile, "
            "such as [10, 12]",
        ),
        (
            trainer.num_mini_batches > samples,
            f"trainer.num_mini_batches: {trainer.num_mini_batches} mini-batches for the {samples} samples of "
            f"a step (bound.groups_per_step x {samples_setting}); set at most that many",
        ),
        (
            algorithm.name == "m2po" and not algorithm.second_moment_threshold,
            "algorithm.second_moment_threshold: 'm2po' derives its clip from this threshold; set it "
            "above 0, such as 0.04",
        ),
        (
            algorithm.name != "m2po" and algorithm.second_moment_threshold > 0,
            "algorithm.second_moment_threshold: it is the trust region of 'm2po', and "
            f"{algorithm.name!r} has a clip of its own; remove the setting, or choose m2po",
        ),
        (
            algorithm.name == "m2po" and trainer.recompute_logprobs,
            "trainer.recompute_logprobs: the trust region of 'm2po' is around the engine's policy; turn it "
            "off",
        ),
        (
            algorithm.proximal_policy != "start" and not trainer.recompute_logprobs,
            f"algorithm.proximal_policy: {algorithm.proximal_policy!r} is for the decoupled objective; turn "
            "trainer.recompute_logprobs on, or remove the setting",
        ),
        (
            algorithm.importance_level != "token"
            and not (trainer.recompute_logprobs and algorithm.importance_cap),
            f"algorithm.importance_level: {algorithm.importance_level!r} says what algorithm.importance_cap "
            "cuts, which is off: turn trainer.recompute_logprobs on and set the cap, or remove the setting",
        ),
        (
            algorithm.entropy_target > 0 and not 0 <= algorithm.entropy_coef <= algorithm.entropy_coef_max,
            f"algorithm.entropy_coef: {algorithm.entropy_coef:g} is not between 0 and entropy_coef_max, "
            f"{algorithm.entropy_coef_max:g}, where entropy_target keeps it",
        ),
    )


def _problems_of_optimizer(
    optimizer: OptimizerConfig, trainer: TrainerConfig, lora: LoraConfig
) -> tuple[tuple[bool, str], ...]:
    fp8 = trainer.fp8 != "off"
    return (
        (
            fp8 and trainer.dtype != "bfloat16",
            f"trainer.fp8: {trainer.fp8!r} rounds numbers in bfloat16, and trainer.dtype is "
            f"{trainer.dtype!r}; use bfloat16, or remove the setting",
        ),
        (
            fp8 and lora.rank > 0,
            f"trainer.fp8: {trainer.fp8!r} computes gradients of all weights, also of those that adapters "
            "(lora.rank) leave as they are, which costs more than FP8 saves; remove one of the two settings",
        ),
        (
            optimizer.name != "adamw" and trainer.backend != "reference",
            f"optimizer.name: {optimizer.name!r} is for trainer.backend 'reference', and it is "
            f"{trainer.backend!r}, which divides matrices and AdamW's two moments between ranks, also in "
            "checkpoints; use adamw, or change the backend",
        ),
        (
            optimizer.name == "muon" and lora.rank > 0,
            "optimizer.name: 'muon' is for the matrices of a model, and lora.rank trains factors of them; "
            "use adamw",
        ),
        (
            trainer.moe_router_bias_update_rate > 0 and lora.rank > 0,
            f"trainer.moe_router_bias_update_rate: {trainer.moe_router_bias_update_rate:g} moves biases of "
            "the base model, which adapters (lora.rank) leave as it is, also in engines and checkpoints; set "
            "it to 0, or train without them",
        ),
    )


def check_backend(trainer: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Check that settings of particular backends are not set with another backend.

    Raises:
        SettingsError: the message names the setting and its backends.
    """
    requests = {
        "trainer.recompute_granularity": trainer.recompute_granularity,
        "trainer.moe_aux_loss_coeff": trainer.moe_aux_loss_coeff,
        "trainer.moe_z_loss_coeff": trainer.moe_z_loss_coeff,
        "trainer.moe_router_bias_update_rate": trainer.moe_router_bias_update_rate,
        "optimizer.cpu_offload": "true" if optimizer.cpu_offload else "",
        "optimizer.grad_reduce_in_fp32": "" if optimizer.grad_reduce_in_fp32 else "false",
        "trainer.dtype": trainer.dtype if trainer.dtype == "float16" else "",
        "trainer.attention_backend": "" if trainer.attention_backend == "auto" else trainer.attention_backend,
        "trainer.compile": "true" if trainer.compile else "",
        "trainer.fp8": "" if trainer.fp8 == "off" else trainer.fp8,
    }
    both = "megatron", "fsdp"
    known: dict[str, tuple[str, ...]] = {
        "trainer.attention_backend": both,
        "trainer.compile": ("fsdp",),
        "trainer.fp8": ("fsdp",),
        "optimizer.cpu_offload": both,
    }
    if trainer.recompute_granularity == "full":
        known["trainer.recompute_granularity"] = both
    if trainer.offload_parameters and not (trainer.backend == "fsdp" and optimizer.cpu_offload):
        raise SettingsError(
            "setting trainer.offload_parameters: it is for trainer.backend 'fsdp' with "
            f"optimizer.cpu_offload, and they are {trainer.backend!r} and "
            f"{str(optimizer.cpu_offload).lower()}; change them, or remove the setting"
        )
    for setting, value in requests.items():
        backends = known.get(setting, ("megatron",))
        if value and trainer.backend not in backends:
            raise SettingsError(
                f"setting {setting}: {value} is for trainer.backend {' or '.join(map(repr, backends))}, and "
                f"it is {trainer.backend!r}; remove the setting, or change the backend"
            )
    if trainer.dtype == "float16" and not optimizer.grad_reduce_in_fp32:
        raise SettingsError(
            "setting optimizer.grad_reduce_in_fp32: gradients that are added up in float16 overflow; leave "
            "it on with trainer.dtype 'float16'"
        )
