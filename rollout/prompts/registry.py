"""Creates prompt sources: built-in ones by name, a user's by `MODULE:NAME`.

    def rows(*, most: int = 100) -> Iterable[dict]: ...          a function returns rows
    class Stream:                                                a class is a `PromptSource`
        def __init__(self, config: PromptConfig, *, most: int = 100): ...

`[prompts] options` are passed as keyword arguments. docs/own_code.md describes both forms.
"""

from protocol.choices import Entry, Registry, load
from protocol.errors import SettingsError
from rollout.prompts import mixture
from rollout.prompts.base import DEFAULTS, PromptConfig, PromptSource
from rollout.prompts.named_source import SourceConfig, unused_by

SOURCES = Registry(
    {
        "hf": Entry("rollout.prompts.hf:make"),
        "jsonl": Entry("rollout.prompts.jsonl:make"),
        "reasoning_gym": Entry("rollout.prompts.reasoning_gym:ReasoningGymSource"),
        "textarena": Entry("rollout.prompts.textarena:TextArenaSource"),
    },
    own=lambda name: Entry("rollout.prompts.own:make"),
)
"""Source name -> factory that takes section `[prompts]`."""


def make_source(config: PromptConfig, own: SourceConfig | None = None) -> PromptSource:
    """Return the source named by `config.source`, or the mixture of `config.mixture`.

    Args:
        config: section `[prompts]`, or the result of `source_settings`.
        own: named source that `config` was derived from. Settings that it inherited may be unused by its kind
            of source.

    Raises:
        SettingsError: the name or another setting of the section is invalid.
    """
    if config.mixture:
        return mixture.make(config, make_source)
    entry = SOURCES.find(config.source, "setting prompts.source: source")
    _refuse_unused(own or config, config.source)
    source: PromptSource = load(entry.path)(config)
    return source


def _refuse_unused(config: PromptConfig | SourceConfig, source: str) -> None:
    """Raise SettingsError for the first explicit setting that the source does not use."""
    for name in unused_by(source):
        value = getattr(config, name, None)
        if value is not None and value != DEFAULTS[name]:
            raise SettingsError(
                f"setting prompts.{name}: {value!r}, but prompts.source {source!r} does not use it; remove "
                "the setting"
            )
