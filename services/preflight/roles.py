"""Finds conflicts with models other than the policy, and models and settings that are not used."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from protocol.choices import is_own
from protocol.errors import SettingsError
from protocol.host.hub import is_hub_name
from protocol.weights.lora import LoraConfig
from rollout.environments.registry import ON_DATA as DATA_ENVIRONMENT
from rollout.tokenizer_files import vocabulary_of
from services.preflight.model import ModelFacts, frozen_problems, read_facts
from services.preflight.problem import Problem
from services.settings.hub import ROLES, fetch_role
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS, DISTILLATION
from trainer.random_model import write_tokenizer
from trainer.roles.config import FROZEN_ROLES, REWARD_MODEL, CriticConfig

Rule = tuple[bool, str, str, Sequence[str]]
"""Whether settings are unused, why, what would use them, and their names."""


def role_problems(settings: Settings, model: ModelFacts | None) -> Iterator[Problem]:
    """Yield problems with frozen models.

    Args:
        settings: settings of the run.
        model: the policy; None if it cannot be read.
    """
    yield from _unused_roles(settings)
    yield from _unused_revisions(settings)
    for role in FROZEN_ROLES:
        if not getattr(settings, role).path:
            continue
        try:
            facts = read_facts(fetch_role(settings, role))
            if model is not None:
                yield from _vocabulary_problem(settings, role, model, facts)
                yield from frozen_problems(settings, role, facts)
            if role == REWARD_MODEL:
                yield from _row_problems(settings, facts)
        except SettingsError as error:
            yield Problem(str(error))
    if model is not None and settings.placement.reference and not settings.reference.path:
        yield from frozen_problems(settings, "reference", model)


def _row_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem if the longest row, with the appended score token, has too many positions."""
    text = model.config.get("text_config") or model.config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    longest = settings.context_tokens
    if isinstance(positions, int) and longest + 1 > positions:
        yield Problem(
            f"{model.place} has {positions} positions, and a row has up to {longest} tokens "
            "(engine.max_model_len) with one more behind it, at which its score is read",
            f"lower engine.max_model_len to {positions - 1}",
            "reward_model.path",
            settings.reward_model.path,
        )


def _unused_revisions(settings: Settings) -> Iterator[Problem]:
    for role in ROLES:
        config = getattr(settings, role)
        if config.revision and not is_hub_name(config.path):
            yield Problem(
                f"it is for a model of the hub, and {role}.path is {config.path!r}",
                "remove the setting",
                f"{role}.revision",
                config.revision,
            )


def _unused_roles(settings: Settings) -> Iterator[Problem]:
    algorithm = settings.algorithm
    if algorithm.name == DISTILLATION and not settings.teacher.path:
        yield Problem("there is no teacher", "set teacher.path to a model", "algorithm.name", algorithm.name)
    if settings.teacher.path and algorithm.name != DISTILLATION:
        yield Problem(
            f"algorithm.name {algorithm.name!r} has no teacher",
            f"remove the setting, or use {DISTILLATION!r}",
            "teacher.path",
            settings.teacher.path,
        )
    if settings.reference.path and not algorithm.kl_coef:
        yield Problem(
            "nothing uses a reference model with algorithm.kl_coef = 0",
            "remove the setting, or set algorithm.kl_coef",
            "reference.path",
            settings.reference.path,
        )
    if settings.reward_model.path and (
        ALGORITHMS[algorithm.name].on_data
        or (algorithm.name == DISTILLATION and not algorithm.opd_reward_coef)
    ):
        yield Problem(
            f"algorithm.name {algorithm.name!r} learns nothing from rewards",
            "remove the setting",
            "reward_model.path",
            settings.reward_model.path,
        )
    yield from _unused_ranks(settings)


