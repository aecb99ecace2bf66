"""The pool, with verifiers that raise, hang, crash and use memory, in real worker processes."""

import asyncio
import os
import textwrap
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from protocol.errors import RewardError, SettingsError
from protocol.messages import Rollout, ScoredRollout, ScoreFailure
from protocol.tensors import Array
from reward.combine import VerifierError
from reward.config import RewardConfig, VerifierConfig
from reward.score import score_rollout
from reward.workers.pool import GroupScores, ScorePool

pytestmark = pytest.mark.xdist_group(
    "sandbox"
)  # its tests look at what is left in the shared temporary directory

UNRULY = '''
"""Does what the response says."""
import os, subprocess, sys
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Options:
    marks: str = ""

def begin(options):
    child = subprocess.Popen(["sleep", "3600"])
    (Path(options.marks) / "hanging").write_text(str(child.pid))  # a pipe: waits for the test to read
    return child

def hang(options):
    begin(options)
    while True:
        pass

ACTS = {
    "raise": lambda options: 1 / 0,
    "surrogate": lambda options: (_ for _ in ()).throw(ValueError(chr(0xd800))),
    "exit": lambda options: os._exit(3),
    "quit": lambda options: sys.exit(4),
    "nan": lambda options: float("nan"),
    "text": lambda options: "good",
    "memory": lambda options: len(bytearray(1 << 40)),
    "print": lambda options: print("noise" * 100_000) or 1.0,
    "noise": lambda options: os.write(1, b"\\xff" * 100) and 1.0,
    "read": lambda options: len(sys.stdin.read()) + len(subprocess.run(["cat"], stdout=-1).stdout),
    "hang": hang,
    "wait": lambda options: begin(options).wait() == 0,
}

def score(prompt_text, response, metadata, options):
    return ACTS[response](options) if response in ACTS else float(metadata["answer"])
'''
METADATA = msgspec.msgpack.encode({"answer": "7"})
CONFIG = RewardConfig(
    verifiers=(VerifierConfig("exact_match"), VerifierConfig("unruly.verifier", 2.0)),
    timeout_s=60.0,
    workers=1,
)


OTHERS: set[psutil.Process] = set()
"""Processes that fixtures of other modules keep: a server for the session, say."""


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(psutil.Process().children(recursive=True))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardConfig:
    (tmp_path / "unruly").mkdir()
    os.mkfifo(tmp_path / "hanging")
    (tmp_path / "unruly" / "verifier.py").write_text(textwrap.dedent(UNRULY))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    first, second = CONFIG.verifiers
    return replace(CONFIG, verifiers=(first, replace(second, options={"marks": str(tmp_path)})))


@pytest.fixture
async def pool(config: RewardConfig) -> AsyncIterator[ScorePool]:
    async with ScorePool(config) as pool:
        yield pool
    assert set(psutil.Process().children(recursive=True)) <= OTHERS


def workers() -> list[int]:
    return [child.pid for child in psutil.Process().children() if child not in OTHERS]


async def test_a_group_is_scored_by_all_verifiers(pool: ScorePool) -> None:
    scores = await pool.score("q", ["7", "8"], METADATA)
    assert scores.components == {"exact_match": [1.0, 0.0], "unruly.verifier": [7.0, 7.0]}
    assert scores.rewards == [15.0, 14.0]
    assert await pool.score("q", ["7", "8"], {"answer": "7"}, [0.5, 0.25]) == GroupScores(
        rewards=[15.5, 14.25],
        components={"exact_match": [1.0, 0.0], "unruly.verifier": [7.0, 7.0], "environment": [0.5, 0.25]},
        turn_rewards=[],
        turn_components={},
        remarks=[],
    )


@pytest.mark.parametrize(
    ("response", "error", "survives"),
    [
        ("raise", "ZeroDivisionError", True),
        ("text", r"score\(\) returned 'good'", True),
        ("nan", r"score\(\) returned nan \(.*verifier.py\)", True),
        ("memory", "MemoryError", True),
        ("surrogate", r"ValueError: \?", True),
        ("exit", "exit code 3", False),
        ("quit", "SystemExit: 4", True),
    ],
)
async def test_a_failing_verifier_is_named_and_the_next_group_is_scored(
    pool: ScorePool, response: str, error: str, survives: bool
) -> None:
    before = workers()
    with pytest.raises(VerifierError, match=error) as caught:
        await pool.score("q", ["7", response], METADATA)
    assert caught.value.verifier == "unruly.verifier"
    assert (await pool.score("q", ["7"], METADATA)).rewards == [15.0]
    assert (workers() == before) is survives
    assert len(workers()) == 1


