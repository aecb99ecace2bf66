"""Reads prompts from a local Hugging Face data set; nothing is downloaded."""

import tempfile
from pathlib import Path
from typing import Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.rows import RowSource, prompt_of

READERS = {".parquet": "from_parquet", ".json": "from_json", ".jsonl": "from_json"}
"""Suffix -> constructor of `datasets.Dataset`."""


def make(config: PromptConfig) -> RowSource:
    """Return the source of `config.path`, and of `config.held_out_path` if it is set.

    Raises:
        SettingsError: no data set can be read there, or a row is malformed; names the first such row.
    """
    try:
        import datasets
    except ImportError as error:
        raise SettingsError(f"prompts.source 'hf' needs the package datasets: {error}") from None

    def read(path: Path) -> list[Prompt]:
        is_saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
        found = (
            datasets.load_from_disk(str(path), keep_in_memory=True)
            if is_saved
            else _from_files(path, datasets.Dataset)
        )
        if isinstance(found, datasets.DatasetDict):
            checked_name(config.split, found, f"setting prompts.split: split of {path}")
            found = found[config.split]
        return [prompt_of(row, config, f"{path}: row {number}") for number, row in enumerate(found)]

    return RowSource(config, read)


def _from_files(path: Path, dataset: Any) -> Any:
    """Return all rows of a file, or of the files in a directory in the order of their names."""
    files = sorted(file for file in (path.iterdir() if path.is_dir() else [path]) if file.suffix in READERS)
    readers = {READERS[file.suffix] for file in files}
    if len(readers) != 1:
        raise SettingsError(
            f"setting prompts.path: {path} must contain Parquet or JSON files ({', '.join(READERS)}), "
            "of one kind only"
        )
    with tempfile.TemporaryDirectory() as cache:
        try:
            return getattr(dataset, readers.pop())(
                [str(file) for file in files], cache_dir=cache, keep_in_memory=True
            )
        except Exception as error:  # datasets raises any exception of its readers
            raise SettingsError(f"{path}: {type(error).__name__}: {str(error)[:300]}") from error