def _unused_ranks(settings: Settings) -> Iterator[Problem]:
    if settings.placement.reference and not settings.algorithm.kl_coef:
        yield Problem(
            "there is no reference model with algorithm.kl_coef = 0",
            "remove the setting, or set algorithm.kl_coef",
            "placement.reference",
            settings.placement.reference,
        )
    if settings.placement.critic and not settings.needs_critic:
        yield Problem(
            f"algorithm.name {settings.algorithm.name!r} has no critic",
            f"remove the setting, or use {' or '.join(ALGORITHMS.having('has_critic'))}",
            "placement.critic",
            settings.placement.critic,
        )
    for role, named in (("teacher", "teacher"), (REWARD_MODEL, "reward model")):
        ranks = getattr(settings.placement, role)
        if ranks and not getattr(settings, role).path:
            yield Problem(
                f"there is no {named} without {role}.path",
                f"remove the setting, or set {role}.path",
                f"placement.{role}",
                ranks,
            )


def algorithm_problems(settings: Settings) -> Iterator[Problem]:
    """Yield settings that the algorithm ignores, or does not support."""
    algorithm = settings.algorithm
    if algorithm.use_kl_in_reward and (
        not algorithm.kl_coef or ALGORITHMS[algorithm.name].on_data or algorithm.name == DISTILLATION
    ):
        yield Problem(
            f"it needs algorithm.kl_coef above 0, and rewards, which {algorithm.name!r} does not need"
            if algorithm.kl_coef
            else "it does nothing with algorithm.kl_coef = 0",
            "remove the setting" if algorithm.kl_coef else "set algorithm.kl_coef",
            "algorithm.use_kl_in_reward",
            True,
        )
    if algorithm.name == DISTILLATION and not algorithm.opd_kl_coef:
        yield Problem("nothing is learned from the teacher", "set it above 0", "algorithm.opd_kl_coef", 0.0)
    if (ALGORITHMS[algorithm.name].on_data) != (settings.environment.name == DATA_ENVIRONMENT):
        yield Problem(
            f"algorithm 'sft' trains on what environment {DATA_ENVIRONMENT!r} gives; they go together",
            "set algorithm.name and environment.name",
            "environment.name",
            settings.environment.name,
        )
    if ALGORITHMS[algorithm.name].on_data:
        yield from _useless_on_data(settings)


def _useless_on_data(settings: Settings) -> Iterator[Problem]:
    algorithm, sampling = settings.algorithm, settings.sampling
    requirements = {
        "sampling.samples_per_prompt": (sampling.samples_per_prompt, 1, "the data have one answer"),
        "sampling.temperature": (sampling.temperature, 1.0, "it divides the logits of the loss, too"),
        "algorithm.kl_coef": (algorithm.kl_coef, 0.0, "its estimators need tokens of the policy"),
        "algorithm.entropy_coef": (algorithm.entropy_coef, 0.0, "the loss has no such term"),
        "algorithm.ess_scaling": (algorithm.ess_scaling, "", "there is no policy to compare with"),
        "algorithm.entropy_target": (algorithm.entropy_target, 0.0, "the loss has no bonus for entropy"),
        "algorithm.rejection_level": (algorithm.rejection_level, "", "there is no policy to compare with"),
        "trainer.recompute_logprobs": (
            settings.trainer.recompute_logprobs,
            False,
            "there is no policy to compare with",
        ),
    }
    for setting, (value, needed, why) in requirements.items():
        if value != needed:
            yield Problem(f"with algorithm {algorithm.name!r} {why}", f"set it to {needed!r}", setting, value)


