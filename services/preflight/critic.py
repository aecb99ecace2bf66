"""Finds settings that conflict with the critic's model. Reads files and builds no model."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from rollout.tokenizer_files import vocabulary_of
from services.preflight.model import ModelFacts
from services.preflight.problem import Problem
from services.settings.hub import fetch_critic
from services.settings.sections import Settings
from trainer.megatron.families.config_file import read_config
from trainer.megatron.families.experts import check_ranks
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import architecture_of, as_critic
from trainer.megatron.families.stages import export_plan
from trainer.megatron.layout import Layout

SETTING = "critic.path"


def critic_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield why the critic cannot be trained with the policy's model, if the algorithm needs a critic."""
    if not settings.needs_critic:
        return
    if settings.critic.path:
        try:
            fetch_critic(settings)
            config = critic_config(settings, model)
        except SettingsError as error:
            yield Problem(str(error))
            return
        yield from _token_problems(settings, model, config)
        if not any(settings.critic_dir.glob("*.safetensors")):
            yield Problem(
                "it holds no *.safetensors, and the critic starts from weights",
                "",
                *_setting_and_value(settings),
            )
    if settings.trainer.backend == "megatron":
        try:
            architecture, apart = critic_architecture(settings, model), settings.placement.critic
            parallel = settings.placement.layout("critic") if apart else settings.parallel
            check_ranks(architecture.experts, parallel)
            export_plan(architecture, Layout.of(parallel, architecture.layers))
        except SettingsError as error:
            where = "placement.critic: " if settings.placement.critic else ""
            yield Problem(f"the critic: {where}{error}", "", *_setting_and_value(settings))


def critic_config(settings: Settings, model: ModelFacts) -> dict[str, Any]:
    """Return config.json of the critic's initial model.

    Raises:
        SettingsError: the file cannot be read.
    """
    if not settings.critic.path:
        return dict(model.config)
    return read_config(settings.critic_dir)


def critic_architecture(settings: Settings, model: ModelFacts) -> Architecture:
    """Return the architecture of the critic with the backend `megatron`.

    Raises:
        SettingsError: the backend does not support the model.
    """
    config = critic_config(settings, model)
    return as_critic(architecture_of(config, settings.critic_dir / "config.json"))


def _token_problems(settings: Settings, model: ModelFacts, config: dict[str, Any]) -> Iterator[Problem]:
    """Compare the tokens of both models, by tokenizers or vocabulary sizes."""
    vocabulary = int(config.get("vocab_size") or 0)
    policy_tokens, critic_tokens = _tokens(model.place), _tokens(settings.critic_dir)
    if policy_tokens and critic_tokens and policy_tokens != critic_tokens:
        yield Problem(
            f"its tokenizer differs from that of {model.place}, so the critic would read other tokens",
            "choose a model with the same tokenizer",
            *_setting_and_value(settings),
        )
    needed = max(policy_tokens.values()) + 1 if policy_tokens and critic_tokens else model.vocabulary
    if vocabulary < needed:
        yield Problem(
            f"it knows {vocabulary} tokens, and the policy's model has {needed}",
            "choose a model with the same vocabulary",
            *_setting_and_value(settings),
        )


def _tokens(directory: Path) -> Mapping[str, int]:
    """Return token -> id of a model's tokenizer; empty if no tokenizer can be loaded."""
    with suppress(SettingsError):
        return vocabulary_of(directory)
    return {}


def _setting_and_value(settings: Settings) -> tuple[str, object]:
    return (SETTING, settings.critic.path) if settings.critic.path else ("", None)
