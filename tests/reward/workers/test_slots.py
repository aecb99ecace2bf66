"""Verifiers that wait, in one process for all groups: at once, and each to blame only for itself."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import uvloop

from protocol.errors import RewardError
from protocol.host.call_threads import THREADS
from reward.combine import VerifierError
from reward.config import RewardConfig, VerifierConfig
from reward.workers.pool import ScorePool
from reward.workers.slots import WorkerSlot
from tests.services.bus.harness import eventually

pytestmark = pytest.mark.xdist_group("sandbox")

OWN = """
import asyncio, os, time

met = {}

async def score(response, prompt):
    word, _, rest = response.partition(" ")
    if word == "meet":  # as many calls as it says
        await met.setdefault("barrier", asyncio.Barrier(int(rest))).wait()
    elif word == "again" and not os.path.exists(rest):  # waits the first time
        open(rest, "w").close()
        await asyncio.sleep(3600)
    elif word == "raise":
        while rest and not os.path.exists(rest):
            await asyncio.sleep(0.01)
        raise ValueError("as told")
    elif word == "cancelled":
        raise asyncio.CancelledError
    elif word == "quit":
        raise SystemExit(6)
    elif word == "exit":
        os._exit(5)
    elif word == "leave":  # ends the process when it is cancelled
        try:
            await asyncio.sleep(3600)
        finally:
            os._exit(5)
    elif word == "block":
        time.sleep(3600)
    elif word == "thread":
        await asyncio.to_thread(time.sleep, float(rest))
    elif word == "sleep":
        await asyncio.sleep(3600)
    elif word == "stay":
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass
    elif word == "surrogate":
        raise ValueError(chr(0xd800))
    return 1
