"""Validates settings against each other: choices that require or exclude each other."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from protocol.choices import is_own
from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from protocol.host.hub import is_hub_name
from protocol.network.addresses import is_loopback
from rollout.engines.registry import ENGINES
from rollout.environments.registry import ENVIRONMENTS, records_calls
from services.settings.engine_pool import check_pool, check_staging, engine_names, engine_with
from services.settings.evaluation import check_evaluation
from services.settings.processes import check_gpus, check_separate_roles, reward_ranks
from services.settings.sections import Settings
from services.settings.shared_weights import check_shared, has_workers_off_trainer_gpus
from services.settings.tracking import check_kinds
from trainer.algorithms.registry import ALGORITHMS
from trainer.hosts.place import check_cluster
from trainer.recipe import check_backend, check_files, check_publishing, check_recipe, check_schedule
from trainer.registry import BACKENDS
from trainer.roles.config import FROZEN_ROLES
from trainer.weights.registry import TRANSPORTS

OWN_OPTIONS = {
    name: f"{name.partition('.')[0]}.options" for name in ("algorithm.name", "optimizer.name", "engine.name")
}
"""Setting that may name user code -> setting with keyword arguments for that code."""


def check_settings(settings: Settings) -> None:
    """Validate everything that can be validated before a process starts.

    Raises:
        SettingsError: a setting is invalid; the message has the setting, its value and the allowed values.
    """
    for error in settings_errors(settings):
        raise error


def settings_errors(settings: Settings) -> Iterator[SettingsError]:
    """Yield all errors; `check_settings` raises the first."""
    for check in CHECKS:
        yield from _errors(check, settings)


def _errors(check: Callable[[Settings], object], settings: Settings) -> Iterator[SettingsError]:
    try:
        check(settings)
    except SettingsError as error:
        yield error


def _check_own_options(settings: Settings) -> None:
    """Check that options are given only with user code."""
    for name, options in OWN_OPTIONS.items():
        value = attrgetter(name)(settings)
        if attrgetter(options)(settings) and not is_own(value):
            raise SettingsError(
                f"setting {options}: they are arguments of your own code, and {name} is {value!r}; leave "
                "them out, or name a MODULE:NAME"
            )


def _check_mismatch(settings: Settings) -> None:
    trainer = settings.trainer
    if trainer.mismatch_action == "stop" and not (trainer.mismatch_limit and trainer.mismatch_share):
        raise SettingsError(
            f"setting trainer.mismatch_action: 'stop' never stops with trainer.mismatch_limit "
            f"{trainer.mismatch_limit:g} and trainer.mismatch_share {trainer.mismatch_share:g}; "
            "both must be above 0"
        )
    if trainer.mismatch_action == "stop" and settings.lora.dropout:
        raise SettingsError(
            "setting trainer.mismatch_action: 'stop' never stops with lora.dropout, under which a training "
            "pass computes another policy than the engine; use 'warn'"
        )


def _check_recipe(settings: Settings) -> None:
    check_recipe(
        settings.algorithm,
        settings.trainer,
        settings.optimizer,
        settings.lora,
        samples=settings.bound.groups_per_step * settings.sampling.kept_samples,
        samples_setting=f"sampling.{'keep_first' if settings.sampling.keep_first else 'samples_per_prompt'}",
    )


def _check_keep_first(settings: Settings) -> None:
    """Check that fewer samples are kept than begun, and that the environment records no calls."""
    kept, samples = settings.sampling.keep_first, settings.sampling.samples_per_prompt
    if not kept:
        return
    if not 2 <= kept < samples:
        raise SettingsError(
            f"setting sampling.keep_first: {kept} of sampling.samples_per_prompt {samples} samples; keep 2 "
            "or more, and fewer than are begun, or remove the setting"
        )
    if records_calls(settings.environment):
        raise SettingsError(
            f"setting sampling.keep_first: environment {settings.environment.name!r} records calls of the "
            "model, by which another worker would continue the samples that were cancelled; remove the "
            "setting, or use an environment without records"
        )


def _check_filter(settings: Settings) -> None:
    """Check that groups with equal rewards have no signal if they are filtered without a user's filter."""
    name, samples = settings.algorithm.name, settings.sampling.samples_per_prompt
    user_filter = settings.algorithm.group_filter
    if not settings.algorithm.filter_groups:
        if user_filter:
            raise SettingsError(
                f"setting algorithm.group_filter: {user_filter!r} is not used; set algorithm.filter_groups, "
                "or remove the setting"
            )
        return
    if settings.reward_model.path:
        raise SettingsError(
            "setting algorithm.filter_groups: groups are filtered before the trainer's reward model "
            "(reward_model.path) scores them; remove the setting, or score by the verifier reward_model"
        )
    if user_filter:
        return
    group_relative = ALGORITHMS.having("group_relative")
    if name not in group_relative and not is_own(name):
        raise SettingsError(
            f"setting algorithm.filter_groups: {name!r} does not compare the samples of a group with each "
            f"other, so equal rewards are a signal, too; remove the setting, or use "
            f"{', '.join(group_relative)}"
        )
    if samples < 2:
        raise SettingsError(
            f"setting algorithm.filter_groups: with sampling.samples_per_prompt {samples} all rewards of a "
            "group are equal, and every group would be dropped; draw 2 samples or more"
        )


