"""Reads prompts from a file with one JSON object per line."""

from pathlib import Path

import msgspec

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.rows import RowSource, prompt_of


def make(config: PromptConfig) -> RowSource:
    """Return the source of `config.path`, and of `config.held_out_path` if it is set.

    Raises:
        SettingsError: a file cannot be read, or a line is malformed; names the first such line.
    """

    def read(path: Path) -> list[Prompt]:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from None
        return [
            _prompt(line, config, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()
        ]

    return RowSource(config, read)


def _prompt(line: bytes, config: PromptConfig, where: str) -> Prompt:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{where}: not JSON: {error}") from None
    return prompt_of(row, config, where)