def unused_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the settings that differ from their defaults and belong to something that is off."""
    defaults = Settings()
    for is_unused, cause, remedy, names in (*_model_rules(settings), *_algorithm_rules(settings)):
        for setting in names if is_unused else ():
            section, name = setting.split(".")
            value = getattr(getattr(settings, section), name)
            if value != getattr(getattr(defaults, section), name):
                shown = list(value) if isinstance(value, tuple) else value
                yield Problem(
                    f"it changes nothing, because {cause}", f"{remedy}, or remove the setting", setting, shown
                )


def _model_rules(settings: Settings) -> Sequence[Rule]:
    style, algorithm = settings.optimizer.lr_decay_style, settings.algorithm.name
    adapter = [f"lora.{field.name}" for field in fields(LoraConfig)]
    critic = [f"critic.{field.name}" for field in fields(CriticConfig)]
    critic = [name for name in critic if name not in ("critic.path", "critic.revision")]  # refused elsewhere
    return (
        (not settings.lora.rank, "lora.rank is 0", "set lora.rank", adapter),
        (not settings.needs_critic, f"algorithm.name {algorithm!r} has no critic", "use ppo", critic),
        (
            style == "constant",
            "optimizer.lr_decay_style is 'constant'",
            "set optimizer.lr_decay_style",
            ("optimizer.lr_decay_steps", "optimizer.min_lr"),
        ),
        (
            style != "WSD" and not is_own(style),
            f"optimizer.lr_decay_style is {style!r}",
            "set optimizer.lr_decay_style to 'WSD'",
            ("optimizer.lr_wsd_decay_steps",),
        ),
    )


def _algorithm_rules(settings: Settings) -> Sequence[Rule]:
    algorithm, name = settings.algorithm, f"algorithm.name is {settings.algorithm.name!r}"
    built_in = not is_own(algorithm.name)  # an algorithm of the user can read all of [algorithm]
    return (
        (
            built_in and not settings.needs_critic,
            name,
            "use ppo",
            ("algorithm.gamma", "algorithm.gae_lambda", "algorithm.whiten_advantages"),
        ),
        (built_in and algorithm.name != "dr_grpo", name, "use dr_grpo", ("algorithm.length_normalizer",)),
        (
            built_in and not algorithm.rejection_level,
            "algorithm.rejection_level is empty",
            "set algorithm.rejection_level",
            ("algorithm.rejection_low", "algorithm.rejection_high"),
        ),
        (
            algorithm.truncated != "shape",
            f"algorithm.truncated is {algorithm.truncated!r}",
            "set algorithm.truncated to 'shape'",
            ("algorithm.overlong_buffer", "algorithm.overlong_length", "algorithm.overlong_penalty"),
        ),
        (
            not algorithm.filter_groups,
            "algorithm.filter_groups is off",
            "set algorithm.filter_groups",
            ("algorithm.max_filtered_batches",),
        ),
        (
            not algorithm.entropy_target,
            "algorithm.entropy_target is 0",
            "set algorithm.entropy_target",
            ("algorithm.entropy_coef_delta", "algorithm.entropy_coef_max"),
        ),
    )


def _vocabulary_problem(
    settings: Settings, role: str, model: ModelFacts, frozen: ModelFacts
) -> Iterator[Problem]:
    """Compare the vocabularies: a frozen model must have all tokens of the policy, with equal ids."""
    path = getattr(settings, role).path
    if frozen.vocabulary < model.vocabulary:
        yield Problem(
            f"its vocab_size is {frozen.vocabulary}, that of the policy {model.vocabulary}: it has to know "
            "every token that the policy can sample",
            "choose a model of the same vocabulary",
            f"{role}.path",
            path,
        )
    role_vocabulary, policy_vocabulary = vocabulary_of(frozen.place), _policy_vocabulary(settings, model)
    if role_vocabulary == policy_vocabulary:
        return
    here, there = (
        {number: token for token, number in tokens.items()} for tokens in (policy_vocabulary, role_vocabulary)
    )
    first = min(number for number in here.keys() | there.keys() if here.get(number) != there.get(number))
    yield Problem(
        f"its tokenizer has {len(role_vocabulary)} tokens, that of the policy {len(policy_vocabulary)}, and "
        f"token {first} is {there.get(first)!r} there and {here.get(first)!r} here",
        "choose a model of the same tokenizer",
        f"{role}.path",
        path,
    )


def _policy_vocabulary(settings: Settings, model: ModelFacts) -> Mapping[str, int]:
    if settings.render.tokenizer or model.is_made or settings.model.scratch is None:
        return vocabulary_of(Path(settings.render.tokenizer or model.place))
    with tempfile.TemporaryDirectory(prefix="tether-tokenizer-") as directory:
        write_tokenizer(settings.model.scratch, Path(directory))
        return vocabulary_of(Path(directory))
