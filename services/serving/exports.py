"""Reads the models that a run exports, and publishes one to an engine as a version."""

from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from protocol.messages import WeightManifest
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.storage.checksums import check_model_files
from trainer.weights.bucket_writer import in_dtype
from trainer.weights.files import FileSender

EXPORTS = "exports"
"""Directory in a run directory with a model for each kept checkpoint."""


def exports(run_dir: Path) -> list[Path]:
    """Return the Hugging Face directories of a run's exported checkpoints, oldest first."""
    return sorted((run_dir / EXPORTS).glob("step_*[0-9]"))


def newest_export(run_dir: Path) -> Path:
    """Return the Hugging Face directory of the newest exported checkpoint. Raises SettingsError."""
    found = exports(run_dir)
    if not found:
        raise SettingsError(
            f"no exported checkpoint in {run_dir / EXPORTS}: let the run finish, or name a model directory"
        )
    return found[-1]


def check_model_directory(directory: Path) -> None:
    """Check that a directory exists and contains weights. Raises SettingsError."""
    if not directory.is_dir():
        raise SettingsError(f"there is no directory {directory}: name a model directory")
    if not any(directory.glob("*.safetensors")):
        raise SettingsError(f"{directory} lacks *.safetensors: name a model directory")


def load_model(directory: Path) -> dict[str, Any]:
    """Return all tensors of a Hugging Face directory, by name.

    Raises:
        SettingsError: a tensor is missing, or a file is damaged.
    """
    check_model_files(directory)
    with SafetensorsReader(directory) as reader:
        return {name: reader.whole(name) for name in sorted(reader.names)}


def publish_model(
    sender: FileSender, directory: Path, epoch: str, version: int, dtype: str
) -> WeightManifest:
    """Publish the model in a Hugging Face directory as a version, in an engine's dtype.

    Raises:
        SettingsError: as `load_model`.
        WeightError: the version cannot be written.
    """
    return sender.publish(epoch, version, in_dtype(load_model(directory).items(), dtype))
