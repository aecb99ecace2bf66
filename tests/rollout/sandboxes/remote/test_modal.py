"""The provider `modal` keeps the promises of a sandbox, against a double of the company.

`make .venv-remote/.ready` sets up the environment that it needs.
"""

import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal")

import modal
from grpclib.const import Status

from protocol.errors import SettingsError
from rollout.sandboxes.base import SandboxDied, Start
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.remote import modal as provided
from rollout.sandboxes.remote.modal import CHUNK, ModalProvider
from tests.contracts.sandbox_suite import CONFIG, START, shell
from tests.rollout.sandboxes.remote.modal_double import KEY, Company, served
from tests.rollout.sandboxes.remote.suite import RemoteContract

pytestmark = pytest.mark.slow


@pytest.fixture
async def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Company]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in KEY.items():
        monkeypatch.setenv(name.removeprefix("x-").replace("-", "_").upper(), value)
    async with served() as (url, double):
        monkeypatch.setenv("MODAL_SERVER_URL", url)
        yield double
        assert not double.machines.running
        client = await modal.Client.from_env.aio()
        await client.close.aio()


@pytest.fixture
def provider(double: Company) -> ModalProvider:
    return ModalProvider(CONFIG)


class TestModal(RemoteContract):
    company, labels = "Modal", "tags"


@pytest.mark.parametrize(
    ("endpoint", "network"),
    [
        ("https://far.example:8443", {"allowedDomains": ["far.example"]}),
        ("https://192.0.2.7:8443", {"allowedCidrs": ["192.0.2.7/32"]}),
        ("", {"networkAccessType": "BLOCKED"}),
    ],
)
async def test_a_sandbox_has_its_lease_and_reaches_its_endpoint_alone(
    double: Company, endpoint: str, network: dict[str, Any]
) -> None:
    provider = ModalProvider(replace(CONFIG, image="python:3.11"))
    async with SandboxPool(provider, 1).leased(Start(90.5, endpoint=endpoint)) as sandbox:
        assert (await shell(sandbox, "ls -A /tmp/.tether; touch /tmp/.tether/x")).status
        data = secrets.token_bytes(3 * CHUNK + 1)
        await sandbox.write("large", data)
        assert await sandbox.read("large", len(data)) == data
    (asked,) = double.machines.asked.values()
    assert asked["timeoutSecs"] == 91
    assert network.items() <= asked["networkAccess"].items()
    assert double.image.image.dockerfile_commands[0] == "FROM python:3.11"


async def test_a_setting_that_cannot_work_is_refused_by_name(
    double: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"environment\.sandbox\.service: .* MODAL_SERVER_URL"):
        ModalProvider(replace(CONFIG, service="http://127.0.0.1:1"))
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-1")
    with pytest.raises(SettingsError, match=r"'modal': .*no such key"):
        await ModalProvider(CONFIG).start(START)
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-0")


@pytest.mark.parametrize("request_name", ["AppGetOrCreate", "SandboxCreateV2", "SandboxListV2"])
async def test_a_service_that_does_not_answer_is_a_dead_sandbox(
    double: Company, provider: ModalProvider, monkeypatch: pytest.MonkeyPatch, request_name: str
) -> None:
    monkeypatch.setattr(provided, "CREATE_S", 0.5)
    double.silent = request_name
    with pytest.raises(SandboxDied, match="Modal: it did not answer in time"):
        await (provider.clear_left() if request_name == "SandboxListV2" else provider.start(START))


@pytest.mark.parametrize("refusal", [Status.INVALID_ARGUMENT, Status.NOT_FOUND])
async def test_an_image_that_is_refused_is_an_error_of_the_setting(double: Company, refusal: Status) -> None:
    double.refusal = refusal
    with pytest.raises(
        SettingsError, match=r"environment\.sandbox\.image: 'nowhere': Modal: .*no such image"
    ):
        await ModalProvider(replace(CONFIG, image="nowhere")).start(START)
