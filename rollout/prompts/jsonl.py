"""Prompts from a file with one JSON object a line."""

from pathlib import Path

import msgspec

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig, RowSource, prompt_of


def make(config: PromptConfig) -> RowSource:
    """Read `config.path`, and `config.held_out_path` if there is one.

    Raises:
        SettingsError: naming file and line of the first bad one.
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
