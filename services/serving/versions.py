"""Finds the newest version of a run in its files: a published version, or an exported checkpoint."""

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
"""Epoch of versions made from exports."""


class PublishedVersions:
    """Versions that the trainer publishes as files, read from their directory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.origin = f"transport {settings.weights.transport}"
        """Origin of the versions, for logs."""

    def newest(self) -> WeightManifest | None:
        """Return the newest version; None before the first. Reads files."""
        found = [manifest for path in self._directories() for manifest in read_manifests(path)[-1:]]
        return found[-1] if found else None

    def close(self) -> None:
        """Do nothing: the files belong to the trainer."""

    def _directories(self) -> list[Path]:
        """Return the possible directories of versions; the most recently started trainer's comes last."""
        config, run_dir = self._settings.weights, self._settings.run_dir
        if config.directory:
            return [Path(config.directory)]
        if config.transport != "shm":
            return [run_dir / "weights"]
        try:
            directories = shared_directories(self._settings.run.name, run_dir)
            found = [(path.stat().st_mtime_ns, path) for path in directories]
        except OSError:  # a directory is being removed
            return []
        return [path for _, path in sorted(found)]


class ExportedVersions:
    """Checkpoints that the run exports, each published again on the engine's host."""

    origin = "exports"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._publish_dir = tempfile.TemporaryDirectory(prefix="tether-serve-")
        directory = self._publish_dir.name
        self._sender = disk_sender(WeightConfig(directory=directory, keep=1), Path(directory))
        self._published: WeightManifest | None = None

    def newest(self) -> WeightManifest | None:
        """Return the newest version; None before the first. Reads and writes files.

        Raises:
            WeightError: the export cannot be read.
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
        """Remove the written files."""
        self._sender.close()
        self._publish_dir.cleanup()


Versions = PublishedVersions | ExportedVersions
"""Source of a followed run's versions."""


def versions_of(settings: Settings) -> Versions:
    """Return the versions of a run: published ones if its transport writes files, else its exports."""
    if settings.weights.transport in TRANSPORTS.having("files"):
        return PublishedVersions(settings)
    return ExportedVersions(settings)
