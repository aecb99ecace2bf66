"""Tests what a running audit takes, and that neither its own faults nor its end hold up the run."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from protocol.errors import TetherError
from protocol.messages import WeightManifest
from protocol.tensors import Array
from protocol.weights.lora import LoraConfig
from reward.config import RewardConfig, VerifierConfig
from rollout.engines.base import EngineConfig, KvPolicy
from rollout.engines.contract.models import tiny_model
from services.audit import live, recompute
from services.audit.auditor import AuditedStep, Auditor, UnchangedSteps
from services.audit.budget import Budget
from services.audit.live import FILE, MIN_START_S, LiveAudit
from services.audit.recompute import (
    ADAPTER_MEMORY_FACTOR,
    MEMORY_SHARE,
    MIN_PASS_TOKENS,
    MODEL_BYTES,
    RecomputeResources,
    recompute_resources,
    recomputers,
)
from services.audit.records import Expectations, rewards
from services.run_record.evaluations import Evaluation
from services.settings.sections import AuditConfig, BoundConfig, ModelConfig, RunConfig, Settings
from trainer.backends.base import StepStats

EPOCHS = ("first", "later")
MOVED, SAME = (1, 2), (2, 2)


def settings_of(directory: Path, **sections: Any) -> Settings:
    """Settings of a run whose groups are all audited, at lags of up to 1."""
    given = {
        "run": RunConfig(dir=str(directory)),
        "audit": AuditConfig(share=1.0),
        "bound": BoundConfig(max_staleness=1),
        **sections,
    }
    return Settings(**given)


def audit_of(settings: Settings, share: float = 1e9) -> LiveAudit:
    """An audit whose budget is a share of a time that stands at 100 s, by default more than is ever taken."""
    times = iter([0.0])
    return LiveAudit(settings, Budget(share, lambda: next(times, 100.0)))


def version(number: int, epoch: str = "epoch") -> WeightManifest:
    """A version that was published as files."""
    return WeightManifest(
        epoch=epoch, version=number, transport="disk", location="gone", buckets=(), tensors=()
    )


def taken(audit: LiveAudit) -> list[Any]:
    """What waits for the audit's thread; steps by their count of unchanged ones."""
    found = [audit._work.get_nowait() for _ in range(audit._work.qsize())]
    return [one.unchanged if isinstance(one, AuditedStep) else one.version for one in found]


def plan_of(step: int, *groups: int) -> Any:
    """A plan of a step that trained some groups."""
    return SimpleNamespace(step=step, trained_counts={group: {} for group in groups})


def observe(audit: LiveAudit, step: int, digests: tuple[int, int], *groups: int) -> None:
    """Have a step observed, by default one without a group."""
    stats: StepStats = StepStats(trained_tokens=1, loss=0.0, grad_norm=1.0)
    audit.observe(None, plan_of(step, *groups), stats, digests)  # type: ignore[arg-type]


def audited(audit: LiveAudit, digests: tuple[int, int], exported: int = 0) -> list[str]:
    """Audit a step without groups; returns the alarms' sentences."""
    command, plan = SimpleNamespace(records=(), bounds=()), SimpleNamespace(step=4, samples=())
    step = AuditedStep(
        command, plan, StepStats(trained_tokens=1, skipped="no token"), digests, exported=exported
    )  # type: ignore[arg-type]
    return [alarm.sentence() for alarm in audit._carry_out(step)]


def test_version_that_waits_is_not_replaced_before_its_groups_are_trained(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path))
    for number in (0, 1):
        audit.hold(version(number))
    assert taken(audit) == [0]
    for number in (1, 2, 3):
        audit.hold(version(number))
    audit.hold(version(1, "next epoch"))
    assert taken(audit) == [2, 1]


def test_nothing_is_begun_before_the_budget_covers_it(tmp_path: Path) -> None:
    for seconds, begins in ((MIN_START_S - 0.01, False), (MIN_START_S, True)):
        audit = audit_of(settings_of(tmp_path), share=seconds / 100)
        audit.hold(version(0))
        observe(audit, 0, MOVED, 7)
        assert taken(audit) == ([0, 0] if begins else [])


