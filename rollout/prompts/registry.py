"""Makes prompt sources by name."""

import importlib

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.prompts.base import DEFAULTS, PromptConfig, PromptSource
from rollout.prompts.named_source import UNUSED, SourceConfig

SOURCES = ("hf", "jsonl", "reasoning_gym", "textarena")
"""Modules in `rollout/prompts/` with a function `make`; only the chosen one is imported."""


def make_source(config: PromptConfig, own: SourceConfig | None = None) -> PromptSource:
    """Return the source that `config.source` names, or the mixture of `config.mixture`.

    Args:
        config: section `[prompts]`, or what `source_settings` makes of it.
        own: the named source that it was made for, which may inherit what its kind of source does not use.

    Raises:
        SettingsError: the name or anything else in the section is wrong.
    """
    if config.mixture:
        mixed: PromptSource = importlib.import_module("rollout.prompts.mixture").make(config)
        return mixed
    name = checked_name(config.source, SOURCES, "setting prompts.source: source")
    _refuse_unused(own or config, name)
    source: PromptSource = importlib.import_module(f"rollout.prompts.{name}").make(config)
    return source


def _refuse_unused(given: PromptConfig | SourceConfig, source: str) -> None:
    """Raise SettingsError for the first setting that is given and that the source does not use."""
    for name in UNUSED.get(source, ()):
        value = getattr(given, name, None)
        if value is not None and value != DEFAULTS[name]:
            raise SettingsError(
                f"setting prompts.{name}: {value!r}, but prompts.source {source!r} does not use it; leave it "
                "out"
            )
