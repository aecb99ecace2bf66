"""Finds verifiers that cannot score the prompts, and runs the user's verifiers on one prompt."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence

from protocol.choices import is_own, load
from protocol.errors import RewardError, SettingsError
from protocol.validation import validated
from reward.config import RewardConfig
from reward.verifiers.registry import VERIFIERS, make_verifier
from reward.verifiers.reward_model import Options
from reward.workers.group_scoring import primaries
from reward.workers.pool import ScorePool, check_names
from rollout.environments.registry import ENVIRONMENTS, EnvironmentEntry
from rollout.prompts.base import Prompt
from services.preflight.problem import Problem, refusals
from services.settings.processes import gpu_list
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS, DISTILLATION, check_turn_scores

ENTRY_FIELDS = {"reasoning_gym": ("family", "entry")}
"""Verifier -> metadata fields that it needs, if no option names them."""
RESPONSE = "an answer"
"""Response for trials of the user's verifiers."""
COMPARING = frozenset({"exact_match", "last_integer", "math", "positions"})
"""Verifiers that compare with an answer: cheap, and without code of the model or the user."""
REWARD_MODEL = Options("")
"""Default options of the verifier `reward_model`."""


def verifier_problems(settings: Settings, prompts: list[Prompt]) -> Iterator[Problem]:
    """Yield verifiers that are missing, invalid, without their fallback, or need a field no prompt has."""
    name = settings.environment.name
    if not settings.reward.verifiers and not ENVIRONMENTS.get(name, EnvironmentEntry("")).gives_reward:
        yield Problem(
            f"environment {name!r} has no reward of its own, so no answer could be scored",
            "name a verifier, or constant for an algorithm without rewards",
            "reward.verifiers",
            [],
        )
    elif _is_always_zero(settings):
        yield Problem(
            "the weights of all scores are 0, so every reward would be 0, and nothing would be learned",
            "give one a weight",
            "reward.verifiers",
            [verifier.component for verifier in settings.reward.verifiers],
        )
    yield from refusals(check_names, settings.reward)
    scorers = primaries(settings.reward)
    for number, verifier in enumerate(settings.reward.verifiers):
        try:
            if make_verifier(verifier.name, verifier.options).by_turn:
                check_turn_scores(settings.algorithm, reward_model=settings.reward_model.path)
            fields = _needed_fields(verifier.name, verifier.options)
        except SettingsError as error:
            yield Problem(str(error))
            continue
        for field in fields:
            if prompts and all(prompt.metadata.get(field) is None for prompt in prompts):
                found = ", ".join(sorted(map(str, prompts[0].metadata))) or "none"
                yield Problem(
                    f"it needs the field {field!r} of a prompt, and the prompts have {found}",
                    "set prompts.answer_field, or the option of the verifier that names the field",
                    "reward.verifiers",
                    verifier.name,
                )
        if number in scorers and not verifier.fallback:  # with a fallback single failures are allowed
            yield from _wrong_answers(verifier.name, verifier.options, prompts)


def _is_always_zero(settings: Settings) -> bool:
    """Return whether all weights of the reward are 0, and the algorithm learns from rewards alone."""
    reward, algorithm = settings.reward, settings.algorithm
    if ALGORITHMS[algorithm.name].on_data or algorithm.name == DISTILLATION:
        return False
    weights = [reward.verifiers[number].weight for number in primaries(reward)]
    if ENVIRONMENTS.get(settings.environment.name, EnvironmentEntry("")).gives_reward:
        weights.append(reward.environment_weight)
    if settings.reward_model.path:
        weights.append(settings.reward_model.weight)
    return bool(weights) and not any(weights)  # without weights, the fallbacks are wrong


