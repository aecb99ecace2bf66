"""Serves the page and its data: read-only, with small answers that contain only changes.

| path | answer |
|---|---|
| / | the page |
| /assets/NAME | the page's code and style, without data of the run |
| /status.json | state of the run, its pace, processes, engines, groups |
| /steps.json?after=REVISION | points of the history changed since (see `services.monitor.history`) |
| /events.json?after=NUMBER&topics=run,versions | the newest events and warnings of steps, as sentences |
| /versions.json?after=NUMBER | commits of versions, and versions served by each engine over time |
| /evaluations.json?after=NUMBER | scores of versions on held-out sets |
| /samples.json?step=STEP&group=GROUP | samples of a group; `least` and `most` limit the rewards |
| /settings.json | settings of the run's last start |
| /logs.json?name=NAME | the end of a log |
| /other/steps.json, evaluations.json, settings.json | data of a second run, for comparison |
| /targets.json | addresses of every process's /metrics, for Prometheus (`http_sd_configs`) |
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import xxhash
from aiohttp import hdrs, web

from protocol.network.addresses import bracketed, is_loopback
from services.monitor.answers import json_answer, number_in, reward_in
from services.monitor.history import History, warning_event
from services.observability.printable import printable
from services.run_record.evaluations import ScoredVersions
from services.run_record.samples import SampleBrowser
from services.run_record.sentences import TOPICS
from services.run_record.tail import EventTail
from services.settings.load import public_settings
from services.settings.sections import Settings


class RunNumbers:
    """History, scores and settings of one run."""

    def __init__(self, run_dir: Path, bounds: Callable[[], Sequence[Any]] = tuple) -> None:
        """Store the arguments; `bounds` returns the bounds over time, as `EventTail.bounds`."""
        self._run_dir, self._bounds = run_dir, bounds
        self.history = History(run_dir / "metrics.jsonl")
        self.scores = ScoredVersions(run_dir)

    def routes(self, folder: str = "/") -> dict[str, Callable[[web.Request], Any]]:
        """Return path -> handler; paths begin with `folder`."""
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
        return json_answer(await asyncio.to_thread(public_settings, self._run_dir))


LOGS = "logs"
"""Directory in the run directory with a log of each service."""
MAX_BYTES = 64 << 10
"""Number of bytes read from the end of a log."""
MAX_LOGS = 200
"""Maximum number of logs to choose from."""
MAX_EVENTS = 100
"""Maximum number of sentences in an answer."""
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class Pages:
    """Data of one run, and the handlers that serve it."""

    def __init__(
        self, settings: Settings, state: Callable[[], Mapping[str, Any]], other: Path | None = None
    ) -> None:
        """Store the arguments.

        Args:
            settings: settings of the run.
            state: returns the answer of /status.json.
            other: directory of a second run for comparison.
        """
        run_dir = self._run_dir = settings.run_dir
        self._metrics_host = settings.bus.host
        self.tail = EventTail(run_dir)
        self._numbers = RunNumbers(run_dir, self.tail.bounds)
        self.history = self._numbers.history
        self._other = None if other is None else RunNumbers(other)
        self._names = {"compared": [run_dir.name, other.name]} if other else {}
        self._samples = SampleBrowser(run_dir, self.tail)
        self._state = state
        self._assets = _read_assets()

    async def read_loop(self, interval_s: float) -> None:
        """Read new lines of the run's files until cancelled; a thread may then still finish its part."""
        while True:
            if not await asyncio.to_thread(self.read_piece):
                await asyncio.sleep(interval_s)

    def read_piece(self) -> bool:
        """Read a bounded part of the run's new lines; return whether more can be read at once."""
        more = self.tail.read_more()
        for numbers in filter(None, (self._numbers, self._other)):
            more = numbers.history.read_more() or more
        return more

    def routes(self) -> dict[str, Callable[[web.Request], Any]]:
        """Return path -> handler."""
        return {
            **self._numbers.routes(),
            **(self._other.routes("/other/") if self._other else {}),
            "/": self._serve_page,
            "/assets/{name}": self._serve_asset,
            "/status.json": self._serve_status,
            "/events.json": self._serve_events,
            "/versions.json": self._serve_versions,
            "/samples.json": self._serve_samples,
            "/logs.json": self._serve_logs,
            "/targets.json": self._serve_targets,
        }

    async def _serve_page(self, request: web.Request) -> web.StreamResponse:
        return self._asset(request, "index.html")

    async def _serve_asset(self, request: web.Request) -> web.StreamResponse:
        return self._asset(request, request.match_info["name"])

    async def _serve_status(self, _: web.Request) -> web.Response:
        state = self._state()
        if state:
            pace = self.history.pace(state["run_state"], state["steps"] - state["version"])
            state = {**state, **pace, **self._names}
        return json_answer(state)

    async def _serve_events(self, request: web.Request) -> web.Response:
        topics = request.query.get("topics", ",".join(TOPICS)).split(",")
        answer = self.tail.sentences(number_in(request, "after"), topics, MAX_EVENTS)
        return json_answer(
            {**answer, "warnings": await asyncio.to_thread(self._warnings) if "run" in topics else []}
        )

    def _warnings(self) -> list[dict[str, Any]]:
        """Return the newest warnings of steps, and of held-out sets with fallen scores, as events."""
        fallen = [warning_event(row.time, text) for row, text in self._numbers.scores.fallen()]
        return [*self.history.warnings(), *fallen]

    async def _serve_versions(self, request: web.Request) -> web.Response:
        return json_answer(self.tail.versions(number_in(request, "after")))

    async def _serve_samples(self, request: web.Request) -> web.Response:
        step = number_in(request, "step") if "step" in request.query else None
        group = number_in(request, "group") if "group" in request.query else None
        rewards = reward_in(request, "least", -math.inf), reward_in(request, "most", math.inf)
        return json_answer(await asyncio.to_thread(self._samples.open, step, group, rewards))

    async def _serve_logs(self, request: web.Request) -> web.Response:
        name = request.query.get("name", "")
        return json_answer(await asyncio.to_thread(read_log, self._run_dir / LOGS, name))

    async def _serve_targets(self, _: web.Request) -> web.Response:
        return json_answer([self._target(process) for process in self._state().get("processes", ())])

    def _target(self, process: Mapping[str, Any]) -> dict[str, Any]:
        """Return the Prometheus target of a process; off loopback by the name of its machine."""
        host = self._metrics_host if is_loopback(self._metrics_host) else process["host"]
        return {
            "targets": [f"{bracketed(host)}:{process['http']}"],
            "labels": {"role": process["service"], "process": process["name"]},
        }

    def _asset(self, request: web.Request, name: str) -> web.StreamResponse:
        """Answer with a file of the page. The browser caches the file and revalidates it each time."""
        if name not in self._assets:
            raise web.HTTPNotFound
        body = self._assets[name]
        tag = xxhash.xxh3_64_hexdigest(body)
        headers = {hdrs.CACHE_CONTROL: "no-cache", hdrs.ETAG: f'"{tag}"'}
        if any(known.value == tag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        suffix = Path(name).suffix
        answer = web.Response(
            body=body, headers=headers, content_type=CONTENT_TYPES.get(suffix, "text/plain"), charset="utf-8"
        )
        answer.enable_compression()
        return answer


def _read_assets() -> dict[str, bytes]:
    folder = resources.files("services.monitor").joinpath("assets")
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


def read_log(folder: Path, name: str) -> dict[str, Any]:
    """Return the end of a log in whole lines; an unknown name selects the newest log.

    Returns:
        `names` of all logs, `name` (empty without logs) and `text`.
    """
    logs = {path.name: path for path in sorted(folder.glob("*.log"))[:MAX_LOGS] if path.is_file()}
    if not logs:
        return {"names": [], "name": "", "text": ""}
    if name not in logs:
        name = max(logs, key=lambda known: logs[known].stat().st_mtime_ns)
    with logs[name].open("rb") as file:
        skipped = max(0, file.seek(0, 2) - MAX_BYTES)
        file.seek(skipped)
        data = file.read(MAX_BYTES)
    text = data.partition(b"\n")[2] if skipped else data
    return {"names": list(logs), "name": name, "text": printable(text.decode(errors="replace"))}