"""


@asynccontextmanager
async def own_pool(
    directory: Path, timeout_s: float = 60.0, timeout_score: float | None = None
) -> AsyncIterator[ScorePool]:
    (directory / "own_reward.py").write_text(OWN)
    config = RewardConfig(
        verifiers=(VerifierConfig("function", options={"path": "own_reward:score"}),),
        timeout_s=timeout_s,
        timeout_score=timeout_score,
        workers=1,
    )
    async with ScorePool(config, [str(directory)]) as pool:
        yield pool


async def outcomes(pool: ScorePool, groups: Sequence[Sequence[str]]) -> list[str]:
    """Score groups at the same time; return the rewards of each, or its error."""

    async def outcome(group: Sequence[str]) -> str:
        try:
            return str((await pool.score("q", group, {})).rewards)
        except VerifierError as error:
            return error.error

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(outcome(group)) for group in groups]
    return [task.result() for task in running]


async def test_calls_for_several_groups_wait_at_the_same_time(tmp_path: Path) -> None:
    async with own_pool(tmp_path) as pool:
        assert await outcomes(pool, [["meet 6"] * 2] * 3) == ["[1.0, 1.0]"] * 3
        assert pool.counts["function", "calls"] == 6
        assert pool.counts["function", "failures"] == 0


async def test_an_exception_ends_the_other_calls_of_its_group_alone(tmp_path: Path) -> None:
    async with own_pool(tmp_path) as pool:
        raised, cancelled, quits, surrogate, fine = await outcomes(
            pool, [["sleep", "raise"], ["sleep", "cancelled"], ["quit"], ["surrogate"], ["good"]]
        )
    assert "own_reward.py:16: ValueError: as told" in raised
    assert "CancelledError" in cancelled
    assert "own_reward.py:20: SystemExit: 6" in quits
    assert "ValueError: ?" in surrogate
    assert fine == "[1.0]"


async def test_a_call_that_ends_the_process_fails_alone(tmp_path: Path) -> None:
    first, second = f"again {tmp_path}/1", f"again {tmp_path}/2"
    ended = "the worker process ended, exit code 5"
    async with own_pool(tmp_path) as pool:
        assert await outcomes(pool, [[first], [second], ["exit"], ["exit"]]) == ["[1.0]"] * 2 + [ended] * 2
        assert await outcomes(pool, [["good", "good"]]) == ["[1.0, 1.0]"]


async def test_a_cancelled_call_that_ends_the_process_is_blamed_on_no_other_call(tmp_path: Path) -> None:
    began = tmp_path / "began"
    async with own_pool(tmp_path) as pool:
        raised, again = await outcomes(pool, [["leave", f"raise {began}"], [f"again {began}"]])
    assert "ValueError: as told" in raised
    assert again == "[1.0]"


@pytest.mark.slow
async def test_a_call_that_blocks_the_event_loop_is_late_alone(tmp_path: Path) -> None:
    async with own_pool(tmp_path, timeout_s=1.0) as pool:
        late = "no score for sample 0 within reward.timeout_s 1.0"
        assert await outcomes(pool, [["good"], ["block"], ["good"]]) == ["[1.0]", late, "[1.0]"]


async def test_a_call_that_does_not_end_when_cancelled_is_late_and_replaced(tmp_path: Path) -> None:
    async with own_pool(tmp_path, timeout_s=0.5) as pool:
        late = "no score for sample 1 within reward.timeout_s 0.5"
        assert await outcomes(pool, [["good", "stay"]]) == [late]
        assert await outcomes(pool, [["good"]]) == ["[1.0]"]


async def test_calls_whose_threads_never_end_leave_threads_to_others(tmp_path: Path) -> None:
    async with own_pool(tmp_path, timeout_s=1.0) as pool:
        late = "no score for sample 0 within reward.timeout_s 1.0"
        hanging = THREADS - 4
        assert await outcomes(pool, [["thread 3600"]] * hanging) == [late] * hanging
        assert pool._shared is not None
        shared = await pool._shared._shared.worker()
        assert await outcomes(pool, [["thread 0"] * THREADS]) == [str([1.0] * THREADS)]
        assert shared.healthy


async def test_a_call_that_nobody_waits_for_and_does_not_end_ends_its_process(tmp_path: Path) -> None:
    async with own_pool(tmp_path) as pool:
        await outcomes(pool, [["stay", "raise"]])
        assert pool._shared is not None
        shared = await pool._shared._shared.worker()
        await eventually(lambda: not shared.healthy)
        assert await outcomes(pool, [["good"]]) == ["[1.0]"]


async def test_late_calls_get_the_score_for_that(tmp_path: Path) -> None:
    async with own_pool(tmp_path, timeout_s=0.5, timeout_score=0.25) as pool:
        components = (await pool.score("q", ["sleep", "good"], {})).components
        assert components == {"function": [0.25, 1.0], "timed_out": [1.0, 0.0]}
        assert pool.counts["function", "late"] == 2


def test_calls_wait_in_the_event_loop_of_a_service(tmp_path: Path) -> None:
    async def score() -> list[str]:
        async with own_pool(tmp_path) as pool:
            rounds = (["meet 2"] * 2, ["exit"], ["good"])
            return [(await outcomes(pool, [group]))[0] for group in rounds]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(score())
    assert found == ["[1.0, 1.0]", "the worker process ended, exit code 5", "[1.0]"]


async def test_closing_a_slot_ends_a_process_that_is_still_starting(tmp_path: Path) -> None:
    began = tmp_path / "began"
    os.mkfifo(began)  # a pipe: waits for the test to read
    (tmp_path / "endless.py").write_text(
        f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    )
    verifiers = (VerifierConfig("function", options={"path": "endless:score"}),)
    config = RewardConfig(verifiers=verifiers, start_timeout_s=3600.0)
    slot = WorkerSlot(config, [str(tmp_path)], verifiers, is_concurrent=False)

    async def refused() -> None:
        with pytest.raises(RewardError, match="the score pool is closed"):
            await slot.worker()

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        for _ in range(2):  # the second one waits for the start of the first one
            tasks.create_task(refused())
        pid = int(await asyncio.to_thread(began.read_text))
        for _ in range(2):
            tasks.create_task(slot.close())
    assert not psutil.pid_exists(pid)
