"""The page in a real Chromium: it shows what metrics.jsonl says, in any window, and asks nobody else."""

import json
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from protocol.messages import StepReport
from services.run_record.evaluations import Evaluation, append_evaluation
from services.run_record.steps import read_steps
from tests.changes import slow_unless_changed
from tests.services.monitor.chromium import chromium
from tests.services.monitor.drawn import (
    LEGEND,
    PAINTED,
    PANEL_OF,
    PLACES,
    PLOT,
    READY,
    ROW_ENDS,
    TEXTS_OF,
    TOO_WIDE,
    fits,
    legend,
    opened,
    tile,
)
from tests.services.monitor.runs import (
    monitored,
    offline_settings,
    put_branched,
    recorded_run,
    step_line,
    write_lines,
)

WINDOWS = pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
)

PRESS = "[...document.querySelectorAll('#{} button')].find((e) => e.textContent === '{}').click()"
"""Presses one of the buttons of a choice."""

pytestmark = [
    pytest.mark.timeout(600),
    slow_unless_changed("services/monitor/", "services/run_record/", "tests/services/monitor/"),
]


@WINDOWS
async def test_page_shows_what_the_files_say(tmp_path: Path, width: int, scheme: str) -> None:
    run_dir = recorded_run(tmp_path)
    steps = read_steps(run_dir / "metrics.jsonl")
    last = steps[-1]
    for version, score in ((0, 0.25), (6, 0.75)):
        append_evaluation(run_dir, Evaluation(version=version, set="held_out", greedy=score))
    async with opened(tmp_path, run_dir, width, scheme) as (page, url):
        for name in (
            "reward_mean",
            "lag_mean",
            "lag_max",
            "loss",
            "entropy",
            "grad_norm",
            "clip_fraction",
            "ratio_mean",
            "logprob_error_max",
            "response_length_mean",
            "generate_s",
            "pause_ms",
            "engine_busy",
        ):
            assert (await legend(page, name))[0] == pytest.approx(last[name], rel=1e-6), name
        assert (await legend(page, "bound"))[0] == 1
        assert not any(line["dropped_groups"] or line["wasted_tokens"] for line in steps)
        assert await page.evaluate(f"({PANEL_OF})('dropped_groups')") is None  # nothing was lost
        await page.until(f"({LEGEND})('eval_held_out_greedy') !== null")
        assert (await legend(page, "eval_held_out_greedy"))[0] == 0.75
        assert await page.evaluate(f"({PANEL_OF})('eval_held_out_greedy')") == "reward"
        assert await tile(page, "reward_mean") == last["reward_mean"]
        await page.until(
            "document.querySelector('[data-tile=reward_mean] span').textContent.startsWith('Last')"
        )
        tokens, seconds, waits = (
            sum(line[name] for line in steps) for name in ("trained_tokens", "step_s", "wait_s")
        )
        lags = sum(int(lag) * n for line in steps for lag, n in line["lag_histogram"].items())
        assert await tile(page, "lag_mean") == pytest.approx(lags / tokens)
        assert await tile(page, "tokens_per_s") == pytest.approx(tokens / seconds, rel=1e-6)
        assert await tile(page, "wait_share") == pytest.approx(waits / seconds, rel=1e-6)
        assert await page.evaluate("document.getElementById('version').textContent") == "version 7 of 1,000"
        await page.until("document.querySelectorAll('.sample').length === 8")
        await page.until("document.querySelectorAll('#events li').length > 3")
        assert await page.evaluate("document.querySelectorAll('#timeline rect').length") > 7
        committed, *engines = await page.evaluate(ROW_ENDS)
        assert max(engines) < committed  # rows of engines that are gone end with their events
        await fits(page, width, scheme)
        assert page.failures == []
        assert {urlsplit(asked).netloc for asked in page.requests} == {urlsplit(url).netloc}


