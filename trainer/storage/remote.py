"""Copies the checkpoints of a run to and from a remote directory, through fsspec.

    URL/step_00000020/checkpoint/...   files of a checkpoint
    URL/step_00000020/run/...          other files that a run needs to resume
    URL/step_00000020/complete.json    all of these files with sizes and digests; written last
    URL/exports/step_00000020/...      exported model of a version

A copy without complete.json is incomplete: readers ignore it, and the next copy of the version replaces it.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import fsspec
import msgspec

from protocol.errors import SettingsError, TetherError
from protocol.host.atomic_file import directory_written_aside
from trainer.storage.checkpoints import NAME
from trainer.storage.checksums import FILE, FileList, FilePart, digest_of, digest_of_rest

COMPLETE = "complete.json"
EXPORTS = "exports"


class RemoteError(TetherError):
    """A remote directory cannot be read or written."""


class DamagedCopy(RemoteError):
    """A complete copy differs from the written files."""


class RemoteDirectory:
    """Directory of any fsspec file system; credentials come from the environment."""

    def __init__(self, url: str, setting: str = "run.remote") -> None:
        """Create the file system, without reading or writing.

        Args:
            setting: name of the URL's setting, for error messages.

        Raises:
            SettingsError: fsspec does not support the URL, or lacks a package for it; the message names the
                cause.
        """
        self.url = url
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except Exception as error:  # any error of the file system's own package
            raise SettingsError(f"setting {setting}: {url}: {_text(error)}") from error
        self._root = root.rstrip("/")

    def versions(self) -> list[int]:
        """Return the versions with a complete copy, ascending.

        Raises:
            RemoteError: the directory cannot be read.
        """
        with _explained(self.url, "listed"):
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            names = [PurePosixPath(path).name for path in self._fs.ls(self._root, detail=False)]
            found = [int(match[1]) for name in names if (match := NAME.fullmatch(name))]
            return sorted(version for version in found if self._fs.exists(self._path(version, COMPLETE)))

    def upload(self, version: int, files: Mapping[str, Path]) -> None:
        """Copy files, then mark the copy as complete; an existing copy of the version is replaced.

        Args:
            files: path in the copy -> local file, which must not change during the call.

        Raises:
            RemoteError: the copy cannot be written, and is incomplete.
        """
        with _explained(self.url, "written"):
            self._remove(self._path(version))
            parts = [
                FilePart(name, self._put(path, self._path(version, name)), digest_of(path))
                for name, path in sorted(files.items())
            ]
            manifest = msgspec.json.encode(FileList(tuple(parts)))
            aside = self._path(version, f"{COMPLETE}.tmp")  # a full disk leaves an empty file
            self._fs.pipe_file(aside, manifest)
            self._fs.mv(aside, self._path(version, COMPLETE))

    def upload_export(self, directory: Path) -> None:
        """Copy an exported model under its directory's name, the list of checksums last.

        Raises:
            RemoteError: the copy cannot be written.
        """
        self.put_directory(directory, f"{EXPORTS}/{directory.name}", FILE)

    def put_directory(
        self, source: Path, name: str, last: str, end: float = math.inf, files: Iterable[Path] | None = None
    ) -> None:
        """Copy a local directory.

        Args:
            name: path of the copy in this directory.
            last: name of the file to copy last.
            end: `time.monotonic` deadline for starting another file.
            files: files of the directory to copy; default: all files found by listing.

        Raises:
            RemoteError: the copy cannot be written.
        """
        with _explained(self.url, "written"):
            if files is None:
                files = (path for path in source.rglob("*") if path.is_file())
            for path in sorted(files, key=lambda path: (path.name == last, path)):
                if time.monotonic() > end:
                    raise TimeoutError(f"{path.name} is not copied in time")
                self._put(path, f"{self._root}/{name}/{path.relative_to(source).as_posix()}")

    def remove(self, name: str) -> None:
        """Remove a directory if it exists.

        Raises:
            RemoteError: the directory cannot be removed.
        """
        with _explained(self.url, "pruned"):
            self._remove(f"{self._root}/{name}")

    def prune(self, keep: int, version: int) -> None:
        """Remove all but the newest complete copies, with older incomplete copies and exports.

        Args:
            keep: number of complete copies to keep, of versions up to `version`.
            version: current version of the run. Newer copies stay: a run that resumes from an older copy
                found them damaged.

        Raises:
            RemoteError: a copy cannot be removed.
        """
        with _explained(self.url, "pruned"):
            newest = [copy for copy in self.versions() if copy <= version][-keep:]
            for directory in (self._root, f"{self._root}/{EXPORTS}"):
                names = self._fs.ls(directory, detail=False) if self._fs.exists(directory) else []
                for path in names:
                    match = NAME.fullmatch(PurePosixPath(path).name)
                    if match and newest and int(match[1]) < newest[0]:
                        self._remove(path)

    def download(self, version: int, targets: Mapping[str, Path]) -> None:
        """Copy a complete version into local directories, and verify the digest of each file.

        Args:
            targets: first component of a path in the copy -> local directory to create or extend.

        Raises:
            DamagedCopy: a file is missing or damaged; the message names the file. The downloaded files are
                removed.
            RemoteError: the copy cannot be read.
        """
        asides = {target: target.with_name(f"{target.name}.download") for target in targets.values()}
        with _explained(self.url, "read"):
            try:
                files = self._files(version)
                for first, target in targets.items():
                    self._fetch(version, files, first, asides[target])
            except BaseException:
                for aside in asides.values():
                    shutil.rmtree(aside, ignore_errors=True)
                raise
            for target, aside in asides.items():
                _move(aside, target)

    def check(self, version: int) -> None:
        """Verify the digest of each file of a complete version.

        Raises:
            DamagedCopy: a file is missing or damaged; the message names the file.
            RemoteError: the copy cannot be read.
        """
        with _explained(self.url, "read"):
            for part in self._files(version):
                self._compare(version, part, self._digest)

    def _files(self, version: int) -> tuple[FilePart, ...]:
        """Return the files in complete.json of a version."""
        try:
            return msgspec.json.decode(self._fs.cat_file(self._path(version, COMPLETE)), type=FileList).files
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedCopy(f"step_{version:08d}/{COMPLETE} is damaged: {error}") from error

    def _fetch(self, version: int, files: Iterable[FilePart], first: str, target: Path) -> None:
        """Copy the files whose path begins with `first` into a new local directory."""
        parts = {
            "/".join(inside): part
            for part in files
            for top, *inside in [PurePosixPath(part.name).parts]
            if top == first and inside and ".." not in inside
        }
        with directory_written_aside(target) as directory:
            for name, part in parts.items():
                (directory / name).parent.mkdir(exist_ok=True)
                self._compare(version, part, partial(self._get, directory / name))

    def _path(self, version: int, name: str = "") -> str:
        return f"{self._root}/step_{version:08d}" + (f"/{name}" if name else "")

    def _put(self, source: Path, target: str) -> int:
        """Upload a file, and return its size."""
        nbytes = source.stat().st_size
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        self._fs.put_file(str(source), target)
        size = self._fs.size(target)
        if size != nbytes:
            raise OSError(f"{target} has {size} bytes instead of {nbytes}")
        return nbytes

    def _compare(self, version: int, part: FilePart, read: Callable[[str], str]) -> None:
        """Compare the digest that `read` returns for the path of a file with the recorded digest."""
        name = f"step_{version:08d}/{part.name}"
        try:
            digest = read(self._path(version, part.name))
        except FileNotFoundError as error:
            raise DamagedCopy(f"{name} is missing") from error
        if digest != part.xxh3:
            raise DamagedCopy(f"{name} is damaged: its digest is not the one that {COMPLETE} names")

    def _get(self, target: Path, path: str) -> str:
        """Download a file, and return its digest."""
        self._fs.get_file(path, str(target))
        return digest_of(target)

    def _digest(self, path: str) -> str:
        with self._fs.open(path, "rb") as file:
            return digest_of_rest(file)

    def _remove(self, path: str) -> None:
        """Remove a directory if it exists, its complete.json first."""
        self._fs.invalidate_cache()
        if self._fs.exists(f"{path}/{COMPLETE}"):
            self._fs.rm_file(f"{path}/{COMPLETE}")
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


@contextmanager
def _explained(url: str, done: str) -> Iterator[None]:
    """Convert any error of a file system into a `RemoteError` that names the directory."""
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(f"{url} cannot be {done}: {_text(error)}") from error


def _move(source: Path, target: Path) -> None:
    """Move a file or directory; merge into an existing directory."""
    if not (source.is_dir() and target.is_dir()):
        source.rename(target)
        return
    for path in source.iterdir():
        _move(path, target / path.name)
    source.rmdir()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
