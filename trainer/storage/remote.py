"""Copies the checkpoints of a run to a directory elsewhere, through fsspec, and back.

    URL/step_00000020/checkpoint/...   a checkpoint's files
    URL/step_00000020/run/...          what else a run needs to resume from it
    URL/step_00000020/complete.json    all of these with sizes and digests; written last
    URL/exports/step_00000020/...      the model of a version

A copy without complete.json is incomplete: readers ignore it, and the next copy of that version replaces it.
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
    """A copy that counts as complete is not what was written."""


class RemoteDirectory:
    """A directory of any file system that fsspec knows; what it needs to log in is in the environment."""

    def __init__(self, url: str, setting: str = "run.remote") -> None:
        """Open it, without a read or write.

        Args:
            url: the directory's.
            setting: name of the setting that has it.

        Raises:
            SettingsError: fsspec does not know the kind of URL, or a package for it is missing; names it.
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
        """Copy files, and complete the copy when all are there; one of the same version is replaced.

        Args:
            version: the checkpoint's.
            files: path in the copy -> local file, which does not change meanwhile.

        Raises:
            RemoteError: it cannot be written; the copy is incomplete.
        """
        with _explained(self.url, "written"):
            self._remove(self._path(version))
            parts = [
                FilePart(name, self._put(path, self._path(version, name)), digest_of(path))
                for name, path in sorted(files.items())
            ]
            manifest = msgspec.json.encode(FileList(tuple(parts)))
            aside = self._path(version, f"{COMPLETE}.tmp")  # a disk that is full leaves an empty file
            self._fs.pipe_file(aside, manifest)
            self._fs.mv(aside, self._path(version, COMPLETE))

    def upload_export(self, directory: Path) -> None:
        """Copy an exported model under its directory's name, its list of checksums last.

        Raises:
            RemoteError: it cannot be written.
        """
        self.put_directory(directory, f"{EXPORTS}/{directory.name}", FILE)

    def put_directory(
        self, source: Path, name: str, last: str, end: float = math.inf, files: Iterable[Path] | None = None
    ) -> None:
        """Copy a local directory.

        Args:
            source: the local directory.
            name: path that its copy gets in this one.
            last: name of the file that is copied after all others.
            end: time of `time.monotonic` after which no other file is begun.
            files: of the directory; by default all that a listing has.

        Raises:
            RemoteError: it cannot be written.
        """
        with _explained(self.url, "written"):
            if files is None:
                files = (path for path in source.rglob("*") if path.is_file())
            for path in sorted(files, key=lambda path: (path.name == last, path)):
                if time.monotonic() > end:
                    raise TimeoutError(f"{path.name} is not copied in time")
                self._put(path, f"{self._root}/{name}/{path.relative_to(source).as_posix()}")

    def remove(self, name: str) -> None:
        """Remove a directory if it is there.

        Raises:
            RemoteError: it cannot be removed.
        """
        with _explained(self.url, "pruned"):
            self._remove(f"{self._root}/{name}")

    def prune(self, keep: int, version: int) -> None:
        """Remove all but the newest complete copies, with older incomplete copies and exports.

        Args:
            keep: complete copies that stay, of versions up to `version`.
            version: the run's. Newer copies stay: a run that continues from an older one found them damaged.

        Raises:
            RemoteError: something cannot be removed.
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
        """Copy a complete version into new local directories, each file compared with its digest.

        Args:
            version: one of `versions`.
            targets: first part of a path in the copy -> directory that it is to become, or to be added to if
                it exists.

        Raises:
            DamagedCopy: a file is missing or damaged; names it. The downloaded files are removed.
            RemoteError: it cannot be read.
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
        """Read a complete version, and compare each file with its digest.

        Raises:
            DamagedCopy: a file is missing or damaged; names it.
            RemoteError: it cannot be read.
        """
        with _explained(self.url, "read"):
            for part in self._files(version):
                self._compare(version, part, self._digest)

    def _files(self, version: int) -> tuple[FilePart, ...]:
        """Return what complete.json of a version names."""
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
        """Copy a file, and return its size."""
        nbytes = source.stat().st_size
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        self._fs.put_file(str(source), target)
        size = self._fs.size(target)
        if size != nbytes:
            raise OSError(f"{target} has {size} bytes instead of {nbytes}")
        return nbytes

    def _compare(self, version: int, part: FilePart, read: Callable[[str], str]) -> None:
        """Compare the digest that `read` returns for the path of a file with the one that was written."""
        name = f"step_{version:08d}/{part.name}"
        try:
            digest = read(self._path(version, part.name))
        except FileNotFoundError as error:
            raise DamagedCopy(f"{name} is missing") from error
        if digest != part.xxh3:
            raise DamagedCopy(f"{name} is damaged: its digest is not the one that {COMPLETE} names")

    def _get(self, target: Path, path: str) -> str:
        """Copy a file to a local one, and return its digest."""
        self._fs.get_file(path, str(target))
        return digest_of(target)

    def _digest(self, path: str) -> str:
        with self._fs.open(path, "rb") as file:
            return digest_of_rest(file)

    def _remove(self, path: str) -> None:
        """Remove a directory if it is there, what completes it first."""
        self._fs.invalidate_cache()
        if self._fs.exists(f"{path}/{COMPLETE}"):
            self._fs.rm_file(f"{path}/{COMPLETE}")
        if self._fs.exists(path):
            self._fs.rm(path, recursive=True)


@contextmanager
def _explained(url: str, done: str) -> Iterator[None]:
    """Turn any error of a file system into one `RemoteError` that names the directory."""
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        raise RemoteError(f"{url} cannot be {done}: {_text(error)}") from error


def _move(source: Path, target: Path) -> None:
    """Move a file or directory; what an existing directory has besides stays."""
    if not (source.is_dir() and target.is_dir()):
        source.rename(target)
        return
    for path in source.iterdir():
        _move(path, target / path.name)
    source.rmdir()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
