"""The provider `e2b` keeps the promises of a sandbox, against a double of the company.

`make .venv-remote/.ready` sets up the environment that it needs.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("e2b")

from protocol.errors import SettingsError
from rollout.sandboxes.base import Start
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.remote.e2b import E2BProvider
from tests.contracts.sandbox_suite import CONFIG, START, shell
from tests.rollout.sandboxes.remote.e2b_double import KEY, Double, served
from tests.rollout.sandboxes.remote.suite import RemoteContract

pytestmark = pytest.mark.slow


@pytest.fixture
async def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Double]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("E2B_API_KEY", KEY)
    async with served() as (url, double):
        monkeypatch.setenv("E2B_API_URL", url)
        monkeypatch.setenv("E2B_SANDBOX_URL", url)
        yield double
        assert not double.machines.running


@pytest.fixture
def provider(double: Double) -> E2BProvider:
    return E2BProvider(CONFIG)


class TestE2B(RemoteContract):
    company, labels = "E2B", "metadata"


async def test_a_sandbox_has_its_lease_and_reaches_its_endpoint_alone(
    double: Double, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "module.py").write_text("x = 42\n")
    provider = E2BProvider(replace(CONFIG, image="mine", read_only=(str(folder),)))
    async with SandboxPool(provider, 1).leased(Start(90.5, endpoint="https://far.example:8443")) as sandbox:
        assert (await shell(sandbox, f"cat {folder}/module.py")).output == b"x = 42\n"
        assert (await shell(sandbox, "ls -A /tmp/.tether; touch /tmp/.tether/x")).status
    async with SandboxPool(provider, 1).leased(START):
        pass
    first, second = double.machines.asked.values()
    assert (first["templateID"], first["timeout"]) == ("mine", 91)
    assert first["network"] == {"allowOut": ["far.example"], "denyOut": ["0.0.0.0/0"]}
    assert second["network"] == {"denyOut": ["0.0.0.0/0"]}


async def test_a_setting_that_cannot_work_is_refused_by_name(
    provider: E2BProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=r"environment\.advertise: .* does not reach http://127"):
        await provider.start(Start(300, endpoint="http://127.0.0.1:8000"))
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    full = E2BProvider(replace(CONFIG, read_only=(str(tmp_path),), disk_mb=1))
    with pytest.raises(SettingsError, match=r"read_only: .* have more than disk_mb, 1 MiB"):
        await full.start(START)
    monkeypatch.setenv("E2B_API_KEY", "e2b_" + "1" * 40)
    with pytest.raises(SettingsError, match=r"'e2b': .*no such key"):
        await provider.start(START)
