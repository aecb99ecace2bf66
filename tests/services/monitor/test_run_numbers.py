"""Tests the numbers of a second run, which is laid over the first: over HTTP and drawn."""

from pathlib import Path

import msgspec
import pytest

from services.run_record.evaluations import Evaluation, append_evaluation
from services.run_record.steps import read_steps
from tests.services.monitor.drawn import LEGEND, PANEL_OF, TEXTS_OF, fits, legend, opened, tile
from tests.services.monitor.runs import recorded_run, step_line, write_lines

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