def _wrong_answers(name: str, options: dict[str, object], prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield the first prompt whose answer a built-in verifier cannot compare with.

    A field that all prompts lack is reported elsewhere.
    """
    if name not in COMPARING:
        return
    module = load(VERIFIERS[name].path)
    bound = validated(module.Options, options, f"verifier {name}: option ")
    if all(prompt.metadata.get(bound.key) is None for prompt in prompts):
        return
    for prompt in prompts:
        try:
            module.score(prompt.text, RESPONSE, prompt.metadata, bound)
        except RewardError as error:
            yield Problem(f"verifier {name}, tried on prompt {prompt.index}: {error}")
            return


def trial_problems(
    settings: Settings, prompts: Sequence[Prompt], modules: Sequence[str]
) -> Iterator[Problem]:
    """Score `RESPONSE` to the first prompt; yield the error of each user verifier.

    Two responses are scored if groups have several samples, because a function may compare them. The function
    runs in a worker process, within the limits of `[reward]`.

    Args:
        settings: settings of the run.
        prompts: first prompts of the stream.
        modules: directories with modules of the user.
    """
    for verifier in settings.reward.verifiers:
        if not prompts or not (is_own(verifier.name) or verifier.name == "function"):
            continue
        alone = dataclasses.replace(verifier, fallback="")
        reward = dataclasses.replace(settings.reward, verifiers=(alone,), workers=1)
        try:
            asyncio.run(_score(reward, modules, prompts[0], min(2, settings.sampling.samples_per_prompt)))
        except (RewardError, SettingsError) as error:
            yield Problem(f"verifier {verifier.component}, tried on prompt 0 and {RESPONSE!r}: {error}")


async def _score(reward: RewardConfig, modules: Sequence[str], prompt: Prompt, samples: int) -> None:
    async with ScorePool(reward, modules) as pool:
        await pool.score(prompt.text, [RESPONSE] * samples, prompt.metadata)


def _needed_fields(name: str, options: dict[str, object]) -> tuple[str, ...]:
    """Return the metadata fields that a built-in verifier needs; none for a user's module."""
    if name not in VERIFIERS:
        return ()
    module = load(VERIFIERS[name].path)
    bound = validated(module.Options, options, f"verifier {name}: option ")
    if hasattr(module, "needed_fields"):
        return tuple(module.needed_fields(bound))
    if getattr(bound, "schema", None):  # json_schema with one schema for all prompts
        return ()
    key = getattr(bound, "key", None)
    return ENTRY_FIELDS.get(name, ()) if key is None else (str(key),)


def reward_gpu_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the first GPU whose memory shares over all processes sum to more than one."""
    services = settings.services
    for gpu, share in _reward_shares(settings.reward, gpu_list(services.reward_gpus)).items():
        others = {
            name: fraction
            for name, gpus, fraction in (
                ("trainer.memory_fraction", services.trainer_gpus, settings.trainer.memory_fraction),
                ("engine.memory_fraction", services.rollout_gpus, settings.engine.memory_fraction),
            )
            if gpu in gpu_list(gpus)
        }
        shares = others.values()
        taken = max(shares, default=0.0) if settings.colocated.enabled else sum(shares)
        if others and round(taken + share, 4) > 1:
            named = " and ".join(f"{name} {fraction:g}" for name, fraction in others.items())
            yield Problem(
                f"the memory shares of GPU {gpu} exceed 1: {named} and {share:g} for reward models",
                "set lower shares, their option memory_fraction among them, or give them another GPU",
                "services.reward_gpus",
                services.reward_gpus,
            )
            return


def _reward_shares(config: RewardConfig, gpus: list[str]) -> dict[str, float]:
    """Return the memory share of each GPU that the engines of one reward service use."""
    found: dict[str, float] = {}
    for entry in config.verifiers:
        options = entry.options
        kind, _, number = str(options.get("device", "cpu")).partition(":")
        if entry.name != "reward_model" or options.get("engine") not in ("vllm", "sglang") or kind != "cuda":
            continue
        first = int(number) if number.isdecimal() else 0
        share, tensor = (
            options.get(name, getattr(REWARD_MODEL, name))
            for name in ("memory_fraction", "tensor_parallel_size")
        )
        if not isinstance(share, int | float) or not isinstance(tensor, int):
            continue  # reported elsewhere
        share *= config.workers
        for gpu in gpus[first : first + tensor]:
            found[gpu] = round(found.get(gpu, 0.0) + share, 4)
    return found