def _check_overlong(settings: Settings) -> None:
    """Check that DAPO's overlong penalty has a buffer between 1 and the length limit."""
    algorithm = settings.algorithm
    limit = algorithm.overlong_length or settings.sampling.max_tokens
    if algorithm.truncated == "shape" and not 0 < algorithm.overlong_buffer <= limit:
        raise SettingsError(
            f"setting algorithm.overlong_buffer: {algorithm.overlong_buffer} must be between 1 and "
            f"{limit}, the length from which a sample is punished in full (algorithm.overlong_length, or "
            "sampling.max_tokens), with algorithm.truncated 'shape'"
        )


def _check_critic(settings: Settings) -> None:
    critic, name, backend = settings.critic, settings.algorithm.name, settings.trainer.backend
    with_critic = ALGORITHMS.having("has_critic")
    if name not in with_critic:
        if critic.path:
            raise SettingsError(
                f"setting critic.path: algorithm.name {name!r} has no critic; remove the setting, or use "
                f"{' or '.join(with_critic)}"
            )
        return
    if backend not in BACKENDS.having("critic"):
        raise SettingsError(
            f"setting trainer.backend: {backend!r} has no critic, which algorithm.name {name!r} needs; use "
            f"{' or '.join(BACKENDS.having('critic'))}"
        )
    if critic.critic_warmup_steps >= settings.run.steps:
        raise SettingsError(
            f"setting critic.critic_warmup_steps: {critic.critic_warmup_steps} leaves none of the "
            f"{settings.run.steps} steps of run.steps to the policy"
        )


def _check_hosts(settings: Settings) -> None:
    check_cluster(settings.cluster, settings.trainer_ranks)
    if settings.colocated.enabled and settings.cluster.nodes > 1:
        raise SettingsError(
            f"setting colocated.enabled: trainer and engines take turns on the GPUs of one host, and "
            f"cluster.nodes is {settings.cluster.nodes}; give engines GPUs of their own, or use one host"
        )


def _check_weights_host(settings: Settings) -> None:
    """Check that engines authenticate before they get weights over an address other than loopback."""
    weights = settings.weights
    if (
        weights.transport in TRANSPORTS.having("listens")
        and not is_loopback(weights.host)
        and not settings.bus.curve_dir
    ):
        raise SettingsError(
            f"setting weights.host: {weights.host!r} can be reached from other machines: make keys with "
            "`tether keys DIR` and set bus.curve_dir, or listen on 127.0.0.1"
        )


def _check_alternatives(settings: Settings) -> None:
    if settings.services.pool and settings.services.rollouts != 1:
        raise SettingsError("settings services.pool and services.rollouts exclude each other: give one")
    if settings.model.path and settings.model.scratch:
        raise SettingsError("settings model.path and model.scratch exclude each other: give one")


def check_workers(settings: Settings, rollouts: int) -> None:
    """Check a new number of rollout workers for a running `tether up`.

    Raises:
        SettingsError: the transport allows a single worker, or only workers on the trainer's GPUs.
    """
    if settings.shares_masters and rollouts > 1:
        raise SettingsError(
            f"rollouts={rollouts}: with weights.transport {TRANSPORT!r} there can be one rollout worker"
        )
    if settings.weights.transport == TRANSPORT and has_workers_off_trainer_gpus(settings, rollouts):
        raise SettingsError(
            f"rollouts={rollouts}: with weights.transport {TRANSPORT!r} several must be on the GPUs of "
            f"the trainer's ranks alone, and services.rollout_gpus is {settings.services.rollout_gpus!r}"
        )


def _check_model(settings: Settings) -> None:
    model = settings.model
    if is_hub_name(model.path):
        return
    if model.path and not (settings.source_dir("model") / "config.json").is_file():
        raise SettingsError(
            f"setting model.path: no config.json in {settings.source_dir('model')}; give a Hugging Face "
            "model directory, or the name of a model on the hub, such as Qwen/Qwen2.5-0.5B-Instruct"
        )
    if model.revision:
        raise SettingsError(
            f"setting model.revision: {model.revision!r} is for a model of the hub, and model.path is "
            f"{model.path!r}; remove the setting"
        )


def _check_adapters_and_sleep(settings: Settings) -> None:
    engine = settings.engine.name
    for name in engine_names(settings.engine, settings.services.pool) if settings.lora.rank else ():
        if name not in ENGINES.having("serves_adapters"):
            raise SettingsError(
                f"setting lora.rank: engine {name!r} does not serve adapters; "
                f"use {' or '.join(ENGINES.having('serves_adapters'))}"
            )
    if settings.colocated.enabled and engine not in ENGINES.having("can_sleep"):
        raise SettingsError(
            f"setting colocated.enabled: engine {engine!r} cannot sleep; "
            f"use {' or '.join(ENGINES.having('can_sleep'))}"
        )
    if settings.colocated.enabled and settings.services.pool:
        raise SettingsError(
            "settings colocated.enabled and services.pool exclude each other: "
            "engines that share a GPU are of one kind"
        )