def test_version_is_held_once_there_is_time_to_load_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "recompute_resources", lambda *_: RecomputeResources(1.0, load_s=5.0))
    monkeypatch.setattr(live, "read_version", lambda manifest, timeout_s: {})
    for seconds, held in ((4.9, []), (5.1, [0])):
        audit = audit_of(settings_of(tmp_path), share=seconds / 100)
        audit.hold(version(0))
        monkeypatch.setattr(audit.budget, "note_thread", lambda: None)  # the time of the tests before
        audit._carry_out(audit._work.get_nowait())
        assert [*audit._held_versions] == held
        audit.hold(version(1))
        assert taken(audit) == ([] if held else [1])


def test_version_is_read_only_if_time_for_a_row_remains_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, taken_s = audit_of(settings_of(tmp_path), share=0.1), [0.0]  # 10 s
    audit._auditor = Auditor((None, None), share=1.0, dtype="float32", expectations=Expectations())  # type: ignore[arg-type]
    audit._auditor.row_s = 1.0
    monkeypatch.setattr(live, "recompute_resources", lambda *_: RecomputeResources(1.0, load_s=99.0))
    monkeypatch.setattr(time, "thread_time", lambda: taken_s[0])

    def read(manifest: WeightManifest, timeout_s: float) -> dict[str, Any]:
        taken_s[0] += 4.6
        return {}

    monkeypatch.setattr(live, "read_version", read)
    audit.hold(version(0))
    audit._carry_out(audit._work.get_nowait())
    assert audit.is_due(plan_of(0, 7))  # 5.4 s remain for rows of version 0
    audit.hold(version(2))
    audit._carry_out(audit._work.get_nowait())
    assert [*audit._held_versions] == [0]  # 4.6 s and 1 s are more
    audit._auditor.row_s = 0.7
    audit.hold(version(3))
    audit._carry_out(audit._work.get_nowait())
    assert [*audit._held_versions] == [3]
    assert audit.is_due(plan_of(3, 7))


def test_digests_of_the_trainer_leave_most_of_the_budget(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path), share=0.1)  # 10 s
    assert audit.wants_digest(plan_of(0, 7))
    assert not audit.wants_digest(plan_of(0))
    for _ in range(4):
        audit.note_digest(1.5)
        wanted = audit.wants_digest(plan_of(0, 7))
    assert (wanted, audit.is_due(plan_of(0, 7)), audit.budget.spent_s) == (False, True, 6.0)
    audit.note_digest(4.1)
    assert not audit.is_due(plan_of(0, 7))


def test_calls_of_verifiers_are_charged(tmp_path: Path) -> None:
    audit, asked = audit_of(settings_of(tmp_path)), threading.Event()
    audit._rewards = lambda rollout: asked.wait(0.05) or [1.0]
    assert audit._rescore(None) == [1.0]  # type: ignore[arg-type]
    assert audit.budget.spent_s >= 0.05


async def test_start_of_the_second_worker_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, loop = audit_of(settings_of(tmp_path)), asyncio.get_running_loop()
    carried, begun = asyncio.Event(), time.monotonic()

    @asynccontextmanager
    async def started() -> AsyncIterator[Any]:
        await asyncio.to_thread(threading.Event().wait, 0.3)
        yield lambda rollout: None

    monkeypatch.setattr(audit, "_second_worker", started)
    monkeypatch.setattr(audit, "_carry_out", lambda work: loop.call_soon_threadsafe(carried.set) and [])
    observe(audit, 0, MOVED, 7)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(audit.audit_loop())
        await carried.wait()
        task.cancel()
    assert 0.29 < audit.budget.charged_s < time.monotonic() - begun


def test_models_are_not_loaded_for_long_passes_or_quantised_engines(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path / "model")
    parameters = sum(one.numel() for one in tiny_model(0).parameters())

    def resources(operations: float, **arguments: str) -> RecomputeResources | None:
        engine, model = EngineConfig(arguments=arguments), ModelConfig(path=str(tmp_path / "model"))
        return recompute_resources(settings_of(tmp_path, model=model, engine=engine), operations)

    enough = 2.0 * parameters * MIN_PASS_TOKENS
    assert resources(enough) is not None
    assert resources(enough - 1) is None
    assert resources(enough, quantization="fp8") is None
    assert resources(enough, kv_cache_dtype="fp8") is None


