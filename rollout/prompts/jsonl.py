"""Prompts from a file with one JSON object a line."""

from pathlib import Path

import msgspec

from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig, RowSource, prompt_of


def make(config: PromptConfig) -> RowSource:
    """Read the file `config.path`.

    Raises:
        SettingsError: naming file and line of the first bad one.
    """
    path = Path(config.path)
    if not config.path:
        raise SettingsError("setting prompts.path: give the JSON Lines file with the prompts")
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SettingsError(f"setting prompts.path: {path}: {error.strerror}") from None
    prompts = [_prompt(line, config, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise SettingsError(f"{path} holds no prompts")
    return RowSource(prompts, config, str(path))


def _prompt(line: bytes, config: PromptConfig, where: str) -> Prompt:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{where}: not JSON: {error}") from None
    return prompt_of(row, config, where)
