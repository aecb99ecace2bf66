"""Every service alone, as `python -m services.NAME` from environment variables against a Redis of the user's:
no `tether up`."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from protocol.lifecycle import GroupState
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import LedgerStatus
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import verify
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.integration.command import environment, processes_of
from tests.integration.loop import ROOT
from tests.warm.popen import forking

STEPS = 1_000_000
LIMIT_S = 600.0
"""A dozen processes are started one after the other; on a machine that is busy with others each takes its
time."""


class Machine:
    """Starts services as somebody with a shell does."""

    def __init__(self, directory: Path, variables: dict[str, str]) -> None:
        self.directory = directory
        self.variables = variables
        self._stack = AsyncExitStack()

    async def start(self, service: str, name: str = "") -> asyncio.subprocess.Process:
        """Start a service; it is killed at the end if it is still there."""
        return await self._stack.enter_async_context(self._started(service, name or service))

    async def run(self, service: str) -> str:
        """Run a service to its end, which has to be a good one. Returns what it printed."""
        process = await self.start(service)
        assert await process.wait() == 0, self.log(service)
        return self.log(service)

    async def stop(self, process: asyncio.subprocess.Process, name: str) -> None:
        """Ask a service to stop; it drains."""
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, self.log(name)

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def close(self) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def _started(self, service: str, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
        with (self.directory / f"{name}.log").open("wb") as log, forking():
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", f"services.{service}", stdout=log, stderr=log, cwd=ROOT,
                env=environment(**self.variables, TETHER_INSTANCE=name),
            )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@asynccontextmanager
async def machine(directory: Path, **variables: str) -> AsyncIterator[tuple[Machine, RedisLedger]]:
    """A machine with a ledger server, and a connection to it."""
    server = EmbeddedServer(directory / "redis")
    url = await server.start()
    made = Machine(directory, {"TETHER_REDIS_URL": url, **variables})
    try:
        async with asyncio.timeout(LIMIT_S):
            ledger = await RedisLedger.connect(url, variables["TETHER_RUN"])
            try:
                yield made, ledger
            finally:
                await ledger.close()
    finally:
        await made.close()
        await server.stop()


async def reached(ledger: RedisLedger, ready: Callable[[LedgerStatus], Awaitable[bool]]) -> LedgerStatus:
    """Ask the ledger until it says what is waited for."""
    while True:
        status = await ledger.status()
        if await ready(status):
            return status
        await asyncio.sleep(0.05)  # leave the processor to those that are waited for


@slow_unless_changed(
    "services/cli.py", "services/runtime/", "services/rollout/service.py", "services/trainer/service.py",
    "services/ingest/", "services/reward.py", "tests/integration/test_standalone.py",
)  # fmt: skip
@pytest.mark.timeout(LIMIT_S + 100)
async def test_services_alone_make_a_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    variables = {
        "TETHER_CONFIG": str(ROOT / "deploy/configs/stragglers.toml"), "TETHER_RUN": "alone",
        "TETHER_RUN_DIR": str(run_dir), "TETHER_STEPS": str(STEPS), "TETHER_MAX_STALENESS": "2",
        "TETHER_ENGINE__SECONDS_PER_TOKEN": "0.02",
    }  # fmt: skip
    async with machine(tmp_path, **variables) as (here, ledger):
        assert f"run alone is ready in {run_dir}: {STEPS} steps" in await here.run("prepare")
        assert "is ready" in await here.run("prepare")  # harmless to repeat
        services = {name: await here.start(name) for name in ("ingest", "reward", "trainer")}
        first = await here.start("rollout", "rollout.first")

        async def some_steps(status: LedgerStatus) -> bool:
            return status.version >= 4

        async def more_steps(status: LedgerStatus) -> bool:
            return status.version >= 6

        async def late_one_serves(status: LedgerStatus) -> bool:
            late = [
                peer.incarnation
                for peer in await ledger.peers("rollout")
                if peer.info["name"] == "rollout.late"
            ]
            return bool(late) and status.engines.get(late[0], ("", -1))[0] == status.epoch

        await reached(ledger, some_steps)
        second = await here.start("trainer", "trainer.second")
        assert await services.pop("trainer").wait() == 1, here.log("trainer")
        assert "tether trainer: another trainer has taken over run alone; this one ends" in here.log(
            "trainer"
        )
        assert "Traceback" not in here.log("trainer")
        await reached(ledger, more_steps)
        await ledger.drain()
        assert await second.wait() == 0, here.log("trainer.second")
        middle = await ledger.status()
        assert not middle.done
        assert middle.active == middle.states[GroupState.WAITING]
        await ledger.drain(False)
        late = await here.start("rollout", "rollout.late")
        third = await here.start("trainer", "trainer.third")
        joined = await reached(ledger, late_one_serves)
        assert joined.version >= middle.version >= 6
        await here.stop(first, "rollout.first")
        assert "rollout.first" not in [peer.info["name"] for peer in await ledger.peers("rollout")]
        await ledger.drain()
        assert await third.wait() == 0, here.log("trainer.third")
        assert not (await ledger.status()).done
        await here.stop(late, "rollout.late")
        for name, process in services.items():
            await here.stop(process, name)
        assert await ledger.peers() == []
    assert processes_of(tmp_path) == []
    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert len({step["epoch"] for step in steps}) == 3
    assert sum(step["groups"] < 8 for step in steps) <= 2  # the last one of each drain
    result = verify(run_dir / "audit.jsonl")
    assert (result.violations, result.steps, result.trained, result.bound) == (
        [],
        len(steps),
        sum(step["groups"] for step in steps),
        2,
    )


async def test_a_worker_with_other_prompts_than_the_run_is_refused(tmp_path: Path) -> None:
    """Rows are appended after the start; the workers of then have the old ones in memory."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": f"{n}=", "answer": "1"}) + "\n" for n in range(65)]
    prompts.write_text("".join(rows[:64]))
    variables = {
        "TETHER_CONFIG": str(ROOT / "deploy/configs/stragglers.toml"), "TETHER_RUN": "changed",
        "TETHER_RUN_DIR": str(tmp_path / "run"), "TETHER_PROMPTS__PATH": str(prompts),
        "TETHER_PROMPTS__HELD_OUT": "8", "TETHER_EVAL__EVERY": "1",
    }  # fmt: skip
    async with machine(tmp_path, **variables) as (here, ledger):
        await here.run("prepare")
        recorded = (await ledger.status()).fingerprint
        prompts.write_text("".join(rows))
        for service in ("rollout", "evaluation"):
            process = await here.start(service)
            assert await process.wait() == 2, here.log(service)
            said = here.log(service).splitlines()[-1]
            assert said.startswith(f"tether {service}: setting prompts.path: the prompts in {prompts} have")
            assert f"those of the run {recorded}: give this host the prompts" in said
            assert "Traceback" not in here.log(service)


async def test_a_service_without_a_run_says_what_to_do(tmp_path: Path) -> None:
    variables = {
        "TETHER_CONFIG": str(ROOT / "deploy/configs/stragglers.toml"),
        "TETHER_RUN": "none",
        "TETHER_RUN_DIR": str(tmp_path / "run"),
    }
    async with machine(tmp_path, **variables) as (here, _):
        for service, code, said in (("rollout", 2, "no model in"), ("trainer", 2, "no run directory")):
            process = await here.start(service)
            assert await process.wait() == code, here.log(service)
            assert said in here.log(service)
            assert "Traceback" not in here.log(service)