async def test_legend_follows_the_mouse(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    steps = read_steps(run_dir / "metrics.jsonl")
    async with opened(tmp_path, run_dir, 1280, "light") as (page, _):
        box = await page.evaluate(PLOT)
        await page.move_to(box[0] + box[2] * 3 / 6, box[1] + box[3] / 2)
        await page.until("document.querySelector('[data-panel=reward] .at').textContent === 'step 3'")
        for name in ("reward_mean", "loss", "entropy"):
            assert (await legend(page, name))[0] == pytest.approx(steps[3][name], rel=1e-6)


async def test_new_step_appears_and_nothing_moves(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    write_lines(path, (step_line(step) for step in range(200)))
    async with opened(tmp_path, run_dir, 1280, "light", hurry=True) as (page, _):
        await page.until("document.querySelectorAll('.sample').length === 8")
        await page.evaluate("document.querySelector('.chart').dataset.kept = 'yes'")
        before = await page.evaluate(PLACES)
        line = step_line(200, epoch="e1", reward_mean=0.987654)
        write_lines(path, [line])
        await page.until(f"({LEGEND})('reward_mean').dataset.value === '0.987654'")
        assert (await legend(page, "reward_mean"))[1] == "0.9877"
        assert await page.evaluate("document.querySelector('.chart').dataset.kept") == "yes"
        after = await page.evaluate(PLACES)
        assert after == before


async def test_measurements_are_shown_where_they_exist(tmp_path: Path) -> None:
    """Fields of later releases: known patterns have their charts, others get one each; nulls have none."""
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    fields = {
        "kl_mean": 0.01,
        "truncated_share": 0.25,
        "logprob_mismatch": 0.002,
        "moon_phase": 0.5,
        "entropy": None,
    }
    write_lines(
        path, (step_line(s, **fields, **({"eval_reward": 0.6} if s % 5 == 0 else {})) for s in range(20))
    )
    async with opened(tmp_path, run_dir, 1280, "dark") as (page, _):
        found = {
            name: await page.evaluate(f"({PANEL_OF})({json.dumps(name)})")
            for name in (
                "kl_mean",
                "truncated_share",
                "logprob_mismatch",
                "eval_reward",
                "moon_phase",
                "entropy",
            )
        }
        assert found == {
            "kl_mean": "kl",
            "truncated_share": "truncated",
            "logprob_mismatch": "mismatch",
            "eval_reward": "reward",
            "moon_phase": "other-moon_phase",
            "entropy": None,
        }
        assert (await legend(page, "eval_reward"))[0] == 0.6
        assert page.failures == []


async def test_newest_measurements_have_their_charts(tmp_path: Path) -> None:
    """Values on the page are those of metrics.jsonl; a warning of a step is among the events."""
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    panels = {
        "behaviour_kl_k3": "kl", "reference_kl_k3": "kl", "behaviour_clip_fraction": "clip",
        "importance_mean": "ratio", "importance_max": "ratio",
        "importance_ess": "ess", "importance_capped": "ess", "importance_rejected": "ess",
        "mismatch_mean": "mismatch", "mismatch_max": "mismatch", "token_mult_prob_error": "mult_error",
        "lag_in_flight_mean": "lag_split", "lag_in_queue_mean": "lag_split", "dropped_length_mean": "lengths",
        "dropped_for_stale": "dropped", "reward_of_gsm8k": "scores", "score_by_math": "scores",
        "score_s": "generate",
    }  # fmt: skip
    fields = {name: 0.01 * (i + 1) for i, name in enumerate(panels) if name != "dropped_for_stale"}
    lines = [step_line(s, **fields, dropped_by_reason={"stale": s}) for s in range(20)]
    lines[-1] |= {"warnings": ["step 19: engine and trainer disagree"], "engine_busy": None, "lag_max": None}
    write_lines(path, lines)
    async with opened(tmp_path, run_dir, 390, "light") as (page, _):
        for name, panel in panels.items():
            assert await page.evaluate(f"({PANEL_OF})({json.dumps(name)})") == panel
            assert (await legend(page, name))[0] == pytest.approx(fields.get(name, 19), rel=1e-6), name
        await page.until("document.querySelector('#events li.warn')?.textContent.includes('disagree')")
        assert page.failures == []


async def test_branches_and_remarks_are_shown_with_their_sample(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    group = put_branched(run_dir)
    async with opened(tmp_path, run_dir, 390, "light") as (page, _):
        for box, value in (("sample-step", 2), ("sample-group", group)):
            await page.until(f"document.querySelector('#{box} option[value=\"{value}\"]') !== null")
            await page.evaluate(
                f"(() => {{ const box = document.getElementById('{box}'); box.value = '{value}';"
                "box.dispatchEvent(new Event('change')); })()"
            )
        await page.until("document.querySelectorAll('.sample').length === 2")
        await page.evaluate("document.querySelectorAll('.sample details').forEach((e) => { e.open = true; })")
        assert await page.evaluate(TEXTS_OF.format(".branches li")) == [
            "2 tokens · 2 sampled",
            "2 tokens · 1 sampled · behind 1 of branch 0",
        ]
        assert await page.evaluate(TEXTS_OF.format(".branches summary")) == ["2 branches"]
        assert await page.evaluate(TEXTS_OF.format(".remark pre")) == ["Good <b>indeed</b>."]
        assert await page.evaluate(TOO_WIDE) == []
        assert page.failures == []


async def test_theme_can_be_switched_and_is_kept(tmp_path: Path) -> None:
    async with opened(tmp_path, recorded_run(tmp_path), 1280, "light") as (page, url):
        await page.evaluate("document.getElementById('theme').click()")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        await page.open(url, width=1280, scheme="light")
        await page.until(READY)
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"


async def test_page_passes_its_key_on(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    settings = offline_settings(run_dir, "monitor.host=0.0.0.0")
    async with monitored(settings) as url, chromium(tmp_path / "profile") as new_tab:
        page = await new_tab()
        await page.open(url, width=1280, scheme="light")
        await page.until(READY)
        assert page.failures == []


async def test_lost_connection_is_said_and_recovers(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with chromium(tmp_path / "profile") as new_tab:
        page = await new_tab()
        await page.hurry()
        async with monitored(offline_settings(run_dir)) as url:
            await page.open(url, width=390, scheme="light")
            await page.until(READY)
        await page.until("document.getElementById('link').textContent === 'connection lost'")
        async with monitored(offline_settings(run_dir, f"monitor.port={urlsplit(url).port}")):
            await page.until("document.getElementById('link').textContent === ''")


async def test_each_measure_of_a_step_has_a_name_and_an_explained_chart(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    numbers = [
        f.name for f in msgspec.structs.fields(StepReport) if f.type in (float, int, float | None, int | None)
    ]
    fields = {name: 0.5 for name in numbers if name not in ("step", "version", "groups", "time")}
    write_lines(path, (step_line(s, **fields) for s in range(5)))
    async with opened(tmp_path, run_dir, 390, "light") as (page, _):
        named = await page.evaluate(TEXTS_OF.format(".chart h3, .chart .legend span"))
        assert [text for text in named if "_" in text] == []
        assert await page.evaluate("document.querySelectorAll('[data-panel^=other-]').length") == 0
        assert "" not in await page.evaluate(TEXTS_OF.format(".chart .panel-head p"))
        assert await page.evaluate(TOO_WIDE) == []
        assert page.failures == []


async def test_labels_of_an_axis_differ(tmp_path: Path) -> None:
    async with opened(tmp_path, recorded_run(tmp_path), 1280, "light") as (page, _):
        labels = """import('/assets/format.js').then((m) => [
          m.axisLabels([0, 5e-7, 1e-6, 1.5e-6, 2e-6], m.number), m.axisLabels([0.5, 0.505, 0.51], m.percent),
          m.axisLabels([0, 0.25, 0.5], m.number), m.axisLabels([-20000, 0, 25000], m.number),
          m.axisLabels([0, 0.05, 0.1], m.seconds), m.axisLabels([0, 500, 1000], m.milliseconds),
          m.clocks([0, 400]).map((text) => text.slice(-6))])"""
        assert await page.evaluate(labels) == [
            ["0", "0.5e−6", "1.0e−6", "1.5e−6", "2.0e−6"], ["50.0 %", "50.5 %", "51.0 %"],
            ["0", "0.25", "0.50"], ["−20 k", "0", "25 k"],
            ["0", "0.05 s", "0.10 s"], ["0", "0.5 s", "1.0 s"], ["00.000", "00.400"],
        ]  # fmt: skip


async def test_charts_have_a_log_axis_and_smoothing_by_choice(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    write_lines(
        path, (step_line(s, grad_norm=40.0 if s == 30 else 0.01, loss=(-1.0) ** s) for s in range(60))
    )
    ids = "[...document.querySelectorAll('.chart')].map((e) => [e.dataset.panel, e.dataset.scale])"
    async with opened(tmp_path, run_dir, 1280, "light") as (page, _):
        assert {scale for _, scale in await page.evaluate(ids)} == {"linear"}
        await page.evaluate(PRESS.format("scale", "Log"))
        scales = dict(await page.evaluate(ids))
        assert (scales["grad_norm"], scales["loss"], scales["lag"]) == ("log", "linear", "linear")
        mean = "import('/assets/look.js').then((m) => m.movingMean([0, 0, 6, 0, 0]))"
        smoothed = "import('/assets/look.js').then((m) => [m.isSmoothed(60, false), m.isSmoothed(60, true)])"
        assert await page.evaluate(smoothed) == [False, False]
        await page.evaluate(PRESS.format("smoothing", "Smoother"))
        assert await page.evaluate(smoothed) == [True, True]
        assert await page.evaluate(mean) == [0, 2, 2, 2, 0]
        assert await page.evaluate(PAINTED)
        assert page.failures == []


@pytest.mark.parametrize("lays_over", [False, True])
async def test_charts_are_drawn_over_steps_time_or_tokens(tmp_path: Path, lays_over: bool) -> None:
    run_dir = recorded_run(tmp_path)
    path = run_dir / "metrics.jsonl"
    path.unlink()
    write_lines(path, (step_line(s, time=1.8e9 + 90.0 * s, trained_tokens=1000 * (s + 1)) for s in range(7)))
    other = None
    if lays_over:  # a run of the same steps in half the time
        other = recorded_run(tmp_path / "other")
        (other / "metrics.jsonl").unlink()
        lines = (step_line(s, time=1.7e9 + 45.0 * s, trained_tokens=1000 * (s + 1)) for s in range(7))
        write_lines(other / "metrics.jsonl", lines)
    places = "import('/assets/axis.js').then((m) => m.axis().words)"
    async with opened(tmp_path, run_dir, 1280, "light", other=other) as (page, _):
        if lays_over:
            await page.until(f"({LEGEND})('other.reward_mean') !== null")
        for label, words, at_half in (
            ("Time", "time", "step 3 · 4 min 30 s"),
            ("Tokens", "trained tokens", "step 4 · 15,000 tokens"),
            ("Steps", "steps", "step 3"),
        ):
            await page.evaluate(PRESS.format("axis", label))
            assert await page.evaluate(places) == words
            assert await page.evaluate(TEXTS_OF.format("#h-learning")) == [f"Learning, over {words}"]
            box = await page.evaluate(PLOT)
            await page.move_to(box[0] + box[2] / 2, box[1] + box[3] / 2)
            await page.until(f"document.querySelector('[data-panel=reward] .at').textContent === '{at_half}'")
            await page.move_to(box[0] + box[2] / 2, box[1] - 60)
        assert await page.evaluate(PAINTED)
        assert page.failures == []


async def test_settings_logs_and_samples_of_a_reward_are_on_the_page(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "trainer.log").write_text("step.done <b>7</b>\n")
    async with opened(tmp_path, run_dir, 390, "light") as (page, _):
        await page.evaluate("document.querySelectorAll('details.panel').forEach((e) => { e.open = true; })")
        row = "document.querySelector('[data-setting=\"bound.max_staleness\"]')"
        await page.until(f"{row}?.textContent === 'bound.max_staleness1'")
        await page.until("document.getElementById('log-text').textContent === 'step.done <b>7</b>\\n'")
        await page.evaluate(
            "(() => { const box = document.getElementById('setting-filter'); box.value = 'OPTIMIZER';"
            "box.dispatchEvent(new Event('input')); })()"
        )
        assert await page.evaluate(f"{row}.hidden")
        await page.until("document.querySelectorAll('.sample').length === 8")
        await page.evaluate(
            "(() => { const box = document.getElementById('sample-least'); box.value = '98';"
            "box.dispatchEvent(new Event('change')); })()"
        )
        await page.until("document.getElementById('samples').textContent.includes('has a reward from 98')")
        assert await page.evaluate(TOO_WIDE) == []
        assert page.failures == []


async def test_the_bottleneck_is_named(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    (run_dir / "metrics.jsonl").unlink()
    shares = {"engine_busy": 0.1, "reward_busy": 0.97, "train_s": 0.1, "step_s": 2.0}
    write_lines(run_dir / "metrics.jsonl", (step_line(step, **shares) for step in range(6)))
    async with opened(tmp_path, run_dir, 390, "light") as (page, _):
        await page.until("!document.getElementById('bottleneck').hidden")
        shown = await page.evaluate("document.getElementById('bottleneck').textContent")
        assert shown.startswith("bottleneck: rewards (busy 97%; ")
        await fits(page, 390, "light")


LATE_SAMPLES = """
const ask = window.fetch;
let rounds = 0;
window.fetch = async (url, ...options) => {
  const path = String(url);
  if (path.includes("status.json")) rounds++;
  while (path.includes("samples.json") && rounds < 4) await new Promise((done) => setTimeout(done, 10));
  return ask(url, ...options);
};
"""
"""Has samples answered after the page has asked for the status four times."""


async def test_a_link_leads_to_the_samples_of_a_step(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir)) as url, chromium(tmp_path / "profile") as new_tab:
        page = await new_tab()
        await page.hurry()
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=LATE_SAMPLES)
        await page.open(f"{url}#step=2", width=1280, scheme="light")
        await page.until("document.getElementById('sample-step')?.value === '2'")
        await page.evaluate(
            "(() => { const box = document.getElementById('sample-step'); box.value = '4';"
            "box.dispatchEvent(new Event('change')); })()"
        )
        assert await page.evaluate("location.hash") == "#step=4"
