"""The reconciler meets a server that was restarted, that lost writes, or that it does not know."""

import asyncio
import os
import re
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from protocol.errors import SettingsError, Unavailable
from services.cli import drain, set_value
from services.launcher.scaling import run_lock
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.event_log.archiver import FILE
from services.ledger.redis.ledger import RedisLedger
from services.ledger.verify.verifier import verify
from services.ledger_recovery import reconcile as reconcile_module
from services.ledger_recovery.journal_entries import accept_entry, commit_entry
from services.ledger_recovery.reconcile import LedgerReconciler, reconcile
from services.settings.load import dump_settings
from services.settings.sections import Settings
from tests.contracts.ledger_rig import Driver, RedisRig, new_run, spec
from tests.integration.loop import settings_for
from trainer.storage.spool import Spool


@dataclass
class Kept:
    """A run with its reconciler."""

    settings: Settings
    server: EmbeddedServer
    driver: Driver
    guarded: RedisLedger
    spool: Spool
    reconciler: LedgerReconciler

    async def restart(self) -> None:
        """kill -9, and start again."""
        os.kill(self.server.pid, signal.SIGKILL)
        while self.server.running():
            os.sched_yield()
        await self.server.start()

    def command(self, *words: str) -> Any:
        with redis.Redis.from_url(self.server.url) as client:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]

    async def archived(self) -> int:
        """Archive everything; the number of the last event."""
        await self.reconciler.archive_all()
        return (await self.driver.ledger.head()).sequence

    def rebuilds(self) -> int:
        return (self.settings.run_dir / FILE).read_text().count('"event":"rebuild"')


@asynccontextmanager
async def kept(directory: Path) -> AsyncIterator[Kept]:
    """A run that has made a step, and whose ledger was reconciled."""
    run = new_run()
    settings = settings_for(directory, "stragglers.toml", f'run.name="{run}"')
    server = EmbeddedServer(directory / "ledger")
    url = await server.start()
    rig = RedisRig(url, await RedisLedger.connect(url, run))
    guarded = await RedisLedger.connect(url, run, retry_s=1.0)
    spool = Spool(directory / "spool.sqlite")
    try:
        driver = await Driver(rig).begin(B=1)
        await driver.step(1)
        reconciler = LedgerReconciler(rig.ledger, settings, spool)
        await reconciler.archive_all()
        await guarded.guard()
        assert (await guarded.status()).version == 1
        yield Kept(settings, server, driver, guarded, spool, reconciler)
    finally:
        spool.close()
        await guarded.close()
        await rig.close()
        await server.stop()


async def test_a_run_made_in_another_directory_is_refused(tmp_path: Path) -> None:
    async with kept(tmp_path / "first") as run:
        before = await run.driver.ledger.head()
        second = settings_for(tmp_path / "second", "stragglers.toml", f'run.name="{run.settings.run.name}"')
        with pytest.raises(SettingsError, match=r"another directory: .*second has neither settings.json"):
            await reconcile(run.driver.ledger, second)
        assert await run.driver.ledger.head() == before
        await reconcile(run.driver.ledger, run.settings)


async def test_a_run_that_was_only_created_goes_on_without_settings(tmp_path: Path, valkey_url: str) -> None:
    run = new_run()
    rig = RedisRig(valkey_url, await RedisLedger.connect(valkey_url, run))
    await rig.ledger.create(spec(run))
    await reconcile(rig.ledger, settings_for(tmp_path, "stragglers.toml", f'run.name="{run}"'))
    await rig.ledger.close()


async def test_nobody_uses_a_server_that_was_started_again_until_it_is_reconciled(tmp_path: Path) -> None:
    async with kept(tmp_path) as here:
        await here.restart()
        with pytest.raises(Unavailable, match="is the ingest running"):
            await here.guarded.drain()
        await here.reconciler.reconcile_and_archive()
        await here.guarded.drain()
        assert (await here.driver.ledger.status()).draining
        await here.archived()
        assert here.rebuilds() == 0


async def test_commands_change_nothing_on_a_server_that_was_started_again_until_it_is_reconciled(
    tmp_path: Path,
) -> None:
    with run_lock(tmp_path):  # as of a run that is on
        async with kept(tmp_path) as here:
            dump_settings(here.settings, tmp_path / "settings.json")
            before = await here.archived()
            await here.restart()
            with pytest.raises(Unavailable, match="is the ingest running"):
                await asyncio.to_thread(drain, tmp_path)
            with pytest.raises(Unavailable, match="is the ingest running"):
                await asyncio.to_thread(set_value, tmp_path, "groups-per-step", "3")
            assert (await here.driver.ledger.status()).sequence == before
            await here.reconciler.reconcile_and_archive()
            await asyncio.to_thread(set_value, tmp_path, "groups-per-step", "3")
            await asyncio.to_thread(drain, tmp_path)
            status = await here.driver.ledger.status()
            assert (status.draining, status.bound.groups_per_step) == (True, 3)


async def test_a_restart_of_a_server_that_does_not_sync_each_write_counts_as_a_loss(tmp_path: Path) -> None:
    async with kept(tmp_path) as here:
        await here.restart()
        here.command("CONFIG", "SET", "appendfsync", "everysec")
        await here.reconciler.reconcile_and_archive()
        await here.archived()
        assert here.rebuilds() == 1
        assert (await here.guarded.head()).version == 1
        assert verify(tmp_path / FILE).violations == []


