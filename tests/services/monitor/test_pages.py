"""The data of the page over HTTP: increments, bounds on bytes, answers of a finished run."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from services.bus.config import BusConfig
from services.monitor.pages import Pages
from services.run_record.evaluations import Evaluation, append_evaluation
from services.run_record.steps import read_steps
from services.settings.sections import Settings
from tests.changes import slow_unless_changed
from tests.services.monitor.drawn import LEGEND, PANEL_OF, TEXTS_OF, fits, legend, opened, tile
from tests.services.monitor.runs import monitored, offline_settings, recorded_run, step_line, write_lines

MINUTE_BYTES = 1_000_000


class Reader:
    """Asks as the page does, and counts what comes over the wire."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.received = 0

    async def ask(self, path: str) -> Any:
        async with self._session.get(self._url + path, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.status == 200, await answer.text()
            body = await answer.read()
            headers = sum(len(name) + len(value) + 4 for name, value in answer.raw_headers)
        self.received += len(body) + headers
        return json.loads(gunzipped(body))


def gunzipped(body: bytes) -> bytes:
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


async def complete(reader: Reader, after: int = 0) -> dict[str, Any]:
    """The history once the monitor has read the whole file."""
    while True:
        answer = await reader.ask(f"steps.json?after={after}")
        if answer["complete"]:
            return answer


async def test_finished_run_is_shown_from_its_files(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir)) as url, aiohttp.ClientSession() as session:
        reader = Reader(session, url)
        answer = await complete(reader)
        steps = read_steps(run_dir / "metrics.jsonl")
        assert answer["last"] == steps[-1]
        assert answer["columns"]["reward_mean"] == pytest.approx([line["reward_mean"] for line in steps])
        status = await reader.ask("status.json")
        assert (status["source"], status["run_state"], status["version"]) == ("files", "not running", 7)
        assert (await reader.ask("samples.json?step=3"))["step"] == 3
        assert (await reader.ask("events.json?topics=run"))["events"][0]["kind"] == "create"


async def test_scores_are_sent_once_and_again_when_the_file_was_replaced(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    for version in (0, 4):
        append_evaluation(run_dir, Evaluation(version=version, set="math", greedy=version / 8))
    async with monitored(offline_settings(run_dir)) as url, aiohttp.ClientSession() as session:
        reader = Reader(session, url)
        answer = await reader.ask("evaluations.json?after=0")
        first = {"step": 0, "set": "math", "greedy": 0.0}
        assert answer == {"rows": [first, {**first, "step": 3, "greedy": 0.5}], "last": 2, "reset": False}
        append_evaluation(run_dir, Evaluation(version=6, set="math", sampled=0.25))
        answer = await reader.ask("evaluations.json?after=2")
        assert answer["rows"] == [{"step": 5, "set": "math", "sampled": 0.25}]
        (run_dir / "eval.jsonl").unlink()
        assert await reader.ask("evaluations.json?after=3") == {"rows": [], "last": 0, "reset": True}


async def test_a_fallen_score_is_a_warning_among_the_events(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir)) as url, aiohttp.ClientSession() as session:
        reader = Reader(session, url)
        assert (await reader.ask("events.json?topics=run"))["warnings"] == []
        for version, greedy in ((0, 0.5), (4, 0.25)):
            fields = {"greedy": greedy, "greedy_stderr": 0.03125, "time": 1.5}
            append_evaluation(run_dir, Evaluation(version=version, set="math", **fields))
        (warning,) = (await reader.ask("events.json?topics=run"))["warnings"]
        assert (warning["level"], warning["time_ms"]) == ("warn", 1500)
        assert "math has fallen: greedy 0.250" in warning["text"]


async def test_samples_are_those_of_rewards_that_are_asked_for(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir)) as url, aiohttp.ClientSession() as session:
        reader = Reader(session, url)
        await complete(reader)
        everything = await reader.ask("samples.json?step=3")
        found = sorted({sample["reward"] for sample in everything["samples"]})
        some = await reader.ask(f"samples.json?step=3&group={everything['group']}&least={found[-1]}")
        assert {sample["reward"] for sample in some["samples"]} == {found[-1]}
        none = await reader.ask("samples.json?step=3&least=98&most=99.5")
        assert (none["step"], none["samples"]) == (3, [])
        assert none["reason"] == "no sample of step 3 has a reward from 98 to 99.5"
        async with session.get(f"{url}samples.json?least=high") as answer:
            assert answer.status == 400


async def test_settings_without_addresses_and_ends_of_logs_are_served(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir)) as url, aiohttp.ClientSession() as session:
        reader = Reader(session, url)
        settings = await reader.ask("settings.json")
        assert settings["bound"]["max_staleness"] == 1
        assert not {"ledger", "bus", "monitor", "checksum"} & settings.keys()
        assert await reader.ask("logs.json") == {"names": [], "name": "", "text": ""}
        (run_dir / "logs").mkdir()
        lines = [f"line {number}\n" for number in range(20_000)]
        (run_dir / "logs" / "trainer.log").write_text("".join(lines) + "\x1b[31mred\n")
        for name in ("", "trainer.log", "../settings.json"):
            answer = await reader.ask(f"logs.json?name={name}")
            assert (answer["names"], answer["name"]) == (["trainer.log"], "trainer.log")
            assert answer["text"].endswith("line 19999\n\\x1b[31mred\n")
            assert answer["text"].splitlines()[0] + "\n" in lines


