"""Runs all checks that are possible before a start, and describes the run."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protocol.errors import SettingsError
from protocol.host.hub import check_upload
from reward.config import VerifierConfig
from rollout.config import EnvironmentConfig
from rollout.environments.command import Command
from rollout.environments.registry import ON_DATA, make_environment
from rollout.prompts.base import Prompt, PromptSource, source_settings
from rollout.prompts.held_out import held_out_sets
from rollout.prompts.registry import make_source
from rollout.render import PromptTooLong
from services.observability.printable import printable
from services.preflight.critic import critic_problems
from services.preflight.data import (
    character_problems,
    count_too_long,
    describe_characters,
    describe_tools,
    first_prompts,
    rendered_prompt,
    rendering_problems,
    stream_problems,
)
from services.preflight.endpoints import local_problems
from services.preflight.engines import engine_problems, kernel_problems
from services.preflight.machine import attention_problems
from services.preflight.memory import describe_memory, host_memory_problems, shared_memory_problems
from services.preflight.model import (
    ModelFacts,
    adapter_problems,
    describe_adapters,
    model_problems,
    read_model,
)
from services.preflight.own_code import own_code_problems
from services.preflight.problem import Problem, refusals
from services.preflight.rewards import reward_gpu_problems, trial_problems, verifier_problems
from services.preflight.roles import algorithm_problems, role_problems, unused_problems
from services.preflight.sampling import (
    determinism_problems,
    distribution_problems,
    group_problems,
    length_problems,
)
from services.preflight.session_endpoint import session_endpoint_problems
from services.runtime.user_modules import add_user_modules
from services.settings.automatic import visible_gpus
from services.settings.evaluation import read_sets
from services.settings.sections import Settings
from services.settings.tracking import missing_libraries
from trainer.roles.config import FROZEN_ROLES
from trainer.storage.remote import RemoteDirectory

MAX_SHOWN_CHARACTERS = 1000
"""Number of characters shown of the first prompt."""
MAX_NARROW_CLIP = 0.01
"""Largest clip that counts as narrow."""
NARROW_CLIPS = {"gspo": "3e-4 and 4e-4"}
"""Algorithm with narrow clips in its paper -> lower and upper clip."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems and warnings of a check."""

    problems: Sequence[Problem]
    """Reasons why the run cannot start; empty if it can."""
    model: ModelFacts | None
    """None if the model cannot be read."""
    source: PromptSource | None
    """None if the prompts cannot be read."""


def check_run(settings: Settings, *, local: bool = False) -> Findings:
    """Find all problems of a run whose single settings are valid, without a model or a process.

    Args:
        settings: settings of the run.
        local: whether all services run on this machine, so that its ports, keys and libraries are checked.
    """
    modules = add_user_modules(settings)
    problems = [*distribution_problems(settings.sampling), *group_problems(settings)]
    problems += [*length_problems(settings), *determinism_problems(settings)]
    problems += [*session_endpoint_problems(settings), *unused_problems(settings)]
    problems += refusals(_check_environment, settings)
    source: PromptSource | None = None
    model: ModelFacts | None = None
    try:
        source = make_source(settings.prompts)
        if settings.eval.every or (settings.eval.at_end and local):  # at the end `tether up` scores
            read_sets(settings, source)
        else:
            held_out_sets(source, settings.prompts, settings.eval.sets, settings.eval.prompts)
    except SettingsError as error:
        problems.append(Problem(str(error)))
    try:
        model = read_model(settings)
    except SettingsError as error:
        problems.append(Problem(str(error)))
    prompts = first_prompts(source) if source else []
    if source:
        problems += stream_problems(settings, source)
    problems += verifier_problems(settings, prompts)
    problems += [*algorithm_problems(settings), *own_code_problems(settings, prompts)]
    problems += role_problems(settings, model)
    if model:
        problems += model_problems(settings, model)
        problems += [*engine_problems(settings, model), *adapter_problems(settings, model)]
        problems += critic_problems(settings, model)
        problems += character_problems(settings, prompts)
        problems += rendering_problems(settings, model, prompts)
    problems += _missing_trackers(settings)
    problems += _missing_stores(settings)
    if local:
        problems += [*local_problems(settings), *refusals(_check_program, settings)]
        problems += reward_gpu_problems(settings)
        problems += [] if problems else trial_problems(settings, prompts, modules)
        if model:
            problems += [] if problems else host_memory_problems(settings, model)
            problems += shared_memory_problems(settings, model)
            problems += attention_problems(settings, model, visible_gpus(os.environ))
            problems += kernel_problems(settings, model, visible_gpus(os.environ))
    return Findings(tuple(_deduplicate(problems)), model, source)


