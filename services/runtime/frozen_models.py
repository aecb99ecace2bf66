"""Holds a run to the bytes of the models that it does not train, from its first start on.

RUN_DIR/frozen_models.json has the digest of each. A directory may move; its contents may not change.
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
"""File of the run directory: section -> digest of its model."""
RECORDED = "models the run was made with"
CHUNK = 1 << 24


def checked_digests(settings: Settings) -> Mapping[str, str]:
    """Return the digest of each model of the run that is not trained, by its section. Reads all of them.

    Raises:
        SettingsError: one is not what it was at the first start, whose digest is named, or is damaged.
    """
    directories = fetch_frozen(settings)
    for directory in directories.values():
        check_model_files(directory)
    digests = {role: digest_of(directory) for role, directory in directories.items()}
    for role, recorded in read_record(settings.run_dir / FILE, RECORDED).items():
        if role in digests and digests[role] != recorded:
            raise SettingsError(
                f"setting {role}.path: the model in {directories[role]} has the digest {digests[role]}, and "
                f"the run was made with {recorded}: give it back the old files, or start a new run in "
                f"another directory than {settings.run_dir} (docs/resume.md)"
            )
    return digests


def record_digests(run_dir: Path, digests: Mapping[str, str]) -> None:
    """Write the digests that a run was started with, if there are any."""
    if digests:
        write_atomically(run_dir / FILE, sealed(json.dumps(dict(digests), indent=2).encode()))


def digest_of(directory: Path) -> str:
    """Return 32 hex digits over a model's config.json and safetensors, names and contents."""
    digest = xxhash.xxh3_128()
    for path in [directory / "config.json", *sorted(directory.glob("*.safetensors"))]:
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()
