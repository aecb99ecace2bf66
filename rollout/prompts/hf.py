"""Reads prompts from a data set on the Hugging Face hub, or from a local data set in the same format."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.host.hub import Kind, fetch, is_hub_name, resolve_commit
from rollout.prompts.base import DEFAULTS, Prompt, PromptConfig
from rollout.prompts.rows import RowSource, local_path, prompts_of

READERS = {".parquet": "from_parquet", ".json": "from_json", ".jsonl": "from_json"}
"""File suffix -> constructor of `datasets.Dataset`."""
SAVED = ("state.json", "dataset_dict.json")
"""Marker files of a directory written by `save_to_disk`: a single data set, or one with several splits."""


def make(config: PromptConfig) -> RowSource:
    """Return the source of `config.path` and, if set, `config.held_out_path`.

    Raises:
        SettingsError: a data set cannot be read, or a row is malformed; the message names the first such row.
    """
    try:
        import datasets
    except ImportError as error:
        raise SettingsError(f"prompts.source 'hf' needs the package datasets: {error}") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    def read(text: str, setting: str) -> list[Prompt]:
        path = _located(text, setting, config)
        rows = enumerate(_opened(path, setting, config, datasets))
        return prompts_of(((f"{text}: row {number}", row) for number, row in rows), config)

    return RowSource(config, read)


def _located(text: str, setting: str, config: PromptConfig) -> Path:
    """Return the local path of a data set; a hub data set is downloaded."""
    if setting == "path" and is_hub_name(text):
        return fetch(Kind.DATASET, text, resolve_commit(Kind.DATASET, text, config.revision))
    if setting == "held_out_path" and is_hub_name(text):
        raise SettingsError(
            f"setting prompts.held_out_path: {text!r} does not exist; give a held-out set of the hub in "
            "[[eval.sets]]"
        )
    path = local_path(text, setting)
    if setting == "path" and config.revision:
        raise SettingsError(
            f"setting prompts.revision: {text} is local and has no revisions; remove the setting, or let "
            "prompts.path name a data set of the hub"
        )
    return path


def _opened(path: Path, setting: str, config: PromptConfig, datasets: Any) -> Any:
    """Return the rows of a data set. The cache that `datasets` writes is deleted."""
    is_saved = any((path / name).is_file() for name in SAVED)
    if config.subset and (is_saved or path.is_file()):
        raise SettingsError(
            f"setting prompts.subset: {config.subset!r}, but {path} has no subsets; remove the setting"
        )
    is_whole = path.is_file() or (path / SAVED[0]).is_file()
    if is_whole and setting == "path" and config.split != DEFAULTS["split"]:
        raise SettingsError(
            f"setting prompts.split: {config.split!r}, but {path} has no splits; remove the setting, or give "
            "a directory with a file for each"
        )
    if is_saved:
        dataset = datasets.load_from_disk(str(path), keep_in_memory=True)
        if isinstance(dataset, datasets.DatasetDict):
            checked_name(config.split, dataset, f"setting prompts.split: split of {path}")
            dataset = dataset[config.split]
        return dataset
    if path.is_file() and path.suffix not in READERS:
        raise SettingsError(
            f"setting prompts.path: {path} must be a Parquet or JSON file ({', '.join(READERS)}), "
            "or a directory with them"
        )
    with tempfile.TemporaryDirectory() as cache:
        options = {"cache_dir": cache, "keep_in_memory": True}
        try:
            if path.is_file():
                return getattr(datasets.Dataset, READERS[path.suffix])(str(path), **options)
            return datasets.load_dataset(str(path), config.subset or None, split=config.split, **options)
        except Exception as error:  # datasets propagates any exception of its readers
            text = " ".join(str(error).split())
            raise SettingsError(
                f"{path}: not a data set with prompts.subset {config.subset!r} and prompts.split "
                f"{config.split!r}: {type(error).__name__}: {text[:300]}"
            ) from error
