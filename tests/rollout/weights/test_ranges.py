"""Ranges over links that lose connections, are silent, or have no end."""

import asyncio
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from aiohttp import web
from fsspec.implementations.local import LocalFileSystem

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.weights.ranges import RANGE_BYTES, TRIES, range_reader
from rollout.weights.verification import Deadline


class Losing(LocalFileSystem):  # type: ignore[misc]
    """The local files, over a link that loses so many reads of each range."""

    protocol = "losing"
    cachable = False
    lost = 0
    seen: dict[tuple[int, int], int] = {}
    lock = threading.Lock()

    def cat_file(self, path: str, start: int, end: int, **options: Any) -> bytes:  # type: ignore[override]
        with Losing.lock:
            count = Losing.seen[start, end] = Losing.seen.get((start, end), 0) + 1
        if count <= Losing.lost:
            raise ConnectionResetError("reset")
        return bytes(super().cat_file(path.removeprefix("losing://"), start, end, **options))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("losing://")


fsspec.register_implementation("losing", Losing, clobber=True)


def deadline(seconds: float) -> Deadline:
    manifest = WeightManifest(epoch="e", version=3, transport="http", location="", buckets=(), tensors=())
    return Deadline(manifest, seconds)


@pytest.mark.parametrize("nbytes", [0, 1, RANGE_BYTES[0], 3 * RANGE_BYTES[0] + 5])
@pytest.mark.parametrize("lost", [0, 1])
def test_file_is_read_although_ranges_are_lost(tmp_path: Path, nbytes: int, lost: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    Losing.lost, Losing.seen = lost, {}
    found = np.zeros(nbytes, np.uint8)
    with range_reader(f"losing://{tmp_path}", deadline(30)) as files:
        files.check_sizes([("file", nbytes)])
        files.read("file", found)
    assert np.array_equal(found, data)
    assert set(Losing.seen.values()) <= {lost + 1}


def test_range_that_is_lost_each_time_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    Losing.lost, Losing.seen = TRIES, {}
    with range_reader(f"losing://{tmp_path}", deadline(30)) as files:
        with pytest.raises(WeightError, match=rf"/file: reset, {TRIES} times"):
            files.read("file", np.zeros(3, np.uint8))
    assert set(Losing.seen.values()) == {TRIES}


@contextmanager
def server(handler: Any) -> Iterator[str]:
    """A web server in a thread."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        app, ended = web.Application(), asyncio.Event()
        app.router.add_get("/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set_result((url, asyncio.get_running_loop(), ended))
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url, loop, ended = started.result(30)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)


def test_server_that_does_not_answer_is_refused_at_the_deadline() -> None:
    silence = asyncio.Event()

    async def silent(request: web.Request) -> web.Response:
        await silence.wait()
        return web.Response()

    with server(silent) as url, range_reader(url, deadline(0.5)) as files:
        with pytest.raises(
            WeightError, match=r"version 3 over http: not complete within 0\.5 s while reading"
        ):
            files.contents(["index"])


def test_reader_that_is_cancelled_asks_for_no_more() -> None:
    until, asked = deadline(30), []

    async def cancelling(request: web.Request) -> web.Response:
        asked.append(request.headers["Range"])
        until.cancel()
        return web.Response(status=503)

    with server(cancelling) as url, range_reader(url, until) as files:
        with pytest.raises(WeightError, match="version 3 over http: cancelled while reading http"):
            files.read("file", np.zeros(1, np.uint8))
    assert asked == ["bytes=0-0"]


def test_reader_of_a_silent_server_ends_when_it_is_cancelled() -> None:
    """The test's limit is far below the half of the deadline that one read may take."""
    until = deadline(100_000)

    async def silent(request: web.Request) -> web.Response:
        until.cancel()
        await asyncio.Event().wait()
        return web.Response()

    with server(silent) as url, range_reader(url, until) as files:
        with pytest.raises(WeightError, match="version 3 over http: cancelled while reading http"):
            files.read("file", np.zeros(3 * RANGE_BYTES[0], np.uint8))


def test_server_without_ranges_is_refused_before_its_files_are_read(tmp_path: Path) -> None:
    """Python's own server, which people know, and one whose file does not end."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    own = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    sent = []

    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(bytes(1 << 20))
            sent.append(1)

    refusal = "/file: the server sends the whole file, it has to serve ranges"
    with ThreadingHTTPServer(("127.0.0.1", 0), own) as python, server(endless) as url:
        threading.Thread(target=python.serve_forever, daemon=True).start()
        with range_reader(f"http://127.0.0.1:{python.server_port}", deadline(30)) as files:
            assert files.contents(["file"]) == [bytes(1 << 20)]
            with pytest.raises(WeightError, match=refusal):
                files.check_sizes([("file", 1 << 20)])
        with range_reader(url, deadline(30)) as files:
            with pytest.raises(WeightError, match=refusal):
                files.contents(["file"])
        python.shutdown()
    assert len(sent) < 64  # what sockets hold, not what a deadline lets through
