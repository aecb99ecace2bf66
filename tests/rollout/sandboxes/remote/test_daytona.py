"""The provider `daytona` keeps the promises of a sandbox, against a double of the company.

`make .venv-remote/.ready` sets up the environment that it needs.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("daytona")

from protocol.errors import SettingsError
from rollout.sandboxes.base import Start
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.remote.daytona import DaytonaProvider
from tests.contracts.sandbox_suite import CONFIG, START, shell
from tests.rollout.sandboxes.remote.daytona_double import KEY, Double, served
from tests.rollout.sandboxes.remote.suite import RemoteContract

pytestmark = pytest.mark.slow


@pytest.fixture
async def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Double]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    async with served() as (url, double):
        monkeypatch.setenv("DAYTONA_API_URL", url)
        yield double
        assert not double.machines.running


@pytest.fixture
async def provider(double: Double) -> AsyncIterator[DaytonaProvider]:
    provider = DaytonaProvider(CONFIG)
    yield provider
    await provider.close()


class TestDaytona(RemoteContract):
    company, labels = "Daytona", "labels"


@pytest.mark.parametrize(
    ("endpoint", "network"),
    [
        ("https://far.example:8443", {"domainAllowList": "far.example"}),
        ("https://192.0.2.7:8443", {"networkAllowList": "192.0.2.7/32"}),
        ("https://[2001:db8::7]:8443", {"networkAllowList": "2001:db8::7/128"}),
        ("", {"networkBlockAll": True}),
    ],
)
async def test_a_sandbox_has_its_lease_and_reaches_its_endpoint_alone(
    double: Double, endpoint: str, network: dict[str, object]
) -> None:
    provider = DaytonaProvider(replace(CONFIG, image="mine"))
    async with SandboxPool(provider, 1).leased(Start(90.5, endpoint=endpoint)) as sandbox:
        assert (await shell(sandbox, "ls -A /tmp/.tether; touch /tmp/.tether/x")).status
    await provider.close()
    (asked,) = double.machines.asked.values()
    assert (asked["snapshot"], asked["user"], asked["ttlMinutes"]) == ("mine", "root", 2)
    assert {name: asked[name] for name in asked if "etwork" in name or "domain" in name} == network


async def test_a_key_that_is_wrong_or_missing_is_refused_by_name(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_1")
    provider = DaytonaProvider(CONFIG)
    with pytest.raises(SettingsError, match=r"'daytona': .*no such key"):
        await provider.start(START)
    await provider.close()
    monkeypatch.delenv("DAYTONA_API_KEY")
    with pytest.raises(SettingsError, match="'daytona': "):
        DaytonaProvider(CONFIG)