def test_no_version_is_read_where_none_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = audit_of(settings_of(tmp_path, engine=EngineConfig(kv=KvPolicy.KEEP)))
    kept.hold(version(0))
    assert taken(kept) == []
    poor = audit_of(settings_of(tmp_path))
    monkeypatch.setattr(live, "recompute_resources", lambda settings, operations: None)
    assert poor._carry_out(version(0)) == []  # reading it would fail: it has no files
    poor.hold(version(5))
    assert (taken(poor), poor._held_versions) == ([], {})


def test_version_that_was_retired_is_missed_and_the_next_one_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = audit_of(settings_of(tmp_path))
    monkeypatch.setattr(live, "recompute_resources", lambda *_: RecomputeResources(1.0, 5.0))
    held = []

    def read(manifest: WeightManifest, timeout_s: float) -> dict[str, Any]:
        held.append(dict(audit._held_versions))
        if manifest.version == 2:
            raise OSError("no file")
        return {}

    monkeypatch.setattr(live, "read_version", read)
    audit.hold(version(0))
    for number in (0, 2):
        audit._carry_out(version(number))
    assert (audit._held_versions, held) == ({}, [{}, {}])  # the one before is let go first
    taken(audit)
    audit.hold(version(1))
    assert taken(audit) == [1]


def test_versions_and_evaluations_of_other_weights_are_named_once(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path, engine=EngineConfig(kv=KvPolicy.KEEP)))
    audit._auditor = Auditor(None, share=1.0, dtype="float32", expectations=Expectations())
    assert audited(audit, (1, 2), exported=2) == []
    [said] = audited(audit, (1, 2), exported=3)
    assert said.startswith("audit.published: published version 5 is not the trainer's (version 5)")
    observe(audit, 4, (1, 2))
    lines = [Evaluation(version=v, set="held_out", digest=f"{n:016x}") for v, n in ((5, 2), (6, 9))]
    (tmp_path / "eval.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert audited(audit, (1, 2), exported=2) == []  # version 6 is not known yet
    observe(audit, 5, (2, 8))
    [said] = audited(audit, (1, 2), exported=2)
    assert "weights of digest 0000000000000009 were scored as version 6" in said
    assert audited(audit, (1, 2), exported=3) == []
    assert len((tmp_path / FILE).read_text().splitlines()) == 2


def test_evaluations_of_an_abandoned_epoch_are_not_compared(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path, engine=EngineConfig(kv=KvPolicy.KEEP)))
    audit._auditor = Auditor(None, share=1.0, dtype="float32", expectations=Expectations())
    audit.hold(version(3, "later"))
    observe(audit, 4, (1, 2))
    lines = [
        Evaluation(version=5, epoch=epoch, set=epoch, digest=f"{9:016x}") for epoch in ("first", "later")
    ]
    (tmp_path / "eval.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    [said] = audited(audit, (1, 2))
    assert "set later" in said


def test_version_at_a_url_is_not_held(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path))
    audit.hold(msgspec.structs.replace(version(0), transport="http", location="http://host:1/v0"))
    assert taken(audit) == []


async def test_pool_that_cannot_start_leaves_the_other_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reward = RewardConfig(verifiers=(VerifierConfig(name="no.such.module:score"),))
    audit = audit_of(settings_of(tmp_path, reward=reward))
    carried = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(audit, "_carry_out", lambda work: loop.call_soon_threadsafe(carried.set) and [])
    observe(audit, 0, SAME)
    with caplog.at_level(logging.WARNING, "tether.audit"):
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(audit.audit_loop())
            await carried.wait()
            task.cancel()
    assert "audit.no_second_worker" in caplog.text
    assert "audit.failed" not in caplog.text