def _check_routing_replay(settings: Settings) -> None:
    trainer, engine = settings.trainer, settings.engine
    if not (trainer.routing_replay or engine.enable_return_routed_experts):
        return
    setting = "trainer.routing_replay" if trainer.routing_replay else "engine.enable_return_routed_experts"
    if records_calls(settings.environment):
        remedy = (
            ""
            if settings.environment.name in ENVIRONMENTS.having("has_sessions")
            else "; set environment.record to 'off'"
        )
        raise SettingsError(
            f"setting {setting}: environment {settings.environment.name!r} does not record experts yet"
            + remedy
        )
    if engine.drafts != "off":
        raise SettingsError(
            f"setting {setting}: experts are recorded of tokens that are generated one by one; "
            "set engine.drafts to 'off'"
        )
    recording = ENGINES.having("records_experts")
    for name in engine_names(settings.engine, settings.services.pool):
        if name not in recording:
            raise SettingsError(
                f"setting {setting}: engine {name!r} does not record which experts it chose; "
                f"use {', '.join(recording[:-1])} or {recording[-1]}"
            )
    if trainer.routing_replay and trainer.backend != "megatron":
        raise SettingsError(
            f"setting trainer.routing_replay: backend {trainer.backend!r} cannot replay routing; use megatron"
        )


def _check_sessions(settings: Settings) -> None:
    if settings.environment.name in ENVIRONMENTS.having("has_sessions"):
        from rollout.environments.session import check_limits, check_rendering  # aiohttp, not for others

        check_rendering(settings.render)
        check_limits(settings.environment, settings.rollout.groups_in_flight, settings.sampling)


def _check_draft_training(settings: Settings) -> None:
    """Check the settings that training a draft head (`engine.draft_lr`) requires.

    Raises:
        SettingsError: a setting does not fit; the message names the first one and its required value.
    """
    for is_wrong, problem in _head_problems(settings) if settings.engine.draft_lr else ():
        if is_wrong:
            raise SettingsError(f"setting engine.draft_lr: {problem}, or set it to 0")


def _head_problems(settings: Settings) -> tuple[tuple[bool, str], ...]:
    engine, trainer, able = settings.engine, settings.trainer, BACKENDS.having("drafts")
    pool = (engine_with(engine, entry.engine, "services.pool") for entry in settings.services.pool)
    return (
        (not engine.draft_model, "there is no head to train; name one in engine.draft_model"),
        (
            not {one.trained_head for one in pool} <= {"", engine.draft_model},
            "one head is trained; let services.pool name no other draft_model",
        ),
        (
            trainer.backend not in able,
            f"trainer.backend {trainer.backend!r} gives no hidden states; use {' or '.join(able)}",
        ),
        (
            settings.parallel.world_size != 1,
            f"a head is trained on one rank, and [parallel] has {settings.parallel.world_size}; use one",
        ),
        (
            settings.weights.transport == TRANSPORT,
            f"with weights.transport {TRANSPORT!r} there is one copy of the weights, the engine's; use shm",
        ),
        (
            settings.colocated.enabled,
            "a trainer that gives its GPU to the engines (colocated.enabled) has no idle time; use two GPUs",
        ),
        (
            settings.run.deterministic,
            "draft training depends on idle time and is not reproducible; remove run.deterministic",
        ),
    )


CHECKS: Sequence[Callable[[Settings], object]] = (
    _check_adapters_and_sleep,
    _check_routing_replay,
    _check_sessions,
    lambda settings: check_pool(settings.services.pool, settings.engine),
    lambda settings: check_gpus(
        settings.services,
        settings.ranks_per_host,
        settings.engine.tensor_parallel_size,
        reward_ranks(settings.reward),
    ),
    lambda settings: check_separate_roles(
        settings.placement,
        settings.trainer,
        {role: getattr(settings, role) for role in FROZEN_ROLES},
        colocated=settings.colocated.enabled,
    ),
    check_shared,
    _check_draft_training,
    lambda s: check_staging(s.services.pool, s.engine, s.weights.transport, s.lora),
    _check_hosts,
    _check_weights_host,
    check_evaluation,
    _check_mismatch,
    _check_own_options,
    _check_recipe,
    _check_filter,
    _check_keep_first,
    _check_overlong,
    lambda settings: check_backend(settings.trainer, settings.optimizer),
    lambda settings: check_schedule(settings.optimizer),
    lambda settings: check_files(settings.weights),
    lambda s: check_publishing(s.trainer, s.run.steps, s.bound.max_staleness),
    _check_critic,
    _check_alternatives,
    _check_model,
    lambda settings: check_kinds(settings.tracking),
)
"""Checks of the settings against each other; each raises SettingsError."""