@pytest.mark.parametrize("response", ["hang", "wait"])
async def test_a_hanging_verifier_is_ended_with_what_it_started(
    config: RewardConfig, tmp_path: Path, response: str
) -> None:
    async with ScorePool(replace(config, timeout_s=2.0)) as pool:
        before = workers()
        async with asyncio.TaskGroup() as tasks:
            started = tasks.create_task(hanging(tmp_path))
            with pytest.raises(
                VerifierError, match=r"unruly\.verifier: no score for sample 1 within reward\.timeout_s 2\.0"
            ):
                await pool.score("q", ["7", response], METADATA)
        assert not psutil.pid_exists(before[0])
        async with asyncio.timeout(60):
            while not is_gone(started.result()):  # noqa: ASYNC110 (the kernel tells nobody)
                await asyncio.sleep(0.01)
        assert (await pool.score("q", ["7"], METADATA)).rewards == [15.0]


async def test_a_response_that_is_late_on_two_workers_gets_the_score_for_that(
    config: RewardConfig, tmp_path: Path
) -> None:
    score = -0.5
    late = replace(config, timeout_s=2.0, timeout_score=score)
    async with ScorePool(late) as pool:
        before = workers()
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(hanging(tmp_path))]
            scoring = tasks.create_task(pool.score("q", ["7", "hang", "8"], METADATA))
            await started[0]
            started.append(tasks.create_task(hanging(tmp_path)))
        rewards, components = scoring.result().rewards, scoring.result().components
        assert started[0].result() != started[1].result()
        assert components["unruly.verifier"] == [7.0, score, 7.0]
        assert components["exact_match"] == [1.0, 0.0, 0.0]
        assert components["timed_out"] == [0.0, 1.0, 0.0]
        assert rewards == [15.0, 2.0 * score, 14.0]
        assert not psutil.pid_exists(before[0])
        assert "timed_out" not in (await pool.score("q", ["7"], METADATA)).components


OWN = """
import asyncio

def each(response, metadata, token_count, finish_reason):
    if response == "bad":
        raise KeyError("no such thing")
    return float(token_count) if finish_reason == "stop" else 0

def whole(responses):
    return [1.0 / len(responses)] * len(responses)

async def slow(response):
    await asyncio.sleep(3600 * (response == "slow"))
    return 1

def loops(response):  # as a function around an asynchronous library does
    return asyncio.run(slow(response))
"""


def own_function(name: str) -> VerifierConfig:
    return VerifierConfig("function", options={"path": f"own_reward:{name}"}, label=name)


@pytest.fixture
def own(tmp_path: Path) -> RewardConfig:
    """Three functions of one module of the user."""
    (tmp_path / "own_reward.py").write_text(OWN)
    verifiers = tuple(own_function(name) for name in ("each", "whole", "slow"))
    return RewardConfig(verifiers=verifiers, timeout_s=60.0, workers=1)


async def test_functions_of_the_user_score_samples_and_groups(own: RewardConfig, tmp_path: Path) -> None:
    async with ScorePool(own, [str(tmp_path)]) as pool:
        scores = await pool.score("q", ["a", "b"], {}, token_counts=[3, 4], finish_reasons=["stop", "length"])
        assert scores.components == {"each": [3.0, 0.0], "whole": [0.5, 0.5], "slow": [1.0, 1.0]}
        with pytest.raises(VerifierError, match=r"each: /\S+/own_reward\.py:6: KeyError: 'no such thing'"):
            await pool.score("q", ["a", "bad"], {})
        assert len(workers()) == 2  # one of them for what waits


async def test_function_that_is_not_asynchronous_may_run_an_event_loop(
    own: RewardConfig, tmp_path: Path
) -> None:
    async with ScorePool(replace(own, verifiers=(own_function("loops"),)), [str(tmp_path)]) as pool:
        assert (await pool.score("q", ["a", "b"], {})).rewards == [1.0, 1.0]


async def test_only_the_late_samples_of_an_asynchronous_function_are_scored_for_that(
    own: RewardConfig, tmp_path: Path
) -> None:
    async with ScorePool(replace(own, timeout_s=2.0, timeout_score=0.25), [str(tmp_path)]) as pool:
        components = (await pool.score("q", ["a", "slow"], {})).components
    assert components["slow"] == [1.0, 0.25]
    assert components["timed_out"] == [0.0, 1.0]


async def test_output_of_a_verifier_does_not_get_between_the_frames(pool: ScorePool) -> None:
    assert (await pool.score("q", ["print", "noise"], METADATA)).components["unruly.verifier"] == [1.0, 1.0]


async def test_neither_a_verifier_nor_what_it_starts_reads_frames(config: RewardConfig) -> None:
    async with ScorePool(replace(config, timeout_s=10.0)) as pool:
        assert (await pool.score("q", ["read"], METADATA)).components["unruly.verifier"] == [0.0]


async def test_cancelling_a_score_ends_its_worker(pool: ScorePool, tmp_path: Path) -> None:
    before = workers()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(pool.score("q", ["hang"], METADATA))
        await hanging(tmp_path)
        task.cancel()
    assert task.cancelled()
    assert not psutil.pid_exists(before[0])
    assert (await pool.score("q", ["7"], METADATA)).rewards == [15.0]


