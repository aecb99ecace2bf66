"""Promises of every provider whose sandboxes are machines of a company, beside those of any sandbox.

A module has the fixtures `provider` and `double`, the company's double, and subclasses `RemoteContract`.
"""

from typing import Any

import pytest

from rollout.programs.folder import programs_directory
from rollout.sandboxes.base import Provider, SandboxDied
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.remote.provider import host_label
from tests.contracts.sandbox_suite import START, SandboxContract, shell


class RemoteContract(SandboxContract):
    """Promises of a provider of machines elsewhere, a test each."""

    storm = 8
    company = ""
    """Name of the company, as errors have it."""
    labels = ""
    """Field of a request that has a machine's labels."""

    async def test_machines_of_dead_workers_of_this_host_are_removed(
        self, double: Any, provider: Provider
    ) -> None:
        gone = {**host_label(), "tether_folder": str(programs_directory() / "gone")}
        await double.machines.create({self.labels: gone})
        other = await double.machines.create({self.labels: {**gone, "tether_host": "other"}})
        async with SandboxPool(provider, 1).leased(START):
            assert await provider.clear_left() == 0
            assert len(double.machines.running) == 2
        assert list(double.machines.running) == [other]
        await double.machines.remove(other)

    async def test_a_machine_that_has_ended_is_a_dead_sandbox(self, double: Any, provider: Provider) -> None:
        async with SandboxPool(provider, 1).leased(START) as sandbox:
            await double.machines.close()
            with pytest.raises(SandboxDied, match=f"{self.company}: "):
                await shell(sandbox, "true")
