"""The provider `process` keeps the promises of a sandbox."""

import pytest

from protocol.errors import SettingsError
from rollout.sandboxes.base import Start
from rollout.sandboxes.process import ProcessProvider
from rollout.sandboxes.runs import SandboxRuns
from tests.changes import slow_unless_changed
from tests.contracts.sandbox_suite import CONFIG, SandboxContract

pytestmark = [
    pytest.mark.xdist_group("sandbox"),
    slow_unless_changed("rollout/sandboxes/", "reward/sandbox/", "tests/contracts/sandbox_suite.py"),
]


@pytest.fixture(scope="module")
def provider() -> ProcessProvider:
    return ProcessProvider(CONFIG, SandboxRuns(2))


class TestProcess(SandboxContract):
    storm = 8


async def test_it_has_no_way_to_an_endpoint(provider: ProcessProvider) -> None:
    with pytest.raises(SettingsError, match="use bubblewrap"):
        await provider.start(Start(10, endpoint="http://127.0.0.1:1"))