async def test_closing_fails_what_is_being_scored_and_what_waits(
    config: RewardConfig, tmp_path: Path
) -> None:
    pool = ScorePool(config)
    failures: list[str] = []

    async def failing(response: str) -> None:
        with pytest.raises(RewardError) as caught:
            await pool.score("q", [response], METADATA)
        failures.append(str(caught.value))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(failing("hang"))
        tasks.create_task(failing("7"))
        await hanging(tmp_path)
        await pool.close()
    assert sorted(failures) == [
        "the score pool is closed",
        "unruly.verifier: the worker process ended, exit code -9",
    ]
    assert workers() == []
    await pool.close()


async def test_groups_are_scored_at_once_by_as_many_workers_as_allowed(config: RewardConfig) -> None:
    async with ScorePool(replace(config, workers=2)) as pool:
        assert len(workers()) == 1
        async with asyncio.TaskGroup() as tasks:
            scores = [tasks.create_task(pool.score("q", [str(i)] * 3, METADATA)) for i in range(10)]
        assert [task.result().rewards[0] for task in scores] == [14.0 + (i == 7) for i in range(10)]
        assert len(workers()) == 2


@pytest.mark.parametrize(
    ("verifiers", "why"),
    [
        ([VerifierConfig("exact_mach")], "did you mean 'exact_match'"),
        ([VerifierConfig(), VerifierConfig()], "each needs a name of its own"),
        ([VerifierConfig(label="timed_out")], "other than 'environment', 'timed_out', 'fell_back'"),
        ([VerifierConfig("function", options={"path": "nowhere:score"})], r"there is no nowhere\.py"),
        ([VerifierConfig(options={"stripp": True})], "did you mean 'strip'"),
        ([VerifierConfig("no.such_module")], "cannot be imported"),
    ],
)
async def test_wrong_settings_are_found_at_the_start(verifiers: list[VerifierConfig], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        async with ScorePool(RewardConfig(verifiers=tuple(verifiers))):
            pass
    assert workers() == []


async def test_metadata_that_is_no_map_is_an_error_of_the_group(pool: ScorePool) -> None:
    deep = b"\x81\xa1x" + b"\x91" * 500 + b"\xc0"
    for packed in (b"", b"\x93\x01\x02\x03", b"\xc1", b"\xff" * 50, b"\xdf\xff\xff\xff\xff", deep):
        with pytest.raises(VerifierError):
            await pool.score("q", ["7"], packed)
    assert (await pool.score("q", ["7"], METADATA)).rewards == [15.0]


def rollout(*responses: str, environment: Any = None) -> Rollout:
    n = len(responses)
    return Rollout(
        group=3,
        token="t",
        engine="e",
        prompt_tokens=Array.of([1], "int32"),
        lengths=Array.of([1] * n, "int32"),
        tokens=Array.of([2] * n, "int32"),
        logprobs=Array.of([0.0] * n, "float32"),
        loss_mask=Array.of([1] * n, "uint8"),
        spans=Array.of([(i, 1, 0) for i in range(n)], "int32"),
        finish_reasons=("stop",) * n,
        responses=responses,
        metadata=msgspec.Raw(METADATA),
        environment_rewards=None if environment is None else Array.of(environment, "float32"),
    )


async def test_a_rollout_becomes_a_scored_rollout_or_a_failure(pool: ScorePool) -> None:
    given = rollout("7", "8", environment=[0.5, 1.0])
    scored = await score_rollout(given, pool, "reward.1")
    assert isinstance(scored, ScoredRollout)
    assert scored.rollout is given
    assert scored.rewards.numpy().tolist() == [15.5, 15.0]
    assert {name: list(scores.numpy()) for name, scores in scored.components.items()} == {
        "exact_match": [1, 0], "unruly.verifier": [7, 7], "environment": [0.5, 1],
    }  # fmt: skip
    failure = await score_rollout(rollout("7", "raise"), pool, "reward.1")
    assert isinstance(failure, ScoreFailure)
    assert (failure.group, failure.token, failure.verifier, failure.scorer) == (
        3,
        "t",
        "unruly.verifier",
        "reward.1",
    )
    assert "division by zero" in failure.error
    for environment in ([0.5], [[0.5], [1.0]], 0.5):
        broken = await score_rollout(rollout("7", "8", environment=environment), pool, "reward.1")
        assert isinstance(broken, ScoreFailure)


async def test_the_environment_alone_may_give_the_reward() -> None:
    async with ScorePool(RewardConfig(verifiers=(), environment_weight=2.0)) as pool:
        scored = await score_rollout(rollout("a", "b", environment=[0.5, 1.0]), pool, "r")
        assert isinstance(scored, ScoredRollout)
        assert scored.rewards.numpy().tolist() == [1.0, 2.0]
        assert isinstance(await score_rollout(rollout("a"), pool, "r"), ScoreFailure)
    assert workers() == []


async def hanging(directory: Path) -> int:
    """Wait until the verifier hangs; the process that it started."""
    return int(await asyncio.to_thread((directory / "hanging").read_text))


def is_gone(pid: int) -> bool:
    """A killed process may still wait to be reaped by whoever adopted it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
