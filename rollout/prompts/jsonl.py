"""Reads prompts from a file with one JSON object per line."""

from codecs import BOM_UTF8
from typing import Any

import msgspec

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.rows import RowSource, local_path, prompts_of


def make(config: PromptConfig) -> RowSource:
    """Return the source of `config.path` and, if set, `config.held_out_path`.

    Raises:
        SettingsError: a file cannot be read, or a line is malformed; the message names the first such line.
    """

    def read(text: str, setting: str) -> list[Prompt]:
        path = local_path(text, setting)
        try:
            lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None
        wheres = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
        return prompts_of(((where, _row(line, where)) for where, line in wheres), config)

    return RowSource(config, read)


def _row(line: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{where}: not JSON: {error}") from None