def describe_run(settings: Settings, model: ModelFacts, source: PromptSource) -> list[str]:
    """Return lines that describe model, prompts, steps and processes of the run."""
    bound, sampling, services = settings.bound, settings.sampling, settings.services
    parallel, engine, prompts = settings.parallel, settings.engine, first_prompts(source)
    count = f"{model.parameters:,}" if model.parameters else "unknown"
    origin = "" if model.is_made else ", made at the start"
    ranks = (
        f"tensor {parallel.tensor_model_parallel_size} x pipeline {parallel.pipeline_model_parallel_size} x "
        f"context {parallel.context_parallel_size} x data {parallel.data_parallel_size}"
    )
    engines = ", ".join(
        f"{entry.count} on {entry.engine.get('name', engine.name)}" for entry in services.pool
    )
    name = " + ".join(entry.name for entry in settings.prompts.mixture) or settings.prompts.source
    return [
        f"model    {model.place}: {model.config.get('model_type')}, {count} parameters{origin}"
        + _code(settings),
        f"prompts  {name}: {_stream(settings, source)}; {_held_out(settings, source)}"
        + _too_long_prompts(settings, model, source),
        f"first    {_first_prompt(settings, model, prompts)}",
        *describe_characters(settings, model, prompts),
        *describe_tools(settings, model),
        f"steps    {settings.run.steps:,} of {bound.groups_per_step} prompts x {sampling.kept_samples} "
        f"samples{_max_tokens(settings)}; "
        f"E={bound.max_staleness}, {bound.staleness_policy}",
        *_describe_keep_first(settings),
        f"learns   {settings.algorithm.name}, lr {settings.optimizer.lr:g}{_clips(settings)}"
        + describe_adapters(settings, model),
        f"trainer  {settings.trainer.backend}, {settings.trainer.dtype}, "
        f"{settings.trainer_ranks} rank(s): {ranks}{_separate_models(settings)}"
        f"{_on_gpus(services.trainer_gpus)}{_on_hosts(settings)}",
        *([f"critic   {settings.critic_dir}"] if settings.needs_critic else []),
        f"rollout  {engines or f'{services.rollouts} on {engine.name}'}, {engine.dtype}, "
        f"tensor {engine.tensor_parallel_size}{_on_gpus(services.rollout_gpus)}; "
        f"weights by {settings.weights.transport}",
        f"reward   {services.rewards} worker(s): "
        + (", ".join(map(_score, settings.reward.verifiers)) or "the environment's"),
        *(
            f"{role:<8} {settings.role_dir(role)}, not trained"
            for role in FROZEN_ROLES
            if getattr(settings, role).path
        ),
        *describe_memory(settings, model),
    ]


def _code(settings: Settings) -> str:
    """Return a warning if code in the model's directory will run; else an empty string."""
    trusted = settings.model.trust_remote_code
    return "; WARNING: Python files in it are run (model.trust_remote_code)" if trusted else ""


def _stream(settings: Settings, source: PromptSource) -> str:
    """Describe the number of prompts, and the step after which they end if that is early."""
    if source.size is None:
        return "without end"
    passes, steps = settings.prompts.passes, source.size // settings.bound.groups_per_step
    ends = f", which end after step {steps:,}" if steps < settings.run.steps else ""
    return f"{source.size:,} in {passes} pass{'es' if passes > 1 else ''}{ends}"


def _max_tokens(settings: Settings) -> str:
    """Describe the maximum number of sampled tokens per step, or per turn in multi-turn environments."""
    max_tokens, samples = settings.sampling.max_tokens, settings.sampling.kept_samples
    if settings.environment.name == ON_DATA:
        return ""
    if settings.environment.name != EnvironmentConfig().name:
        return f", at most {max_tokens:,} sampled tokens each turn"
    return f", at most {settings.bound.groups_per_step * samples * max_tokens:,} sampled tokens each"


