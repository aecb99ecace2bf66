"""A whole run has nothing that others may read: modes, secrets in files, variables and memory of services."""

import ctypes
import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from services.ledger.embedded_server import read_endpoint
from services.run_record.page_key import KEY_FILE
from tests.changes import LAUNCHER, slow_unless_changed
from tests.integration.command import tether_here, tether_up, until
from tests.integration.loop import ROOT

pytestmark = [
    pytest.mark.xdist_group("command"),
    pytest.mark.timeout(900),
    slow_unless_changed(
        *LAUNCHER, "protocol/host/", "services/settings/", "services/bus/", "tests/security/"
    ),
]

RUN = "privaterun"
WANDB, SEARCH = "wandb-6f1d2c", "search-90ab7e"
READ = """
import os, sys
for pid in sys.argv[1:]:
    for name in ("environ", "mem"):
        try:
            os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
            print(pid, name)
        except PermissionError:
            pass
"""
"""Prints what it can read of processes."""
PR_CAPBSET_DROP = 24
READING = (19, 21, 38)
"""Capabilities of root to read other processes: CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON."""


@dataclass
class Found:
    """What was seen of a run."""

    run_dir: Path
    code: int = -1
    open_files: list[str] = field(default_factory=list)
    """Files and directories with rights for others, while the run was on and after it."""
    files: set[str] = field(default_factory=set)
    """Names of all files."""
    readable: str = ""
    """What a program of the same user can read of services."""
    variables: dict[str, bytes] = field(default_factory=dict)
    """Service -> its environment, as root reads it; another user does not."""
    registry: str = ""
    page: str = ""
    key: str = ""


def open_to_others(*places: Path) -> list[str]:
    every = [path for place in places for path in (place, *place.rglob("*"))]
    modes = [(path, path.lstat().st_mode) for path in every if path.exists()]
    return [f"{path} {mode & 0o777:o}" for path, mode in modes if mode & 0o077 and not stat.S_ISLNK(mode)]


def without_privileges() -> None:
    """Before an exec: have root read other processes as another user does, its own if they are not closed."""
    for capability in READING:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability)  # another user has none: refused, no matter


def read_by_a_program(pids: list[int]) -> str:
    """What a program of the same user can read of these processes."""
    done = subprocess.run(
        [sys.executable, "-c", READ, *map(str, pids)],
        preexec_fn=without_privileges, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    run_dir = tmp_path_factory.mktemp("private") / "run"
    found = Found(run_dir)
    options = (
        str(ROOT / "deploy/configs/stragglers.toml"), "--run-dir", str(run_dir), "--steps", "100000",
        "--set", f"run.name={RUN}", "--set", "monitor.host=0.0.0.0", "--set", "trainer.step_s=0.2",
    )  # fmt: skip
    secrets = {"WANDB_API_KEY": WANDB, "SEARCH_API_KEY": SEARCH}
    with tether_up(*options, output=run_dir.parent / "log", before_exec=without_privileges, **secrets) as up:
        status = until(lambda: complete(run_dir), seconds=240, what="a page and a step")
        services = {item["name"]: item["pid"] for item in status["processes"]}
        found.page = next(item["page"] for item in status["processes"] if item["page"])
        found.readable = read_by_a_program([*services.values(), up.pid])
        if os.getuid() == 0:
            services |= {"ledger": json.loads((run_dir / "ledger/endpoint.json").read_text())["pid"]}
            found.variables = {
                name: Path(f"/proc/{pid}/environ").read_bytes() for name, pid in services.items()
            }
        places = (run_dir, *Path("/dev/shm").glob(f"tether-{RUN}-*"))
        assert len(places) == 2
        found.open_files = open_to_others(*places)
        up.send_signal(signal.SIGTERM)
        found.code = up.wait(240)
    found.key = (run_dir / KEY_FILE).read_text().strip()
    found.open_files += open_to_others(run_dir)
    found.files = {path.name for path in run_dir.rglob("*")}
    return found


def complete(run_dir: Path) -> dict[str, list[dict[str, str]]] | None:
    """The status of the run once it has made a step and serves its page."""
    if not (run_dir / "settings.json").exists():
        return None
    result = tether_here("status", run_dir, "--json")
    status = json.loads(result.stdout) if result.returncode == 0 else {}
    pages = [item for item in status.get("processes", ()) if item["page"]]
    return status if pages and status["version"] > 0 and len(status["processes"]) >= 5 else None


def test_nothing_of_a_run_is_open_to_other_users(found: Found) -> None:
    assert found.code == 0
    assert {"audit.jsonl", "spool.sqlite", "settings.json", "trainer.log", "endpoint.json"} <= found.files
    assert found.open_files == []


def test_the_key_of_the_page_is_in_its_own_file_only(found: Found) -> None:
    assert found.page.endswith(f"?key={found.key}")
    files = [path for path in found.run_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if found.key.encode() in path.read_bytes()] == [KEY_FILE]


def test_the_password_is_in_files_of_the_ledger_only(found: Found) -> None:
    url = read_endpoint(found.run_dir / "ledger")
    assert url is not None
    password = url.split("@")[0].rpartition(":")[2].encode()
    files = [path for path in found.run_dir.rglob("*") if path.is_file()]
    named = {path.name for path in files if password in path.read_bytes()}
    assert named == {"endpoint.json", "server.conf"}


def test_programs_of_the_same_user_read_no_variable_and_no_memory_of_services(found: Found) -> None:
    assert found.readable == ""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], preexec_fn=without_privileges, stdin=subprocess.PIPE
    ) as other:
        assert read_by_a_program([other.pid]).split() == [str(other.pid), "environ", str(other.pid), "mem"]
        other.communicate(b"\n")


def test_services_have_the_credentials_that_they_need(found: Found) -> None:
    assert not [name for name, environ in found.variables.items() if WANDB.encode() in environ]
    having = {name.split(".")[0] for name, environ in found.variables.items() if SEARCH.encode() in environ}
    assert having == ({"rollout", "reward"} if found.variables else set())
