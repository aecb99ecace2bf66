"""A real Chromium without a window, driven through the DevTools protocol."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
HURRY = """const wait = window.setTimeout;
window.setTimeout = (done, ms, ...rest) => wait(done, ms / 20, ...rest);"""
DEADLINE_S = 120.0
POLL_S = 0.05


class Page:
    """One tab: its requests, what it wrote to the console, and what its scripts say."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.failures: list[str] = []
        """Errors and warnings of the console, exceptions, and refused or failed requests."""

    async def receive_loop(self) -> None:
        """Take answers and events until the tab is closed."""
        async for message in self._socket:
            value = json.loads(message.data)
            if "id" in value:
                future = self._answers.pop(value["id"])
                if not future.cancelled():
                    future.set_result(value)
            else:
                self._note(value["method"], value["params"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await self._answers[number]
        assert "error" not in answer, (method, answer)
        return answer["result"]

    async def open(self, url: str, *, width: int, scheme: str, height: int = 900) -> None:
        """Load a page in a window of that width (CSS pixels), light or dark."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )
        await self.call("Page.navigate", url=url)

    async def hurry(self) -> None:
        """Shorten all pauses of the page that is opened next: the run of a test is over, and the page of such
        a run asks seldom."""
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=HURRY)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page; its value."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(POLL_S)
        return value

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a picture of the page (`whole`) or of the window."""
        picture = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    async def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window, in CSS pixels."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.failures.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.failures.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.failures.append(json.dumps(params["entry"])[:500])


@asynccontextmanager
async def chromium(directory: Path) -> AsyncIterator[Callable[[], Any]]:
    """A browser with its profile in `directory`; yields a function that opens a tab.

    Skips where there is no browser, but not in CI.
    """
    if PROGRAM is None:
        assert not os.environ.get("CI"), "CI has to install chromium"
        pytest.skip("chromium is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        *FLAGS,
        f"--user-data-dir={directory}",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(directory / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:

            async def new_tab() -> Page:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    url = (await answer.json())["webSocketDebuggerUrl"]
                page = Page(await session.ws_connect(url, max_msg_size=0))
                tabs.append(tasks.create_task(page.receive_loop(), name="tab"))
                return page

            tabs: list[asyncio.Task[None]] = []
            try:
                yield new_tab
            finally:
                for tab in tabs:
                    tab.cancel()
    finally:
        os.killpg(process.pid, 9)
        await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            assert process.returncode is None, "chromium has ended"
            if file.is_file() and (lines := file.read_text().splitlines()):
                return int(lines[0])
            await asyncio.sleep(POLL_S)