@pytest.mark.parametrize("query", ["after=x", "after=-1", "after=1e3", "after=" + "9" * 17])
async def test_wrong_query_is_refused(tmp_path: Path, query: str) -> None:
    async with monitored(offline_settings(recorded_run(tmp_path))) as url, aiohttp.ClientSession() as session:
        for path in ("steps.json", "events.json", "versions.json", "evaluations.json"):
            async with session.get(f"{url}{path}?{query}") as answer:
                assert answer.status == 400


async def test_asset_is_sent_again_only_if_it_changed(tmp_path: Path) -> None:
    async with monitored(offline_settings(recorded_run(tmp_path))) as url, aiohttp.ClientSession() as session:
        async with session.get(f"{url}assets/main.js") as answer:
            tag = answer.headers["ETag"]
            assert answer.status == 200
        async with session.get(f"{url}assets/main.js", headers={"If-None-Match": tag}) as answer:
            assert (answer.status, await answer.read()) == (304, b"")


@slow_unless_changed("services/monitor/")
async def test_long_run_stays_under_a_megabyte_a_minute(tmp_path: Path) -> None:
    """The first minute of a page on a run of 5,000 steps that makes ten more each second, with more numbers
    than a step has; a longer run has no more points. A sixth of the minute is read, the rest is like it."""
    rounds, read = 30, 5
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    extra = {f"kl_{name}": 0.123456789 * (i + 1) for i, name in enumerate("abcdefgh")}
    write_lines(path, (step_line(step, **extra) for step in range(5_000)))
    async with (
        monitored(offline_settings(run_dir)) as url,
        aiohttp.ClientSession(auto_decompress=False) as session,
    ):
        warming = Reader(session, url)
        await complete(warming)
        reader = Reader(session, url)
        revision = events = versions = 0
        first = 0
        for round_ in range(read):
            answer = await reader.ask(f"steps.json?after={revision}")
            revision = answer["revision"]
            await reader.ask("status.json")
            if round_ % 3 == 0:
                events = (await reader.ask(f"events.json?after={events}&topics=run,losses"))["last"]
                versions = (await reader.ask(f"versions.json?after={versions}"))["last"]
            first = first or reader.received
            made = 5_000 + 20 * round_
            write_lines(path, (step_line(step, **extra) for step in range(made, made + 20)))
            while (await complete(warming, 1 << 50))["last"]["step"] < made + 19:  # noqa: ASYNC110 (a file)
                await asyncio.sleep(0.05)
        assert len(answer["columns"]["start"]) < 100
        assert first + (reader.received - first) / (read - 1) * (rounds - 1) < MINUTE_BYTES


async def test_targets_are_the_processes_that_are_registered() -> None:
    process = {"service": "trainer", "name": "trainer", "host": "gpu7", "http": 4711}
    hosts = {"127.0.0.1": "127.0.0.1:4711", "::1": "[::1]:4711", "0.0.0.0": "gpu7:4711"}
    for host, target in hosts.items():
        settings = Settings(bus=BusConfig(host=host, curve_dir="keys"))
        pages = Pages(settings, lambda: {"processes": [process]})
        answer = await pages.routes()["/targets.json"](None)  # type: ignore[arg-type]
        assert json.loads(answer.body) == [
            {"targets": [target], "labels": {"role": "trainer", "process": "trainer"}}
        ]


pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("width", [1280, 390])
async def test_a_second_run_is_laid_over_the_first(tmp_path: Path, width: int) -> None:
    first, second = recorded_run(tmp_path / "a"), recorded_run(tmp_path / "b")
    first, second = first.rename(tmp_path / "small_steps"), second.rename(tmp_path / "large_steps")
    (second / "metrics.jsonl").unlink()
    write_lines(second / "metrics.jsonl", (step_line(step, moon_phase=0.5) for step in range(12)))
    append_evaluation(second, Evaluation(version=9, set="held_out", greedy=0.75))
    append_evaluation(first, Evaluation(version=6, set="held_out", greedy=0.5))
    settings = msgspec.json.decode((second / "settings.json").read_bytes())
    settings["optimizer"]["lr"] = 0.125
    (second / "settings.json").write_bytes(msgspec.json.encode(settings))
    last = read_steps(second / "metrics.jsonl")[-1]
    async with opened(tmp_path, first, width, "dark", other=second) as (page, _):
        await page.until(f"({LEGEND})('other.eval_held_out_greedy') !== null")
        for name in ("reward_mean", "loss", "lag_mean"):
            assert (await legend(page, f"other.{name}"))[0] == pytest.approx(last[name], rel=1e-6)
            assert await page.evaluate(f"({PANEL_OF})('other.{name}') === ({PANEL_OF})('{name}')")
        assert (await legend(page, "other.eval_held_out_greedy"))[0] == 0.75
        assert (await legend(page, "eval_held_out_greedy"))[0] == 0.5
        assert await page.evaluate(TEXTS_OF.format("#compared b")) == ["small_steps", "large_steps"]
        assert await tile(page, "reward_mean") == read_steps(first / "metrics.jsonl")[-1]["reward_mean"]
        await page.evaluate("document.getElementById('settings').open = true")
        await page.until("document.querySelector('#setting-rows tr')?.textContent.includes('/')")
        assert (await page.evaluate(TEXTS_OF.format("#setting-rows tr:first-child > *")))[0] == "optimizer.lr"
        await fits(page, width, "dark")
        assert page.failures == []