def test_rewards_that_time_decided_are_not_compared() -> None:
    def found(second: list[float | None]) -> list[int]:
        scored = SimpleNamespace(
            rollout=None,
            rewards=Array.of([1.0, 0.0, 1.0], "float32"),
            components={"timed_out": Array.of([0.0, 1.0, 0.0], "float32")},
        )
        group = SimpleNamespace(scored=scored, finding=lambda check, detail, sample: sample)
        return [*rewards(group, Expectations(rewards=lambda rollout: second))]  # type: ignore[arg-type, list-item]

    assert found([1.0, 1.0, None]) == []
    assert found([0.0, 1.0, 0.0]) == [0, 2]


def test_unchanged_steps_count_only_if_they_follow_each_other(tmp_path: Path) -> None:
    audit = audit_of(settings_of(tmp_path, engine=EngineConfig(dtype="bfloat16")))
    for step in range(20):
        observe(audit, step, SAME if step % 2 else MOVED)
    assert taken(audit) == []
    for step in range(20, 28):
        observe(audit, step, SAME)
    observe(audit, 28, MOVED)
    # step 19 was unchanged, too
    assert taken(audit) == [8, 9]
    assert UnchangedSteps("float32", 1).is_fault


async def test_audit_that_fails_ends_and_is_logged_once_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit = audit_of(settings_of(tmp_path))

    def misplaced(work: Any) -> list[Any]:
        raise KeyError("no such row")

    monkeypatch.setattr(audit, "_carry_out", misplaced)
    audit.hold(version(0))
    with caplog.at_level(logging.WARNING, "tether.audit"):
        async with asyncio.timeout(10):
            await audit.audit_loop()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "misplaced" in caplog.text
    audit.hold(version(9))
    observe(audit, 9, SAME)
    assert taken(audit) == []


async def test_end_of_the_run_is_told_to_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audit, began, ended = audit_of(settings_of(tmp_path)), threading.Event(), threading.Event()

    def work(given: Any) -> list[Any]:
        began.set()
        assert audit._ended.wait(10)
        ended.set()
        return []

    monkeypatch.setattr(audit, "_carry_out", work)
    audit.hold(version(0))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(audit.audit_loop())
        assert await asyncio.to_thread(began.wait, 10)
        task.cancel()
    assert await asyncio.to_thread(ended.wait, 10)


def test_memory_is_that_of_models_and_version_or_of_whole_models_beside_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(0)
    model.save_pretrained(tmp_path / "model")
    parameters = sum(one.numel() for one in model.parameters())
    path = ModelConfig(path=str(tmp_path / "model"))
    plain, adapted = (
        settings_of(tmp_path, model=path),
        settings_of(tmp_path, model=path, lora=LoraConfig(rank=2)),
    )
    half = settings_of(tmp_path, model=path, engine=EngineConfig(dtype="bfloat16"))
    held = ((plain, MODEL_BYTES + 4), (half, MODEL_BYTES + 2), (adapted, MODEL_BYTES * ADAPTER_MEMORY_FACTOR))
    for settings, each in held:
        needed = int(parameters * each / MEMORY_SHARE)
        monkeypatch.setattr(recompute, "memory_available", lambda free=needed - 8: free)
        assert recomputers(settings) is None
        monkeypatch.setattr(recompute, "memory_available", lambda free=needed + 8: free)
        assert recomputers(settings) is not None


async def test_second_worker_has_no_credentials_of_clouds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "seen_by_worker.py").write_text(
        "import os\n\nif 'AWS_SECRET_ACCESS_KEY' in os.environ:\n    raise RuntimeError('it is there')\n\n\n"
        "def score(response):\n    return 1.0\n"
    )
    verifier = VerifierConfig(name="function", options={"path": "seen_by_worker:score"})
    run = RunConfig(dir=str(tmp_path), modules=(str(tmp_path),))
    audit = audit_of(settings_of(tmp_path, run=run, reward=RewardConfig(verifiers=(verifier,))))
    async with audit._second_worker():
        monkeypatch.setattr(live, "CLOUDS", ("NONE_",))
    with pytest.raises(TetherError, match="it is there"):
        async with audit._second_worker():
            pass
