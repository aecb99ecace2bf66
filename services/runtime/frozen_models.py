"""Checks that the frozen models of a run do not change after its first start.

RUN_DIR/frozen_models.json contains the digest of each model. A model directory may move; its contents must
not change.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from protocol.errors import SettingsError
from protocol.host.atomic_file import write_atomically
from services.settings.hub import fetch_frozen, read_record
from services.settings.sections import Settings
from trainer.storage.checksums import check_model_files, sealed

FILE = "frozen_models.json"
"""File in the run directory: section -> digest of its model."""
RECORD_NAME = "models the run was made with"
CHUNK = 1 << 24


def checked_digests(settings: Settings) -> Mapping[str, str]:
    """Return the digest of each frozen model of the run, by section. Reads all model files.

    Raises:
        SettingsError: a model is damaged, or differs from the first start; the message has both digests.
    """
    directories = fetch_frozen(settings)
    for directory in directories.values():
        check_model_files(directory)
    digests = {role: digest_of(directory) for role, directory in directories.items()}
    for role, recorded in read_record(settings.run_dir / FILE, RECORD_NAME).items():
        if role in digests and digests[role] != recorded:
            raise SettingsError(
                f"setting {role}.path: the model in {directories[role]} has the digest {digests[role]}, and "
                f"the run was made with {recorded}: give it back the old files, or start a new run in "
                f"another directory than {settings.run_dir} (docs/resume.md)"
            )
    return digests


def record_digests(run_dir: Path, digests: Mapping[str, str]) -> None:
    """Write the digests of a run's frozen models, if there are any."""
    if digests:
        write_atomically(run_dir / FILE, sealed(json.dumps(dict(digests), indent=2).encode()))


def digest_of(directory: Path) -> str:
    """Return a digest, 32 hex digits, of names and contents of a model's config.json and safetensors."""
    digest = xxhash.xxh3_128()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
