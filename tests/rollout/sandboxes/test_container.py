"""The provider `container` keeps the promises of a sandbox, where Docker or Podman answers.

SANDBOX_IMAGE names an image with Python, SANDBOX_SERVICE the URL of the service.
"""

import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.sandboxes.container import ContainerProvider
from tests.changes import slow_unless_changed
from tests.contracts.sandbox_suite import CONFIG, SandboxContract

IMAGE = os.environ.get("SANDBOX_IMAGE", "")
pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed("rollout/sandboxes/", "tests/contracts/sandbox_suite.py"),
]


@pytest.fixture
async def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ContainerProvider]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    service = os.environ.get("SANDBOX_SERVICE", "")
    provider = ContainerProvider(replace(CONFIG, name="container", image=IMAGE, service=service))
    yield provider
    assert await provider.clear_left() == 0
    await provider.close()


@pytest.mark.skipif(not IMAGE, reason="SANDBOX_IMAGE names no image")
class TestContainer(SandboxContract):
    storm = 8


def test_an_image_has_to_be_named() -> None:
    with pytest.raises(SettingsError, match=r"environment\.sandbox\.image"):
        ContainerProvider(CONFIG)


def test_a_service_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = replace(CONFIG, image="python:3.11", service=f"tcp://127.0.0.1:{port}")
    with pytest.raises(SettingsError, match=rf"do not answer at tcp://127\.0\.0\.1:{port}"):
        ContainerProvider(config)
