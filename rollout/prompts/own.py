"""Makes a prompt source of the user: of rows that a function returns, or a `PromptSource`."""

from collections.abc import Iterator
from typing import Any

from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute, located
from rollout.prompts.base import Prompt, PromptConfig, PromptSource
from rollout.prompts.rows import RowSource, prompts_of

MEMBERS = ("fingerprint", "size", "at", "held_out", "trained_texts")
"""Members of a `PromptSource`."""


def make(config: PromptConfig) -> PromptSource:
    """Return the source that `config.source`, a `MODULE:NAME`, makes with `config.options`.

    A class is given `config` first, and is a `PromptSource`. A function returns rows, which are read, ordered
    and held out like the rows of a file.

    Raises:
        SettingsError: module or name is missing, the code raises, its arguments do not fit, a row has no
            question, or the class is no `PromptSource`; names the file.
    """
    item, file = import_attribute(config.source, "setting prompts.source")
    what = f"setting prompts.source: {config.source} in {file}"
    if not isinstance(item, type):
        rows = _rows(what, item, config)
        return RowSource(config, lambda text, setting: rows)
    source: PromptSource = call(
        what, item, "the section [prompts] and prompts.options", (config,), config.options
    )
    for name in MEMBERS:
        if not hasattr(source, name):
            raise SettingsError(f"{what}: it has no {name}; write all of {', '.join(MEMBERS)}")
    return source


def _rows(what: str, function: Any, config: PromptConfig) -> list[Prompt]:
    """Return the prompts of the rows that a function returns or yields."""
    returned = call(what, function, "prompts.options", (), config.options)

    def numbered() -> Iterator[tuple[str, Any]]:
        try:
            for number, row in enumerate(returned):
                yield f"{config.source}: row {number}", row
        except Exception as error:  # the user's code may raise anything
            raise SettingsError(f"{what}: {located(error)}") from None

    return prompts_of(numbered(), config)
