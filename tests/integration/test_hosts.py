"""A trainer on two hosts, of which the second is killed: all hosts end, meet again and resume.

Here a host is a loopback address and the processes that use it; `tests/trials/chaos/trainer_hosts.py` has
network namespaces.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import environment, processes_of
from tests.integration.loop import ROOT
from tests.integration.trainer_place import Place, place

STEPS = 10
FIRST = "127.0.0.2"
"""Address of host 0."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((FIRST, 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def host(here: Place, number: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A host: the trainer's service, started again whenever it fails."""
    variables = {"TETHER_CONFIG": str(here.run_dir / "settings.json"), "TETHER_NODE_RANK": str(number)}
    if number == 0:  # the others do not speak with the ledger
        variables["TETHER_REDIS_URL"] = here.settings.ledger.url
    with here.log(number).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "bash", str(ROOT / "deploy/slurm/keep_running.sh"), sys.executable, "-m", "services.trainer",
            cwd=ROOT, env=environment(**variables), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            service = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in service:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            await process.wait()


def kill_service(host: asyncio.subprocess.Process) -> None:
    """SIGKILL to every process of a host but the one that starts its service again."""
    for child in psutil.Process(host.pid).children(recursive=True):
        child.kill()


@slow_unless_changed(
    "trainer/hosts/", "services/trainer/", "deploy/slurm/keep_running.sh", "tests/integration/test_hosts.py"
)
async def test_a_killed_host_of_the_trainer_returns_and_no_step_is_lost(tmp_path: Path) -> None:
    overrides = (
        "trainer.backend=megatron", "parallel.data_parallel_size=2", f"run.steps={STEPS}",
        "trainer.checkpoint_every=3", "cluster.nodes=2", f"cluster.rendezvous={FIRST}:{free_port()}",
    )  # fmt: skip
    async with asyncio.timeout(600), place(tmp_path, *overrides) as here:
        async with host(here, 0) as first, host(here, 1) as second:
            await here.at_version(2)
            kill_service(second)
            assert (await first.wait(), await second.wait()) == (0, 0), here.log(0).read_text()
    assert [step["step"] for step in read_steps(tmp_path / "metrics.jsonl")] == list(range(STEPS))
    result = verify(tmp_path / "audit.jsonl")
    assert (result.violations, result.steps) == ([], STEPS)
    for number in (0, 1):
        assert here.log(number).read_text().count("hosts.met hosts=2 ranks=2") >= 2
    assert list(tmp_path.glob("hosts-*")) == []
    assert processes_of(tmp_path) == []
