"""Versions by URL: of the trainer's own server, another web server, and a store that they are copied to."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import aiohttp
import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import replace

from protocol.errors import SettingsError, WeightError
from tests.trainer.weights.senders import layout_of, receive
from trainer.config import WeightConfig
from trainer.weights.files import http_sender
from trainer.weights.version_roots import ServedRoot


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((300_000,), value)), ("b", torch.full((3, 5), value, dtype=torch.bfloat16))]


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    found = f"memory://{uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/store"
    yield found
    fsspec.core.url_to_fs("memory://")[0].store.clear()


def names(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path.rsplit("/", 1)[1] for path in files.ls(root, detail=False))


def test_versions_are_copied_to_a_store_and_removed_there(url: str, tmp_path: Path) -> None:
    config = WeightConfig(bucket_mb=1, keep=1, delta=True, anchor_every=2, url=url)
    sender = http_sender(config, tmp_path, layout_of(weights(0), config))
    for version in range(4):
        manifest = sender.publish("e1", version, weights(version))
        assert manifest.location == f"{url}/v{version:08d}-e1"
        assert torch.equal(receive(manifest)["a"], weights(version)[0][1])
        sender.retire(frozenset())
        assert names(url) == [link.directory for link in manifest.chain]
    sender.close()
    assert torch.equal(receive(manifest)["b"], weights(3)[1][1])


@pytest.mark.parametrize(("delta", "per_rank_files"), [(False, False), (False, True), (True, True)])
def test_files_that_a_listing_lacks_are_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delta: bool, per_rank_files: bool
) -> None:
    config = WeightConfig(bucket_mb=1, delta=delta, url=url)
    layout = layout_of(weights(0), config) if delta or per_rank_files else None
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(()))  # as a network file system may answer for a while
    with closing(http_sender(config, tmp_path, layout, per_rank_files=per_rank_files)) as sender:
        for version in range(2):
            manifest = sender.publish("e1", version, weights(version))
            assert torch.equal(receive(manifest)["a"], weights(version)[0][1])


@pytest.mark.parametrize("fault", ["missing", "cut", "longer", "changed"])
def test_object_that_is_not_as_it_was_published_is_named(url: str, tmp_path: Path, fault: str) -> None:
    sender = http_sender(WeightConfig(bucket_mb=1, url=url), tmp_path)
    manifest = sender.publish("e1", 1, weights(1))
    files, root = fsspec.core.url_to_fs(url)
    bucket = f"{root}/v00000001-e1/bucket_00000.bin"
    data, words = files.cat_file(bucket), r"/v00000001-e1/bucket_00000\.bin: "
    if fault == "missing":
        files.rm_file(bucket)
    else:
        flipped = data[:999] + bytes([data[999] ^ 1]) + data[1000:]
        files.pipe_file(bucket, {"cut": data[:-1], "longer": data + b"x", "changed": flipped}[fault])
        words = {"cut": words + "fewer", "longer": words + "more", "changed": "tensor a: digest"}[fault]
    with pytest.raises(WeightError, match=words):
        receive(manifest)


def test_version_that_cannot_be_copied_is_not_published(url: str, tmp_path: Path) -> None:
    sender = http_sender(WeightConfig(bucket_mb=1, url=url), tmp_path)
    sender.publish("e1", 0, weights(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fsspec.core.url_to_fs(url)[0]), "put_file", _fails)
        with pytest.raises(WeightError, match="cannot be written: OSError: no such bucket"):
            sender.publish("e1", 1, weights(1))
    assert [path.name for path in sender.directory.iterdir()] == ["v00000000-e1"]
    assert torch.equal(receive(sender.publish("e1", 2, weights(2)))["a"], weights(2)[0][1])


def test_failed_copy_of_a_version_that_was_there_leaves_no_place_for_it(url: str, tmp_path: Path) -> None:
    sender = http_sender(WeightConfig(bucket_mb=1, keep=2, url=url), tmp_path)
    for version in (0, 1):
        sender.publish("e1", version, weights(version))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fsspec.core.url_to_fs(url)[0]), "put_file", _fails)
        with pytest.raises(WeightError):
            sender.publish("e1", 1, weights(1))
    sender.publish("e1", 2, weights(2))
    sender.retire(frozenset())
    assert names(url) == ["v00000000-e1", "v00000002-e1"]


class HangingStore(MemoryFileSystem):  # type: ignore[misc]
    """A store whose copies and removals wait."""

    protocol = "hangingstore"
    answers = threading.Event()
    copied: ClassVar[list[str]] = []
    removed: ClassVar[list[str]] = []

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        data = Path(lpath).read_bytes()
        assert self.answers.wait(60)
        self.pipe_file(rpath, data)
        self.copied.append(rpath.rsplit("/", 1)[1])

    def rm(self, path: str, *args: Any, **options: Any) -> None:
        assert self.answers.wait(60)
        super().rm(path, *args, **options)
        self.removed.append(path.rsplit("/", 1)[1])


@pytest.fixture
def hanging() -> Iterator[type[HangingStore]]:
    fsspec.register_implementation("hangingstore", HangingStore, clobber=True)
    for state in (HangingStore.copied, HangingStore.removed, HangingStore.answers, HangingStore.store):
        state.clear()
    yield HangingStore
    HangingStore.answers.set()
    HangingStore.store.clear()


def end_threads_left() -> int:
    """Let the store answer, and return how many calls of it were left behind."""
    left = [thread for thread in threading.enumerate() if thread.name == "weights-url"]
    HangingStore.answers.set()
    for thread in left:
        thread.join(60)
    return len(left)


def test_store_that_hangs_is_named_in_time_and_its_late_copy_is_removed(
    hanging: type[HangingStore], tmp_path: Path
) -> None:
    config = WeightConfig(bucket_mb=1, url="hangingstore://run", timeout_s=0.2)
    sender = http_sender(config, tmp_path)
    with pytest.raises(
        WeightError, match=r"^hangingstore://run: no answer within weights\.timeout_s, 0\.2 s"
    ):
        sender.publish("e1", 1, weights(1))
    assert list(sender.directory.iterdir()) == []
    assert end_threads_left() == 1
    assert (hanging.copied, hanging.removed) == (["bucket_00000.bin"], ["v00000001-e1"])


def test_old_versions_of_a_store_that_hangs_are_waited_for_once(
    hanging: type[HangingStore], tmp_path: Path
) -> None:
    config = WeightConfig(bucket_mb=1, keep=1, url="hangingstore://run", timeout_s=10)
    sender = http_sender(config, tmp_path)
    hanging.answers.set()
    for version in range(4):
        sender.publish("e1", version, weights(version))
    hanging.answers.clear()
    sender._root._timeout_s = 0.2
    sender.retire(frozenset())
    assert end_threads_left() == 1
    assert hanging.removed == [f"v0000000{version}-e1" for version in range(3)]


def _fails(*arguments: object, **options: object) -> None:
    raise OSError("no such bucket")


def test_engines_read_from_a_web_server_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with closing(ServedRoot(tmp_path / "weights", "127.0.0.1")) as server:
        sender = http_sender(WeightConfig(bucket_mb=1, url=f"{server.location}/"), tmp_path)
        manifest = sender.publish("e1", 1, weights(1))
        assert manifest.location == f"{server.location}/v00000001-e1"
        assert torch.equal(receive(manifest)["a"], weights(1)[0][1])


def test_server_of_the_trainer_serves_versions_to_who_knows_the_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sender = http_sender(WeightConfig(bucket_mb=1), tmp_path)
    manifest = sender.publish("e1", 1, weights(1))
    host, secret = manifest.location.split("/")[2:4]
    paths = [
        f"{secret}/v00000001-e1/manifest.json",
        "v00000001-e1/manifest.json",
        f"{secret}/../../etc/passwd",
    ]

    async def answers() -> list[int]:
        async with aiohttp.ClientSession() as session:
            found = []
            for path in paths:
                async with session.get(f"http://{host}/{path}") as answer:
                    found.append(answer.status)
            return found

    assert asyncio.run(answers()) == [200, 404, 404]
    gone = replace(manifest, location=manifest.location.replace("v00000001", "v00000002"))
    with pytest.raises(WeightError, match=r"^http://127\.0\.0\.1/\.\.\./v00000002-e1/bucket_00000\.bin: No"):
        receive(gone)
    sender.close()
    sender.close()
    with pytest.raises(WeightError, match=r"bucket_00000\.bin: .*4 times") as error:
        receive(manifest)
    assert secret not in str(error.value) + caplog.text


def test_version_is_not_published_by_a_server_that_has_ended(tmp_path: Path) -> None:
    sender = http_sender(WeightConfig(bucket_mb=1), tmp_path)
    sender._root.close()
    with pytest.raises(WeightError, match=r"v00000001-e1: the server of weights\.host has ended"):
        sender.publish("e1", 1, weights(1))
    assert list(sender.directory.iterdir()) == []


def test_root_that_cannot_be_served_or_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"weights\.host 192\.0\.2\.1: "):
        http_sender(WeightConfig(host="192.0.2.1"), tmp_path)
    (tmp_path / "weights/left.tmp").touch()  # a directory by its name, which cannot be removed as one
    with pytest.raises(WeightError, match=r"left\.tmp"):
        http_sender(WeightConfig(), tmp_path)
    with pytest.raises(WeightError, match=r"weights\.host 127\.0\.0\.1: .*absent"):
        ServedRoot(tmp_path / "absent", "127.0.0.1")
    for server in (thread for thread in threading.enumerate() if thread.name == "weights-http"):
        server.join(60)
        assert not server.is_alive()
    with pytest.raises(SettingsError, match=r"setting weights\.url: nothing://run: "):
        http_sender(WeightConfig(url="nothing://run"), tmp_path)
