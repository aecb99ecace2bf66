"""Finds the newest version of a run in its files: a published one, or an exported checkpoint."""

import tempfile
from pathlib import Path

from protocol.errors import SettingsError, WeightError
from protocol.host.owned_directory import shared_directories
from protocol.messages import WeightManifest
from services.serving.exports import exports, publish_model
from services.settings.sections import Settings
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender
from trainer.weights.registry import TRANSPORTS
from trainer.weights.version_directories import read_manifests

EXPORT_EPOCH = "export"
"""Epoch of versions that are made from exports."""


class PublishedVersions:
    """Every version that the trainer publishes as files, read from its directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.where = f"transport {settings.weights.transport}"
        """Where they come from, for logs."""

    def newest(self) -> WeightManifest | None:
        """Return the newest version; None if there is none yet. Reads files."""
        found = [manifest for path in self._directories() for manifest in read_manifests(path)[-1:]]
        return found[-1] if found else None

    def close(self) -> None:
        """Leave the files, which are the trainer's."""

    def _directories(self) -> list[Path]:
        """Return where versions may be; the directory of the trainer that started last is the last one."""
        config, run_dir = self._settings.weights, self._settings.run_dir
        if config.directory:
            return [Path(config.directory)]
        if config.transport != "shm":
            return [run_dir / "weights"]
        try:
            directories = shared_directories(self._settings.run.name, run_dir)
            found = [(path.stat().st_mtime_ns, path) for path in directories]
        except OSError:  # one is being removed
            return []
        return [path for _, path in sorted(found)]


class ExportedVersions:
    """The checkpoints that the run exports, each published once more to the engine's host."""

    where = "exports"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._aside = tempfile.TemporaryDirectory(prefix="tether-serve-")
        directory = self._aside.name
        self._sender = disk_sender(WeightConfig(directory=directory, keep=1), Path(directory))
        self._published: WeightManifest | None = None

    def newest(self) -> WeightManifest | None:
        """Return the newest version; None if there is none yet. Reads and writes files.

        Raises:
            WeightError: it cannot be read.
        """
        found = exports(self._settings.run_dir)
        if not found:
            return None
        version = int(found[-1].name.removeprefix("step_"))
        if self._published is None or self._published.version != version:
            try:
                dtype = self._settings.engine.dtype
                self._published = publish_model(self._sender, found[-1], EXPORT_EPOCH, version, dtype)
            except (SettingsError, OSError) as error:  # being removed
                raise WeightError(f"{found[-1]}: {error}") from None
            self._sender.retire(frozenset())
        return self._published

    def close(self) -> None:
        """Remove what was written."""
        self._sender.close()
        self._aside.cleanup()


Versions = PublishedVersions | ExportedVersions
"""The versions of a run that is followed."""


def versions_of(settings: Settings) -> Versions:
    """Return the versions of a run: published ones if its transport writes files, else its exports."""
    if settings.weights.transport in TRANSPORTS.having("files"):
        return PublishedVersions(settings)
    return ExportedVersions(settings)
