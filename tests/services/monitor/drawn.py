"""The page of a run, drawn by a real Chromium, and questions to it."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.services.monitor.chromium import Page, chromium
from tests.services.monitor.runs import monitored, offline_settings

READY = "document.body?.dataset.ready === 'yes' && document.querySelectorAll('.chart').length > 5"
LEGEND = """(id) => document.querySelector(`.legend [data-series="${id}"]`)"""
SHOWN = """(id) => {
  const item = document.querySelector(`.legend [data-series="${id}"]`);
  return item && [item.dataset.value, item.lastChild.textContent];
}"""
TOO_WIDE = """[...document.querySelectorAll('main *')]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll'))
  .map((e) => String(e.className))"""
PAINTED = """[...document.querySelectorAll('canvas')].every((c) => c.width > 100 &&
  c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0))"""
UNLABELLED = """[...document.querySelectorAll('button, select, [role=img]')]
  .filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))
  .map((e) => e.outerHTML)"""
TEXTS_OF = """[...document.querySelectorAll('{}')].map((e) => e.textContent)"""
PLOT = """(() => {
  const box = document.querySelector('[data-panel=reward] .u-over').getBoundingClientRect();
  return [box.left, box.top, box.width, box.height];
})()"""
PLACES = (
    """JSON.stringify([...document.querySelectorAll('.panel')].map((e) => [e.offsetTop, e.offsetHeight]))"""
)
PANEL_OF = (
    """(id) => document.querySelector(`[data-series="${id}"]`)?.closest('.chart').dataset.panel ?? null"""
)

ROW_ENDS = """Object.values(Object.groupBy([...document.querySelectorAll('#timeline rect')].map((rect) =>
  [Number(rect.getAttribute('y')), Number(rect.getAttribute('x')) + Number(rect.getAttribute('width'))]),
  ([y]) => y)).map((row) => Math.max(...row.map(([, end]) => end)))"""
"""Right end of each row of the timeline, from the top."""


@asynccontextmanager
async def opened(
    tmp_path: Path,
    run_dir: Path,
    width: int,
    scheme: str,
    *,
    hurry: bool = False,
    other: Path | None = None,
) -> AsyncIterator[tuple[Page, str]]:
    """The page of a run, drawn; `other` is laid over it."""
    async with monitored(offline_settings(run_dir), other) as url, chromium(tmp_path / "profile") as new_tab:
        page = await new_tab()
        if hurry:
            await page.hurry()
        await page.open(url, width=width, scheme=scheme)
        await page.until(READY)
        yield page, url


async def legend(page: Page, series: str) -> tuple[float, str]:
    """The value that a chart's legend shows: the number as it is, and as text."""
    found = await page.evaluate(f"({SHOWN})({json.dumps(series)})")
    assert found, f"no legend of {series}"
    return float(found[0]), found[1]


async def tile(page: Page, name: str) -> float:
    return float(await page.evaluate(f"document.querySelector('[data-tile={name}]').dataset.value"))


async def fits(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than the window, charts are painted, colors are those of the scheme."""
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    assert await page.evaluate(TOO_WIDE) == []
    assert await page.evaluate(PAINTED)
    light = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, light.removeprefix("rgb(").removesuffix(")").split(","))) > 380) == (
        scheme == "light"
    )
    assert await page.evaluate(UNLABELLED) == []
