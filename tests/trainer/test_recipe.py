"""Tests what the settings of a recipe require of each other."""

from dataclasses import replace

import pytest

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from trainer.recipe import check_backend, check_publishing, check_recipe

REFERENCE = {"backend": "reference"}
FP8 = {"backend": "fsdp", "dtype": "bfloat16", "fp8": "tensorwise"}


def check(
    algorithm: dict[str, object] | None = None,
    trainer: dict[str, object] | None = None,
    optimizer: str = "adamw",
    rank: int = 0,
) -> None:
    check_recipe(
        AlgorithmConfig(**(algorithm or {})),  # type: ignore[arg-type]
        TrainerConfig(**(trainer or {})),  # type: ignore[arg-type]
        OptimizerConfig(name=optimizer),
        LoraConfig(rank=rank),
        samples=8,
    )


def test_settings_that_fit_are_not_refused() -> None:
    check()
    check({"name": "m2po", "second_moment_threshold": 0.04}, {"num_mini_batches": 8, "epochs_per_batch": 3})
    check({"proximal_policy": "interpolated"}, {"recompute_logprobs": True})
    check({"entropy_target": 0.2, "entropy_coef": 0.001})
    check({"importance_level": "sequence"}, {"recompute_logprobs": True})
    check(trainer={"moe_router_bias_update_rate": 1e-3})
    check(trainer=FP8)
    check(trainer=REFERENCE, optimizer="muon")
    check(trainer=REFERENCE, optimizer="adamw_8bit", rank=4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trainer": {"num_mini_batches": 9}}, "num_mini_batches: 9 mini-batches for the 8 samples"),
        ({"algorithm": {"name": "m2po"}}, "second_moment_threshold: 'm2po'"),
        ({"algorithm": {"second_moment_threshold": 0.04}}, "it is the trust region of 'm2po', and 'grpo'"),
        (
            {
                "algorithm": {"name": "m2po", "second_moment_threshold": 0.04},
                "trainer": {"recompute_logprobs": True},
            },
            "the trust region of 'm2po' is around the engine's policy",
        ),
        ({"algorithm": {"proximal_policy": "interpolated"}}, r"turn trainer\.recompute_logprobs on"),
        ({"algorithm": {"importance_level": "sequence"}}, r"turn trainer\.recompute_logprobs on and set"),
        (
            {
                "algorithm": {"importance_level": "sequence", "importance_cap": 0.0},
                "trainer": {"recompute_logprobs": True},
            },
            "importance_level: 'sequence'",
        ),
        ({"algorithm": {"entropy_target": 0.2, "entropy_coef": 0.1}}, "0.1 is not between 0 and entropy_co"),
        ({"optimizer": "muon"}, "'muon' is for trainer.backend 'reference', and it is 'megatron'"),
        ({"optimizer": "muon", "trainer": REFERENCE, "rank": 4}, r"lora\.rank trains factors"),
        (
            {"trainer": {"fp8": "rowwise"}},
            r"fp8: 'rowwise' .* trainer\.dtype is 'float32'; use",
        ),
        ({"trainer": FP8, "rank": 4}, r"fp8: 'tensorwise' .*\(lora\.rank\) leave as they are"),
        ({"trainer": {"moe_router_bias_update_rate": 1e-3}, "rank": 4}, "0.001 moves biases of the base"),
    ],
)
def test_settings_that_do_not_fit_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "steps", "bound"), [(1, 100, 0), (4, 100, 3), (0, 10, 9), (0, 1, 0)])
def test_bound_that_reaches_the_next_published_version_is_not_refused(
    every: int, steps: int, bound: int
) -> None:
    check_publishing(TrainerConfig(publish_every=every), steps, bound)


@pytest.mark.parametrize(
    ("every", "bound", "said"),
    [
        (4, 2, "with 4 a step trains samples that are 3 versions old, .*publish 3 or fewer, or set .* to 3"),
        (0, 8, "with 0 a step trains samples that are 9 versions old, .*every few steps .*, or set .* to 9"),
    ],
)
def test_bound_that_leaves_nothing_to_train_is_refused(every: int, bound: int, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_publishing(TrainerConfig(publish_every=every), 10, bound)


@pytest.mark.parametrize(("backend", "offload"), [("fsdp", False), ("megatron", True)])
def test_parameters_in_host_memory_are_stepped_there_and_by_fsdp_alone(backend: str, offload: bool) -> None:
    trainer = TrainerConfig(backend=backend, offload_parameters=True)
    said = f"offload_parameters: .* they are '{backend}' and {str(offload).lower()}; change them"
    with pytest.raises(SettingsError, match=said):
        check_backend(trainer, OptimizerConfig(cpu_offload=offload))
    check_backend(replace(trainer, backend="fsdp"), OptimizerConfig(cpu_offload=True))


@pytest.mark.parametrize("backend", ["megatron", "reference"])
@pytest.mark.parametrize(("setting", "value"), [("compile", True), ("fp8", "rowwise")])
def test_settings_of_the_sharded_backend_are_refused_for_others(
    backend: str, setting: str, value: object
) -> None:
    trainer = TrainerConfig(**{"dtype": "bfloat16", setting: value})  # type: ignore[arg-type]
    said = f"trainer.{setting}: {str(value).lower()} is for trainer.backend 'fsdp', and it is '{backend}'"
    with pytest.raises(SettingsError, match=said):
        check_backend(replace(trainer, backend=backend), OptimizerConfig())
    check_backend(replace(trainer, backend="fsdp"), OptimizerConfig())
