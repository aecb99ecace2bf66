"""Runs a service from its command line: settings, signals, the service's loop, exit code.

A service is `async def serve(process: Process) -> None`. The function runs until `process.stop` is set, then
drains and returns. SIGTERM and SIGINT set `stop`; a second signal cancels. The end of the service or of its
heartbeat ends the process.
"""

import asyncio
import json
import os
import resource
import signal
import sys

import uvloop

from protocol.errors import TetherError, Unavailable, innermost
from protocol.topics import Role
from services.runtime.errors import EXIT_FAILED, EXIT_UNAVAILABLE, configure_logging, describe_error
from services.runtime.event_loop import (
    STOP_SIGNALS,
    exiting_without_threads,
    run_loop,
    running_loops,
    stop_at_signals,
)
from services.runtime.process import Serve, log, open_process
from services.settings.load import load_settings
from services.settings.sections import Settings

DESCRIPTORS = 65_536
"""Number of open file descriptors that a service requests."""


async def run_process(role: Role, settings: Settings, name: str, serve: Serve) -> None:
    """Run a service until it is stopped or fails.

    After a clean end SIGTERM and SIGINT are ignored. Python takes time to exit if torch is loaded, and a
    signal would change exit code 0 to a death by signal.

    Raises:
        BaseExceptionGroup: the error of the service or its heartbeat.
    """
    loop = asyncio.get_running_loop()
    async with open_process(role, settings, name) as process:
        stop_at_signals(process.stop)
        async with running_loops({"heartbeat": process.heartbeat_loop()}):
            await serve(process)
    for signum in STOP_SIGNALS:
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_IGN)


def raise_fd_limit() -> None:
    """Raise the soft limit of open file descriptors to the hard limit, at most `DESCRIPTORS`.

    Each connection uses a file descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@exiting_without_threads()
def service_main(role: Role, serve: Serve) -> None:
    """Run `python -m services.ROLE`: load the settings, serve, and exit.

    Exit codes are as in `services.runtime.errors`.
    """
    name = os.environ.get("TETHER_INSTANCE", role)
    try:
        configure_logging(name)
        raise_fd_limit()
        settings = load_settings()
        os.environ.pop("TETHER_REDIS_URL", None)  # it may contain a password: hidden from child processes
        run_loop(run_process(role, settings, name, serve), uvloop.new_event_loop)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(EXIT_FAILED)
    except (Exception, BaseExceptionGroup) as error:
        line, code = describe_error(error)
        if isinstance(innermost(error), Unavailable):
            code = EXIT_UNAVAILABLE  # `describe_error` returns the code for wrong settings
        if not isinstance(innermost(error), TetherError):
            log.exception("process.failed")
        log.error("process.failed %s", json.dumps(line))
        print(f"tether {role}: {line}", file=sys.stderr)
        sys.exit(code)
