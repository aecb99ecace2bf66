"""Validates section `[eval]`, and resolves the engine, sets and scores of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES
from rollout.prompts.base import Prompt, PromptSource
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.registry import make_source
from services.settings.engine_pool import engine_with
from services.settings.processes import gpu_list
from services.settings.sections import EvalConfig, Settings

HeldOutSets = Mapping[str, Sequence[Prompt]]
"""Name of a held-out set -> its prompts, in the order of the settings."""


@dataclass(frozen=True, slots=True)
class BestScore:
    """The score that selects the best version."""

    set: str
    """Name of the held-out set; empty for the first set."""
    metric: str
    """greedy, sampled or pass@K."""


def pass_at_k_values(samples: int) -> list[int]:
    """Return the k of pass@k: the powers of two up to the number of samples."""
    return [1 << power for power in range(samples.bit_length())] if samples else []


def best_score(config: EvalConfig) -> BestScore:
    """Return the score named by `eval.best`.

    Raises:
        SettingsError: `eval.best` names a score that is not measured.
    """
    if not config.best:
        return BestScore("", "greedy")
    name, _, metric = config.best.rpartition("/")
    metrics = ["greedy", *(["sampled"] if config.samples else []), *metrics_at_k(config.samples)]
    if not name or metric not in metrics:
        raise SettingsError(
            f"setting eval.best: {config.best!r}; write SET/SCORE, with one of the scores "
            f"{', '.join(metrics)}"
        )
    return BestScore(name, metric)


def metrics_at_k(samples: int) -> list[str]:
    """Return the names of the pass@k scores for this number of samples."""
    return [f"pass@{k}" for k in pass_at_k_values(samples)]


def read_sets(settings: Settings, source: PromptSource | None = None) -> HeldOutSets:
    """Read the held-out sets of a run, each limited to `eval.prompts` prompts. Reads files.

    Args:
        settings: settings of the run.
        source: prompt stream of `[prompts]`, if already created.

    Raises:
        SettingsError: a set cannot be read, there is no set, or the set in `eval.best` does not exist.
    """
    config = settings.eval
    stream = source or make_source(settings.prompts)
    found = held_out_sets(stream, settings.prompts, config.sets, config.prompts)
    sets = {name: prompts for name, prompts in found.items() if prompts}
    if not sets:
        raise SettingsError(
            "no held-out prompts to score on: set prompts.held_out or prompts.held_out_path, "
            "or describe a set in [[eval.sets]]"
        )
    wanted = best_score(config).set
    if wanted and wanted not in sets:
        raise SettingsError(f"setting eval.best: there is no held-out set {wanted!r}, only {', '.join(sets)}")
    return sets


def eval_engine(settings: Settings) -> EngineConfig:
    """Return the settings of the evaluation's engine: `[engine]` with the overrides of `eval.engine`.

    Draft training is disabled, because exported models contain no trained draft head.

    Raises:
        SettingsError: a setting is invalid; the message names it.
    """
    return replace(engine_with(settings.engine, settings.eval.engine, "eval.engine"), draft_lr=0.0)


def check_evaluation(settings: Settings) -> None:
    """Validate section `[eval]` against the other sections.

    Raises:
        SettingsError: a setting is invalid; the message has the setting and its required value.
    """
    engine, services = eval_engine(settings), settings.services
    best_score(settings.eval)
    gpus = gpu_list(services.eval_gpus)
    if gpus and len(gpus) < engine.tensor_parallel_size:
        raise SettingsError(
            f"setting services.eval_gpus: {services.eval_gpus!r} names {len(gpus)} GPUs, "
            f"the engine of the evaluation has tensor_parallel_size {engine.tensor_parallel_size}"
        )
    if not settings.eval.every:
        return
    if settings.lora.rank and not ENGINES[engine.name].serves_adapters:
        raise SettingsError(
            f"setting eval.engine.name: engine {engine.name!r} does not serve adapters; "
            f"use one of {', '.join(ENGINES.having('serves_adapters'))}"
        )
    if settings.colocated.enabled and not gpus:
        raise SettingsError(
            "setting eval.every: trainer and engines take turns on their GPUs (colocated.enabled), "
            "an evaluation cannot; name GPUs of its own in services.eval_gpus, or set eval.every to 0"
        )
    used_gpus = set(gpu_list(services.trainer_gpus)) | set(gpu_list(services.rollout_gpus))
    if settings.colocated.enabled and used_gpus & set(gpus):
        raise SettingsError(
            f"setting services.eval_gpus: {services.eval_gpus!r}, but with colocated.enabled trainer and "
            f"engines take turns on {', '.join(sorted(used_gpus & set(gpus)))}; name others"
        )
    if used_gpus and not gpus:
        raise SettingsError(
            "setting services.eval_gpus is empty, but other services have GPUs of their own: name the GPUs "
            "of the evaluation, which may be shared if engine.memory_fraction leaves room"
        )
