"""Finds what prompts and tokenizer do not allow: steps, verifiers, lengths, stop tokens."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from protocol.choices import checked_options, load
from protocol.errors import SettingsError
from reward.verifiers.registry import VERIFIERS, make_verifier
from reward.workers.group_scoring import check_fallbacks
from rollout.prompts.base import Prompt, PromptSource
from rollout.render import PromptTooLong, Renderer
from services.preflight.model import ModelFacts
from services.preflight.problem import Problem
from services.settings.sections import Settings
from trainer.algorithms.registry import check_turn_scores
from trainer.random_model import write_tokenizer

SAMPLE = 16
"""Prompts, the first of the stream, that are rendered and compared with what verifiers need."""
ENTRY_FIELDS = {"reasoning_gym": ("family", "entry")}
"""Verifier -> fields of the metadata that it needs, where no option names them."""


def stream_problems(settings: Settings, source: PromptSource) -> Iterator[Problem]:
    """Yield the problem if one pass of the prompts is smaller than a step."""
    groups, passes = settings.bound.groups_per_step, settings.prompts.passes
    size = source.size
    if size is None or not passes or groups <= size // passes:
        return
    yield Problem(
        f"a pass has {size // passes} prompts (prompts.passes = {passes}), fewer than a step takes",
        f"set it to {size // passes} or less, or give more prompts",
        "bound.groups_per_step",
        groups,
    )


def rendering_problems(settings: Settings, model: ModelFacts, prompts: list[Prompt]) -> Iterator[Problem]:
    """Yield problems with the tokenizer: stop tokens, and prompts that are too long or unrenderable."""
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


def rendered_prompt(settings: Settings, model: ModelFacts, prompt: Prompt) -> str:
    """Return a prompt as the model will read it, special tokens included.

    Raises:
        SettingsError: it cannot be rendered.
    """
    renderer = _renderer(settings, model)
    return "".join(map(renderer.piece, renderer.prompt_tokens(prompt)))


def _renderer(settings: Settings, model: ModelFacts) -> Renderer:
    """Load the renderer of a run, whose random model may not be made yet."""
    with tempfile.TemporaryDirectory(prefix="tether-tokenizer-") as directory:
        place = model.place
        if not model.is_made and settings.model.scratch is not None:
            place = Path(directory)
            write_tokenizer(settings.model.scratch, place)
        return Renderer(place, settings.rendering)


def verifier_problems(settings: Settings, prompts: list[Prompt]) -> Iterator[Problem]:
    """Yield verifiers that cannot be made, fall back to none, or need a field that no prompt has."""
    if wrong := check_fallbacks({item.component: item.fallback for item in settings.reward.verifiers}):
        yield Problem(f"setting reward.verifiers: {wrong}")
    for verifier in settings.reward.verifiers:
        try:
            if make_verifier(verifier.name, verifier.options).by_turn:
                check_turn_scores(settings.algorithm)
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


def first_prompts(source: PromptSource) -> list[Prompt]:
    """Return the first prompts of a stream, at most `SAMPLE`."""
    size = SAMPLE if source.size is None else min(SAMPLE, source.size)
    return [source.at(index) for index in itertools.islice(range(size), SAMPLE)]


def _needed_fields(name: str, options: dict[str, object]) -> tuple[str, ...]:
    """Return the fields of the metadata that one of our verifiers needs; none for a module of the user."""
    if name not in VERIFIERS:
        return ()
    module = load(VERIFIERS[name].path)
    bound = checked_options(module.Options, options, f"verifier {name}")
    if hasattr(module, "needed_fields"):
        return tuple(module.needed_fields(bound))
    if getattr(bound, "schema", None):  # json_schema: one schema for all prompts
        return ()
    key = getattr(bound, "key", None)
    return ENTRY_FIELDS.get(name, ()) if key is None else (str(key),)