async def test_an_emptied_server_gets_what_the_journal_has(tmp_path: Path) -> None:
    async with kept(tmp_path) as here:
        driver, ledger = here.driver, here.driver.ledger
        lease = await driver.lease()
        await ledger.accept(lease.group, lease.token, {1: 5})
        taken = await ledger.take("e1")
        await driver.commit(taken)
        trained = {group.group: dict(group.counts) for group in taken.groups}
        here.spool.append(
            [
                commit_entry(
                    "e1", taken, trained, (await ledger.head()).sequence, digest=101, report=b"report1"
                )
            ]
        )
        late = await driver.lease()
        accepted = await ledger.accept(late.group, late.token, {1: 6})
        before = await ledger.status()
        here.spool.append([accept_entry("e1", [accepted], before.sequence)])
        here.command("FLUSHALL")
        with pytest.raises(Unavailable, match="does not hold the run"):
            await here.guarded.status()
        await here.reconciler.reconcile_and_archive()
        after = await here.guarded.status()
        assert (after.version, after.trained, after.issued, after.states) == (
            2,
            2,
            before.issued,
            before.states,
        )
        assert (await ledger.reports(0))[-1] == b"report1"
        assert after.sequence == before.sequence + 1
        await ledger.claim("e2")
        assert await ledger.resume("e2", 2, 101)
        assert [group.token for group in (await ledger.take("e2")).groups] == [late.token]
        await here.archived()
        result = verify(tmp_path / FILE)
        assert (result.violations, result.trained) == ([], 2)


@pytest.mark.parametrize("many", [0, 10**6])
async def test_a_long_rebuild_is_told_at_its_beginning_and_each_at_its_end(
    tmp_path: Path, many: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reconcile_module, "LARGE_REBUILD_EVENTS", many)
    async with kept(tmp_path) as here:
        known, size = await here.archived(), (tmp_path / FILE).stat().st_size
        here.command("FLUSHALL")
        await here.reconciler.reconcile_and_archive()
    *_, rebuilt = told = [line for line in caplog.messages if line.startswith("ledger.rebuil")]
    assert told[:-1] == ([] if many else [f"ledger.rebuilding events={known} archive_bytes={size}"])
    assert re.match(r"ledger\.rebuilt .* seconds=\d+\.\d$", rebuilt)


async def test_a_run_that_was_drained_is_drained_after_a_rebuild_and_its_last_step_may_be_short(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as here:
        ledger = here.driver.ledger
        await ledger.set_bound(groups_per_step=3)
        await here.driver.scored(2)
        await ledger.drain()
        await here.archived()
        here.command("FLUSHALL")
        await here.reconciler.reconcile_and_archive()
        assert (await here.guarded.status()).draining
        await ledger.claim("e2")
        assert await ledger.resume("e2", 1, 100)
        assert len((await ledger.take("e2")).groups) == 2
        await here.archived()
        assert verify(tmp_path / FILE).violations == []


async def test_a_change_that_was_pending_is_asked_for_again(tmp_path: Path) -> None:
    async with kept(tmp_path) as here:
        await here.driver.ledger.set_bound(groups_per_step=3)
        await here.driver.scored(4)  # more than can be on time in steps of one
        pending = await here.driver.ledger.set_bound(groups_per_step=1)
        assert pending is not None
        await here.archived()
        here.command("FLUSHALL")
        await here.reconciler.reconcile_and_archive()
        status = await here.guarded.status()
        assert (status.pending, status.bound.groups_per_step) == (pending, 3)


async def test_a_ledger_without_its_archive_cannot_be_rebuilt_and_says_so(tmp_path: Path) -> None:
    async with kept(tmp_path) as here:
        here.spool.append([accept_entry("e1", [], 1000)])
        (tmp_path / FILE).unlink()
        here.command("FLUSHALL")
        with pytest.raises(SettingsError, match=FILE):
            await LedgerReconciler(here.driver.ledger, here.settings, here.spool).reconcile_and_archive()


async def test_a_hole_between_archive_and_journal_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """As when somebody has put back an older archive."""
    async with kept(tmp_path) as here:
        old = (tmp_path / FILE).read_bytes()
        await here.driver.step(1)
        last = await here.archived()
        here.spool.append(accept_entry("e1", [], seen) for seen in (1, last, last))
        here.spool.forget([], 99, last)
        (tmp_path / FILE).write_bytes(old)
        here.command("FLUSHALL")
        with pytest.raises(
            SettingsError, match=rf"{FILE} ends at event \d+, and the journal begins after event \d+"
        ):
            await LedgerReconciler(here.driver.ledger, here.settings, here.spool).reconcile_and_archive()
        assert here.command("DBSIZE") == 0


async def test_a_damaged_entry_of_the_journal_is_named_by_a_rebuild_and_by_nothing_else(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as here:
        here.spool.append([accept_entry("e1", [], seen) for seen in (1, 2)])
        with closing(sqlite3.connect(here.spool.path)) as connection:
            connection.execute(
                "UPDATE journal SET payload = zeroblob(20), ledger_seq = 1 << 40 WHERE seq = 2"
            )
            connection.commit()
        await here.restart()
        await here.reconciler.reconcile_and_archive()
        await here.archived()
        assert here.rebuilds() == 0
        here.command("FLUSHALL")
        with pytest.raises(SettingsError, match=r"entry 2 of the journal in .*sqlite is damaged"):
            await here.reconciler.reconcile_and_archive()
        assert here.command("DBSIZE") == 0
