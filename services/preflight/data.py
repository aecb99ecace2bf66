"""Finds conflicts of prompts and tokenizer with the settings: steps, characters, lengths, stop tokens."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from protocol.errors import SettingsError
from rollout.environments.registry import ENVIRONMENTS
from rollout.prompts.base import Prompt, PromptSource
from rollout.render import NO_TOOLS, PromptTooLong, Renderer
from services.preflight.model import ModelFacts
from services.preflight.problem import Problem
from services.settings.sections import Settings
from trainer.random_model import write_tokenizer

SAMPLE = 16
"""Number of first prompts that are rendered and checked against the verifiers' needs."""


def stream_problems(settings: Settings, source: PromptSource) -> Iterator[Problem]:
    """Yield a problem if a pass has fewer prompts than a step, or a lockstep run has too few in total."""
    groups, passes = settings.bound.groups_per_step, settings.prompts.passes
    size = source.size
    if settings.is_lockstep and size is not None and size < settings.run.steps * groups:
        yield Problem(
            f"run.deterministic needs prompts for all steps, {settings.run.steps * groups}, and there are "
            f"{size}",
            f"set it to {size // groups} or less, or give more prompts or prompts.passes",
            "run.steps",
            settings.run.steps,
        )
    if size is None or not passes or groups <= size // passes:
        return
    yield Problem(
        f"a pass has {size // passes} prompts (prompts.passes = {passes}), fewer than a step takes",
        f"set it to {size // passes} or less, or give more prompts",
        "bound.groups_per_step",
        groups,
    )


def rendering_problems(settings: Settings, model: ModelFacts, prompts: list[Prompt]) -> Iterator[Problem]:
    """Yield problems with the tokenizer: stop tokens, and prompts that are too long or cannot be rendered."""
    try:
        renderer = _renderer(settings, model)
    except SettingsError as error:
        yield Problem(str(error))
        return
    outside = [token for token in renderer.stop_token_ids if model.vocabulary and token >= model.vocabulary]
    if outside:
        yield Problem(
            f"stop token {outside[0]} is outside the model's vocabulary of {model.vocabulary} tokens",
            "fix the tokenizer and generation_config.json of the model, or set render.stop and "
            "render.stop_at_eos",
        )
    too_long = 0
    for prompt in prompts:
        try:
            tokens = renderer.prompt_tokens(prompt)
            if settings.render.tokenizer and model.vocabulary and max(tokens) >= model.vocabulary:
                yield Problem(
                    f"token {max(tokens)} of prompt {prompt.index} is outside the model's vocabulary of "
                    f"{model.vocabulary} tokens",
                    "give the tokenizer that the model was trained with",
                    "render.tokenizer",
                    settings.render.tokenizer,
                )
                return
        except PromptTooLong as error:
            too_long += 1
            if too_long == len(prompts):
                yield Problem(
                    f"all of the first {too_long} prompts are too long: {error}",
                    "raise render.max_prompt_tokens or engine.max_model_len, or lower sampling.max_tokens",
                )
        except SettingsError as error:
            yield Problem(str(error))
            return


def character_problems(settings: Settings, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Yield the first prompt with characters that a random model's tokenizer would drop."""
    scratch, render = settings.model.scratch, settings.render
    if scratch is None or render.tokenizer or render.chat_template_file:
        return
    for prompt in prompts:
        texts = [content for _, content in prompt.messages] or [prompt.text]
        outside = sorted(set("".join((*texts, render.system, render.suffix))) - set(scratch.vocabulary))
        if outside:
            yield Problem(
                f"prompt {prompt.index} has characters outside it, which the model would not see: "
                f"{''.join(outside[:20])!r}",
                "add them, or give other prompts",
                "model.scratch.vocabulary",
                scratch.vocabulary,
            )
            return


def count_too_long(settings: Settings, model: ModelFacts, prompts: Sequence[Prompt]) -> int:
    """Return the number of prompts longer than `render.max_prompt_tokens`."""
    renderer = _renderer(settings, model)
    return sum(_is_too_long(renderer, prompt) for prompt in prompts)


def _is_too_long(renderer: Renderer, prompt: Prompt) -> bool:
    try:
        renderer.prompt_tokens(prompt)
    except PromptTooLong:
        return True
    return False


def rendered_prompt(settings: Settings, model: ModelFacts, prompt: Prompt) -> str:
    """Return a prompt as the model reads it, including special tokens.

    Raises:
        SettingsError: the prompt cannot be rendered.
    """
    renderer = _renderer(settings, model)
    return renderer.with_special(renderer.prompt_tokens(prompt))


def describe_tools(settings: Settings, model: ModelFacts) -> list[str]:
    """Return a warning if agents' requests may offer tools that the model's template ignores."""
    environment = settings.environment
    if environment.name not in ENVIRONMENTS.having("has_sessions"):
        return []
    if environment.options.get("tool_syntax") == "none" or _renderer(settings, model).writes_tools:
        return []
    return [f"tools    WARNING: {NO_TOOLS}"]


def describe_characters(settings: Settings, model: ModelFacts, prompts: Sequence[Prompt]) -> list[str]:
    """Return a warning if prompts contain characters that the tokenizer drops."""
    texts = [content for prompt in prompts for _, content in (prompt.messages or [("", prompt.text)])]
    lost = _renderer(settings, model).characters_without_tokens(
        (*texts, settings.render.system, settings.render.suffix)
    )
    if not lost:
        return []
    return [f"first    WARNING: the tokenizer has no tokens for {lost[:20]!r}, which the model does not read"]


def _renderer(settings: Settings, model: ModelFacts) -> Renderer:
    """Load the renderer of a run, whose random model may not exist yet."""
    with tempfile.TemporaryDirectory(prefix="tether-tokenizer-") as directory:
        place = model.place
        if not model.is_made and settings.model.scratch is not None:
            place = Path(directory)
            write_tokenizer(settings.model.scratch, place)
        return Renderer(place, settings.rendering)


def first_prompts(source: PromptSource) -> list[Prompt]:
    """Return the first prompts of a stream, at most `SAMPLE`."""
    size = SAMPLE if source.size is None else min(SAMPLE, source.size)
    return [source.at(index) for index in itertools.islice(range(size), SAMPLE)]
