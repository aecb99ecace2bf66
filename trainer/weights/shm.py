"""Publishes versions as files in shared memory, for engines on the same host.

    DIRECTORY/owner.pid                          pid of the trainer, locked for as long as it lives
    DIRECTORY/v00000012-EPOCH/bucket_00000.bin   `location` of the manifest is the version's directory

Files, not `multiprocessing.shared_memory`: a reader's resource tracker would unlink them when it exits.
"""

import fcntl
import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, fill_buckets, make_manifest
from trainer.weights.version_directories import VersionDirectories, remove

SHARED_MEMORY = Path("/dev/shm")
OWNER = "owner.pid"


class ShmSender:
    """One pass over the bytes: each tensor is copied into a mapped file and hashed there."""

    def __init__(self, config: WeightConfig, run: str) -> None:
        """Make the directory, and remove those that dead trainers of the same run left behind.

        Raises:
            WeightError: if the directory cannot be made, or another live process owns it.
        """
        self._bucket_bytes = config.bucket_mb << 20
        self._last_bytes = 0
        try:
            self.directory, self._owner = (
                _claim(Path(config.directory)) if config.directory else _claim_shared(run)
            )
            self._versions = VersionDirectories(self.directory, config.keep)
            self._versions.adopt()
            self._versions.clear()
        except OSError as error:
            raise WeightError(f"{config.directory or SHARED_MEMORY}: {error}") from error
        self._made_here = not config.directory
        self._closed = False

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        try:
            self._require_space(self._last_bytes)
            aside, final = self._versions.begin(epoch, version)
            try:
                layout = fill_buckets(
                    tensors,
                    self._bucket_bytes,
                    allocate=lambda index, size: _map(_bucket(aside, index), size),
                    reserve=lambda index, offset, nbytes: self._reserve(
                        _bucket(aside, index), offset, nbytes
                    ),
                )
                for index, nbytes in enumerate(layout[1]):
                    os.truncate(_bucket(aside, index), nbytes)
                self._versions.finish(aside, final, version)
            except BaseException:
                remove(aside)
                raise
        except OSError as error:
            drain(tensors)
            raise WeightError(f"version {version}: {error}") from error
        except WeightError:
            drain(tensors)
            raise
        self._last_bytes = sum(layout[1])
        return make_manifest("shm", str(final), epoch, version, layout, base_model=base_model, tied=tied)

    def retire(self, in_use: frozenset[int]) -> None:
        self._versions.retire(in_use)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._versions.clear()
        if self._made_here:
            remove(self.directory)
        else:
            (self.directory / OWNER).unlink(missing_ok=True)
        os.close(self._owner)

    def _reserve(self, bucket: Path, offset: int, nbytes: int) -> None:
        """Take the pages before they are written to: writing to one that cannot be had would be a SIGBUS."""
        self._require_space(nbytes)
        with bucket.open("rb+") as file:
            os.posix_fallocate(file.fileno(), offset, nbytes)

    def _require_space(self, needed: int) -> None:
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if free < needed:
            raise WeightError(
                f"{self.directory} has {free >> 20} MiB free, the weights need {needed >> 20} MiB more: enlarge it (docker: --shm-size), "
                f"lower weights.keep, or set weights.directory"
            )


def _bucket(directory: Path, index: int) -> Path:
    return directory / f"bucket_{index:05d}.bin"


def _map(bucket: Path, size: int) -> torch.Tensor:
    """A new file with holes, as memory."""
    with bucket.open("xb+") as file:
        os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def _claim(directory: Path) -> tuple[Path, int]:
    """Make `directory` ours. The lock on the owner file goes with the process, whatever pid namespace a
    reader or successor is in."""
    directory.mkdir(parents=True, exist_ok=True)
    owner = os.open(directory / OWNER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        pid = os.read(owner, 32).decode(errors="replace")
        os.close(owner)
        raise WeightError(
            f"{directory} belongs to the trainer with pid {pid or '?'}, which is alive: give each run its own"
        ) from error
    os.truncate(owner, 0)
    os.write(owner, str(os.getpid()).encode())
    return directory, owner


def _claim_shared(run: str) -> tuple[Path, int]:
    """A new directory for this trainer; it gets its name only once it is locked, so that no other trainer
    takes it for a dead one's."""
    stale = re.compile(rf"tether-{re.escape(run)}-[0-9a-f]{{8}}(\.tmp)?")
    for path in SHARED_MEMORY.iterdir():
        if stale.fullmatch(path.name) and _is_dead(path):
            remove(path)
    final = SHARED_MEMORY / f"tether-{run}-{secrets.token_hex(4)}"
    aside, owner = _claim(final.with_name(final.name + ".tmp"))
    aside.rename(final)
    return final, owner


def _is_dead(directory: Path) -> bool:
    """Whether the directory has an owner file that nobody holds."""
    with suppress(OSError):
        owner = os.open(directory / OWNER, os.O_RDWR)
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(owner)
    return False
