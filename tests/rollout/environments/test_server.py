"""Servers elsewhere: a task goes to them by POST, and whatever they answer fails one sample at most."""

import socket
from pathlib import Path

import pytest
from aiohttp import web

from protocol.errors import EpisodeError, SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.registry import make_environment
from rollout.environments.server import MAX_ANSWER, Options, Server
from rollout.environments.session import Task
from rollout.prompts.base import Prompt
from tests.rollout.environments.groups import generated


async def answered(folder: Path, status: int, body: bytes) -> None:
    """Generate a sample with a server that answers anything."""

    async def run(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/", run)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        options = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/"}
        await generated(folder, EnvironmentConfig("server", options, attempts=1), n=1)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"no idea", "answered 500: no idea"),
        (302, b"", "answered 302"),
        (200, b"[]", r'answered no \{"reward": NUMBER\}'),
        (200, b'{"rewards": 1}', r'answered no \{"reward": NUMBER\}'),
        (200, b'{"reward": "1"}', r'answered no \{"reward": NUMBER\}'),
        (200, b"\xff" * 10, r'answered no \{"reward": NUMBER\}'),
        (200, b"[" * 10**6, r'answered no \{"reward": NUMBER\}'),
        (200, b" " * (MAX_ANSWER + 1), "answered more than"),
        (200, b'{"reward": 1}', "without a call of the model"),
    ],
)
async def test_a_server_that_fails_has_no_reward(tmp_path: Path, status: int, body: bytes, why: str) -> None:
    with pytest.raises(EpisodeError, match=why):
        await answered(tmp_path, status, body)


async def test_a_server_that_is_not_there_or_hangs_fails_the_sample(tmp_path: Path) -> None:
    config = EnvironmentConfig("server", {"url": "http://127.0.0.1:1/run"}, attempts=1)
    with pytest.raises(EpisodeError, match=r"http://127\.0\.0\.1:1/run did not answer"):
        await generated(tmp_path, config, n=1)
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # the kernel accepts, and nobody reads
        url = f"http://127.0.0.1:{hangs.getsockname()[1]}/"
        config = EnvironmentConfig("server", {"url": url}, attempts=1, episode_s=0.2)
        with pytest.raises(EpisodeError, match="episode_s"):
            await generated(tmp_path, config, n=1)


async def test_no_sample_is_posted_on_a_connection_that_the_server_may_be_closing() -> None:
    seen = set()

    async def run(request: web.Request) -> web.Response:
        assert request.transport is not None
        seen.add(request.transport.get_extra_info("peername"))
        return web.json_response({"reward": 1.0})

    app = web.Application()
    app.router.add_post("/", run)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environment = Server(Options(url=f"http://127.0.0.1:{runner.addresses[0][1]}/"))
    for _ in range(2):
        assert await environment.act(Task("http://127.0.0.1/v1", "key", Prompt("q"))) == 1.0
    assert len(seen) == 2
    await environment.close()
    await runner.cleanup()


def test_a_url_must_be_given() -> None:
    with pytest.raises(SettingsError, match="'' is not an address"):
        make_environment(EnvironmentConfig("server"))
