"""A ledger behind TLS and an ACL: it works, strangers are refused, and the password is shown nowhere."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from protocol.errors import SettingsError, TetherError, Unavailable
from services.ledger.redis.ledger import RedisLedger
from services.ledger.redis.url import complete_url, redacted
from tests.changes import slow_unless_changed
from tests.integration.command import tether, tether_here
from tests.integration.loop import ROOT
from tests.security.tls_server import CORE, PASSWORD, USER, TlsServer, tls_server

pytestmark = pytest.mark.xdist_group("tls")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    with tls_server(tmp_path_factory.mktemp("tls")) as server:
        yield server


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@dataclass
class Lookout:
    """Reads the command lines of all processes repeatedly, and the environments of those of the run."""

    run_dir: Path
    lines: set[bytes] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Services whose environment holds the ledger's URL."""
    stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.stop.is_set():
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) != os.getpid():
                    self._look(entry)
            time.sleep(0.1)

    def _look(self, entry: Path) -> None:
        try:
            line = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            return
        self.lines.add(line)
        if any(variable.startswith(b"TETHER_REDIS_URL=rediss:") for variable in variables):
            self.told.add(line.replace(b"\0", b" ").decode(errors="replace").strip())


@slow_unless_changed(
    "services/ledger/redis/connection.py", "services/ledger/embedded_server.py", "services/launcher/",
    "services/settings/", "tests/security/",
)  # fmt: skip
def test_a_run_over_tls_shows_its_password_nowhere(server: TlsServer, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    lookout = Lookout(run_dir)
    watcher = threading.Thread(target=lookout.watch)
    watcher.start()
    try:
        ended = tether(
            "up", str(ROOT / "deploy/configs/stragglers.toml"), "--steps", "3", "--run-dir", str(run_dir),
            "--set", f'ledger.ca_file="{server.ca}"', "--set", "monitor.enabled=false",
            seconds=600, TETHER_REDIS_URL=server.url, TETHER_LOG_LEVEL="DEBUG",
        )  # fmt: skip
    finally:
        lookout.stop.set()
        watcher.join()
    assert ended.returncode == 0, ended.stderr[-2000:]
    # in processes of their own: asyncio complains of TLS connections that the end of its loop has cut
    status = tether("status", str(run_dir), TETHER_REDIS_URL=server.url)
    assert "done" in status.stdout, status.stderr
    said = ended.stdout + ended.stderr + status.stdout + status.stderr + tether_here("verify", run_dir).stdout
    other = server.url.replace(CORE, f"wrong-{CORE}")
    said += tether("status", str(run_dir), TETHER_REDIS_URL=other).stderr
    said += tether_here(
        "up", ROOT / "deploy/configs/stragglers.toml", "--set", f"ledger.url={server.url}"
    ).stderr
    assert "refuses this user" in said
    assert "every user can read a command line" in said
    assert CORE not in said
    assert any(b"services.trainer" in line for line in lookout.lines)
    assert not [line for line in lookout.lines if CORE.encode() in line and b"--set" not in line]
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert {"settings.json", "audit.jsonl", "trainer.log"} <= {path.name for path in files}
    assert [path.name for path in files if CORE.encode() in path.read_bytes()] == []
    assert {line.rpartition(" ")[2] for line in lookout.told} >= {
        "services.trainer",
        "services.ingest",
        "services.rollout",
    }
    assert not [
        line for line in lookout.told if "reward.workers.worker" in line or "reward/sandbox/child.py" in line
    ]


@pytest.mark.slow
def test_the_password_may_come_from_a_file(server: TlsServer, tmp_path: Path) -> None:
    path = private(tmp_path / "password", PASSWORD + "\n")
    options = (f'ledger.ca_file="{server.ca}"', f'ledger.password_file="{path}"')
    run_dir = tmp_path / "run"
    ended = tether(
        "up", str(ROOT / "deploy/configs/stragglers.toml"), "--steps", "1", "--run-dir", str(run_dir),
        "--set", "run.name=filed",
        *(word for option in options for word in ("--set", option)), seconds=600,
        TETHER_REDIS_URL=server.bare_url,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert [
        file.name for file in run_dir.rglob("*") if file.is_file() and CORE.encode() in file.read_bytes()
    ] == []


async def test_strangers_are_refused_without_showing_the_password(server: TlsServer) -> None:
    good = complete_url(server.url, ca_file=str(server.ca))
    ledger = await RedisLedger.connect(good, "run")
    with pytest.raises(TetherError):
        await ledger.status()  # the server answers: there is no such run
    await ledger.close()
    wrong = {
        complete_url(server.url.replace(CORE, f"wrong-{CORE}"), ca_file=str(server.ca)): SettingsError,
        complete_url(server.url.replace(USER, "default"), ca_file=str(server.ca)): SettingsError,
        complete_url(server.url, ca_file=str(server.other_ca)): Unavailable,
        server.url: Unavailable,
        server.url.replace("rediss:", "redis:"): Unavailable,
    }
    for url, kind in wrong.items():
        with pytest.raises(kind) as caught:
            await RedisLedger.connect(url, "run", timeout_s=30 if kind is SettingsError else 2, retry_s=0)
        assert CORE not in str(caught.value)
        assert f"***@127.0.0.1:{server.port}/0" in str(caught.value)


def test_files_of_the_ledger_are_checked(server: TlsServer, tmp_path: Path) -> None:
    readable = private(tmp_path / "readable", PASSWORD, 0o640)
    for arguments, what in (
        ((server.bare_url, readable, ""), "can be read by other users .mode 640.; chmod 600"),
        ((server.bare_url, private(tmp_path / "empty", "\n"), ""), "is empty"),
        ((server.bare_url, str(tmp_path / "absent"), ""), "absent cannot be read"),
        ((server.url, private(tmp_path / "fine", PASSWORD), ""), "holds a password, too"),
        ((server.url, "", str(tmp_path / "absent")), "ca_file.*absent is not a file"),
        (("redis://h", "", str(server.ca)), "not a rediss:// URL"),
    ):
        with pytest.raises(SettingsError, match=what) as caught:
            complete_url(*arguments)
        assert CORE not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:hunter2@host:1/0", "redis://***@host:1/0"),
        ("redis://hunter2@host", "redis://***@host"),
        ("rediss://a:hun/ter2@host:1", "***"),
        ("redis://:hunter2", "***"),
        ("redis://host:1/0?password=hunter2", "redis://host:1/0"),
        ("hunter2@host", "***"),
        ("redis://[::1]:1/hunter2", "redis://[::1]:1"),
        ("unix://u:hunter2@/run/redis.sock?db=1", "unix://***@"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown
