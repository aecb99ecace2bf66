"""Finds lengths that do not fit: prompt and completion in the engine's context."""

import json
from collections.abc import Iterator

from services.preflight.problem import Problem
from services.settings.sections import Settings


def length_problems(settings: Settings) -> Iterator[Problem]:
    """Yield the problem if the longest prompt and the longest completion exceed an engine's context."""
    longest, completion, context = lengths = _lengths(settings)
    room = context - completion
    if room < 1:
        yield Problem(
            f"leaves no token for a prompt in engine.max_model_len = {context}",
            f"set it to {context - 1} or less, or raise engine.max_model_len",
            "sampling.max_tokens",
            completion,
        )
    elif longest > room and not _accepted_before(settings, lengths):
        yield Problem(
            f"with sampling.max_tokens = {completion} it exceeds engine.max_model_len = {context}",
            f"set it to {room} or less (0 means {room}), or raise engine.max_model_len to "
            f"{longest + completion}",
            "render.max_prompt_tokens",
            longest,
        )


def _lengths(settings: Settings) -> tuple[int, int, int]:
    return settings.render.max_prompt_tokens, settings.sampling.max_tokens, settings.context_tokens


def _accepted_before(settings: Settings, lengths: tuple[int, int, int]) -> bool:
    """Whether the run was started before with these lengths.

    Earlier releases had 512 for `render.max_prompt_tokens` where nothing was set, whatever the context was,
    and dropped the prompts for which the engine had no room.
    """
    try:
        recorded = json.loads((settings.run_dir / "settings.json").read_text())
        found = (
            recorded["render"]["max_prompt_tokens"],
            recorded["sampling"]["max_tokens"],
            recorded["engine"]["max_model_len"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == lengths
