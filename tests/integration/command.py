"""Runs of the real `tether` command, as a user starts it."""

import asyncio
import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from services import cli
from services.ledger.embedded_server import read_endpoint
from services.ledger.redis.ledger import RedisLedger
from tests.integration.loop import ROOT
from tests.warm.popen import VARIABLES, WarmPopen, forking

T = TypeVar("T")
POLL_S = 0.02
LONGEST_POLL_S = 0.25
"""Shortest and longest pause between two polls; in between, four times what a poll took."""


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user who has set nothing of ours."""
    kept = {name: value for name, value in VARIABLES.items() if not name.startswith("TETHER_")}
    return {**kept, "HF_HUB_OFFLINE": "1", **extra}


def tether(*arguments: str, seconds: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    words = [sys.executable, "-m", "services.cli", *arguments]
    with WarmPopen(
        words,
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def ended_run(config: str, run_dir: Path, settings: Iterable[str]) -> subprocess.CompletedProcess[str]:
    """Run `tether up` to its end with settings, SECTION.NAME=VALUE."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    return tether("up", config, "--run-dir", str(run_dir), *overrides)


def tether_here(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process, which has imported what it needs: for commands that start no
    service, or are refused."""
    words = [str(argument) for argument in arguments]
    arguments_before, variables_before = sys.argv, dict(os.environ)
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["tether", *words]
    os.environ.clear()
    os.environ.update(environment(**variables))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), forking():
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = arguments_before
        os.environ.clear()
        os.environ.update(variables_before)
        logging.captureWarnings(False)
        root.setLevel(level)
        root.handlers[:] = handlers
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextmanager
def tether_up(
    *arguments: str, output: Path, before_exec: Callable[[], None] | None = None, **variables: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """`tether up` in the background; ended by its pid if the block fails."""
    with output.open("wb") as out:
        process = WarmPopen(
            [sys.executable, "-m", "services.cli", "up", *arguments],
            cwd=ROOT,
            env=environment(**variables),
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=before_exec,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def until(ready: Callable[[], T | None], *, seconds: float, what: str) -> T:
    """Ask again and again until there is an answer.

    Raises:
        TimeoutError: naming `what` was waited for.
    """
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        answer = ready()
        if answer is not None and answer is not False:
            return answer
        time.sleep(min(LONGEST_POLL_S, max(POLL_S, 4 * (time.monotonic() - began))))
    raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")


def pids(run_dir: Path, run: str = "demo") -> dict[str, int]:
    """Live services of a run by name, as its ledger says: at once, for whoever kills one before
    the run is over."""

    async def look() -> dict[str, int]:
        async with ledger_of(run_dir, run) as ledger:
            return {peer.info["name"]: peer.info["pid"] for peer in await ledger.peers()}

    return asyncio.run(look())


@asynccontextmanager
async def ledger_of(run_dir: Path, run: str = "demo") -> AsyncIterator[RedisLedger]:
    """The ledger of a run, beside the services."""
    url = read_endpoint(run_dir / "ledger")
    assert url is not None
    ledger = await RedisLedger.connect(url, run)
    try:
        yield ledger
    finally:
        await ledger.close()


def processes_of(run_dir: Path) -> list[int]:
    """Pids of live processes whose command line or environment names the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                zombie = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if str(run_dir).encode() in text and not zombie:
                found.append(int(entry.name))
    return found


def service_of(pid: int) -> str:
    """Name of the service that a child of `tether up` is now, by its log; empty for anything else, such as a
    spare."""
    try:
        log = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:  # it has ended
        return ""
    is_service = log.parent.name == "logs" and not log.name.startswith("spare.")
    return log.stem if is_service else ""


def audit(run_dir: Path) -> dict[str, Any]:
    """`tether verify D --json`, with its exit code."""
    result = tether_here("verify", run_dir, "--json")
    return {**json.loads(result.stdout), "code": result.returncode}