def _describe_keep_first(settings: Settings) -> list[str]:
    """Return a warning if samples are selected by length (`sampling.keep_first`)."""
    sampling = settings.sampling
    if not sampling.keep_first:
        return []
    return [
        f"kept     WARNING: the first {sampling.keep_first} of {sampling.samples_per_prompt} samples to "
        "finish are trained, so long answers are left out and the model learns from short ones; compare "
        "response_length_mean with cancelled_length_mean"
    ]


def _clips(settings: Settings) -> str:
    """Describe the loss's clips, and the paper's clips if those are far narrower."""
    algorithm, paper_clips = settings.algorithm, NARROW_CLIPS.get(settings.algorithm.name, "")
    is_wide = paper_clips and algorithm.clip_low > MAX_NARROW_CLIP
    note = f" (the paper has {paper_clips}: a name sets no number)" if is_wide else ""
    return f", clips {algorithm.clip_low:g} and {algorithm.clip_high:g}{note}"


def _held_out(settings: Settings, source: PromptSource) -> str:
    """Describe the number of held-out prompts, and how many requested ones were duplicates."""
    prompts = settings.prompts
    sources = [source_settings(prompts, entry) for entry in prompts.mixture] or [prompts]
    held_out, requested = len(source.held_out()), sum(entry.held_out for entry in sources)
    repeated = f" ({requested - held_out:,} of {requested:,} repeat others, or occur in training)"
    return f"{held_out:,} held out{repeated if held_out < requested else ''}"


def _too_long_prompts(settings: Settings, model: ModelFacts, source: PromptSource) -> str:
    """Describe how many of the first prompts are dropped as too long; empty if none."""
    prompts = first_prompts(source)
    count, max_tokens = count_too_long(settings, model, prompts), settings.rendering.max_prompt_tokens
    if not count:
        return ""
    return f"; {count} of the first {len(prompts)} are longer than {max_tokens:,} tokens, and are dropped"


def _first_prompt(settings: Settings, model: ModelFacts, prompts: Sequence[Prompt]) -> str:
    """Return the beginning of the first prompt that is not too long, as the model reads it, quoted."""
    for prompt in prompts:
        with contextlib.suppress(PromptTooLong):
            text = rendered_prompt(settings, model, prompt)
            hidden = len(text) - MAX_SHOWN_CHARACTERS
            more = f" and {hidden:,} more characters" if hidden > 0 else ""
            return printable(json.dumps(text[:MAX_SHOWN_CHARACTERS], ensure_ascii=False)) + more
    return "none"


def _score(verifier: VerifierConfig) -> str:
    """Describe a score of the reward: its name, and verifier and weight if they differ from the default."""
    shown = [verifier.name] if verifier.component != verifier.name else []
    shown += [f"weight {verifier.weight:g}"] if verifier.weight != VerifierConfig().weight else []
    return verifier.component + (f" ({', '.join(shown)})" if shown else "")


def _separate_models(settings: Settings) -> str:
    """Describe the models on separate ranks, and their numbers of ranks."""
    return "".join(f" + {ranks} of the {role}" for role, ranks in settings.placement.ranks.items())


def _on_gpus(gpus: str) -> str:
    return f" on GPUs {gpus}" if gpus else ""


def _on_hosts(settings: Settings) -> str:
    return f" on {settings.cluster.nodes} hosts" if settings.cluster.nodes > 1 else ""


def _check_environment(settings: Settings) -> None:
    environment = make_environment(settings.environment)
    environment.apply_engine_config(settings.engine)
    environment.check(str(settings.model_dir) if settings.model_dir.is_dir() else "")


def _check_program(settings: Settings) -> None:
    if isinstance(environment := make_environment(settings.environment), Command):
        environment.check_program()


def _missing_trackers(settings: Settings) -> Iterator[Problem]:
    for kind in missing_libraries(settings.tracking):
        cause, remedy = f"{kind} is not installed", f"pip install 'tether-rl[{kind}]', or remove the setting"
        yield Problem(cause, remedy, "tracking.kind", kind)


def _missing_stores(settings: Settings) -> Iterator[Problem]:
    for setting, url in (("run.remote", settings.run.remote), ("weights.url", settings.weights.url)):
        if url:
            yield from refusals(RemoteDirectory, url, setting)
    if settings.run.hub:
        yield from refusals(check_upload, settings.run.hub, "run.hub")


def _deduplicate(problems: Iterable[Problem]) -> list[Problem]:
    """Remove duplicate problems, since engines of a pool may share one."""
    return list({str(problem): problem for problem in problems}.values())
