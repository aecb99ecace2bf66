"""The provider `container` keeps the promises of a sandbox, where Docker or Podman answers.

SANDBOX_IMAGE names an image with Python, DOCKER_HOST the URL of the service: `make test-containers` has both.
"""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
import requests

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import programs_directory
from rollout.sandboxes.base import SandboxDied
from rollout.sandboxes.container import LABEL, ContainerProvider
from tests.changes import slow_unless_changed
from tests.contracts.host_sandbox_suite import HostSandboxContract
from tests.contracts.sandbox_suite import CONFIG, START

IMAGE = os.environ.get("SANDBOX_IMAGE", "")
pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed(
        "rollout/sandboxes/", "tests/contracts/sandbox_suite.py", "tests/contracts/host_sandbox_suite.py"
    ),
]


def made(config: SandboxConfig) -> ContainerProvider:
    return ContainerProvider(replace(config, name="container", image=IMAGE))


@pytest.fixture
async def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ContainerProvider]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    provider = made(CONFIG)
    yield provider
    assert await provider.clear_left() == 0
    await provider.close()


@pytest.mark.skipif(not IMAGE, reason="SANDBOX_IMAGE names no image")
class TestContainer(HostSandboxContract):
    made = f"{__name__}:made"
    storm = 128

    def running(self, folder: str) -> list[Any]:
        label = f"{LABEL}={programs_directory() / folder}"
        return docker.from_env().containers.list(filters={"label": label}, ignore_removed=True)


def test_an_image_has_to_be_named() -> None:
    with pytest.raises(SettingsError, match=r"environment\.sandbox\.image"):
        ContainerProvider(CONFIG)


def test_a_service_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = replace(CONFIG, image="python:3.11", service=f"tcp://127.0.0.1:{port}")
    with pytest.raises(SettingsError, match=rf"do not answer at tcp://127\.0\.0\.1:{port}"):
        ContainerProvider(config)


class Service:
    """Docker's client, whose containers are created when `go` is set, and cannot be attached to."""

    def __init__(self) -> None:
        self.containers = self
        self.go, self.asked = threading.Event(), threading.Event()
        self.left: set[int] = set()
        self.fails = False

    def ping(self) -> None:
        pass

    def create(self, *_: Any, **__: Any) -> "Service":
        self.asked.set()
        assert self.go.wait(60)
        if self.fails:
            raise requests.ReadTimeout("late")
        self.left.add(1)
        return self

    def attach_socket(self, params: Any) -> Any:
        raise requests.ConnectionError("gone")

    def remove(self, **_: Any) -> None:
        self.left.clear()

    def list(self, **_: Any) -> Any:
        raise requests.ConnectionError("gone")


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    service = Service()
    monkeypatch.setattr(docker, "from_env", lambda timeout: service)
    return service


async def test_a_cancelled_start_leaves_no_container(service: Service) -> None:
    provider = ContainerProvider(replace(CONFIG, image="image"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(provider.start(START))
        await asyncio.to_thread(service.asked.wait)
        starting.cancel()
        await asyncio.wait([starting], timeout=0.05)
        starting.cancel()
        service.go.set()
    assert starting.cancelled()
    assert service.left == set()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_connection_to_the_service_that_fails_is_a_dead_sandbox(
    service: Service, fails: bool
) -> None:
    provider = ContainerProvider(replace(CONFIG, image="image"))
    service.fails = fails
    service.go.set()
    with pytest.raises(SandboxDied, match="late" if fails else "gone"):
        await provider.start(START)
    assert service.left == set()
    with pytest.raises(SandboxDied, match="gone"):
        await provider.clear_left()
