"""Makes prompt sources by name."""

import importlib

from protocol.choices import checked_name
from rollout.prompts.base import PromptConfig, PromptSource

SOURCES = ("hf", "jsonl", "reasoning_gym")
"""Modules in `rollout/prompts/` with a function `make`; only the chosen one is imported."""


def make_source(config: PromptConfig) -> PromptSource:
    """Return the source that `config.source` names.

    Raises:
        SettingsError: the name or anything else in the section is wrong.
    """
    name = checked_name(config.source, SOURCES, "setting prompts.source: source")
    source: PromptSource = importlib.import_module(f"rollout.prompts.{name}").make(config)
    return source
