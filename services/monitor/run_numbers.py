"""Serves the numbers of a run over its steps, and its settings: of a second run, too."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from services.monitor.answers import json_answer, number_in
from services.monitor.history import History
from services.run_record.evaluations import ScoredVersions
from services.settings.load import shown_settings


def no_bounds() -> Sequence[Any]:
    """Return no bounds: the event log of the run is not read."""
    return ()


class RunNumbers:
    """History, scores and settings of one run."""

    def __init__(self, run_dir: Path, bounds: Callable[[], Sequence[Any]] = no_bounds) -> None:
        """Store the arguments; `bounds` returns the bounds that were in force, as `EventTail.bounds`."""
        self._run_dir, self._bounds = run_dir, bounds
        self.history = History(run_dir / "metrics.jsonl")
        self.scores = ScoredVersions(run_dir)

    def routes(self, folder: str = "/") -> dict[str, Callable[[web.Request], Any]]:
        """Return handlers by path, which begins with `folder`."""
        return {
            f"{folder}steps.json": self._serve_steps,
            f"{folder}evaluations.json": self._serve_evaluations,
            f"{folder}settings.json": self._serve_settings,
        }

    async def _serve_steps(self, request: web.Request) -> web.Response:
        answer = await asyncio.to_thread(self.history.since, number_in(request, "after"))
        return json_answer({**answer, "bounds": self._bounds()})

    async def _serve_evaluations(self, request: web.Request) -> web.Response:
        return json_answer(await asyncio.to_thread(self.scores.since, number_in(request, "after")))

    async def _serve_settings(self, _: web.Request) -> web.Response:
        return json_answer(await asyncio.to_thread(shown_settings, self._run_dir))
