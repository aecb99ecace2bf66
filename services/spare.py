"""Runs `python -m services.spare services.ROLE`: imports the service's modules, and waits to become it.

`tether up` starts it with the variables of a service, and a socket as its standard input. It holds no
resource of the run meanwhile: no connection, no lock, no file but its log, and no device. A line of the
socket makes it the service; the end of the socket, or of `tether up`, ends it.
"""

import importlib
import importlib.util
import json
import os
import runpy
import socket
import sys
from types import ModuleType

from services.runtime import start_time
from services.settings.load import load_settings

READY = b"ready\n"
"""Line that the spare writes to the socket once all imports are done."""


def preload(module: str) -> None:
    """Import a service, and the modules that it declares to need with the environment's settings.

    Args:
        module: started as `python -m MODULE`. A package's module is `MODULE.service`, whose function
            `preload`, if it has one, gets the settings.
    """
    spec = importlib.util.find_spec(module)
    is_package = spec is not None and spec.submodule_search_locations is not None
    service: ModuleType = importlib.import_module(f"{module}.service" if is_package else module)
    if hasattr(service, "preload"):
        service.preload(load_settings())


def wait_and_become(module: str, pipe: socket.socket) -> None:
    """Say that this process is ready, and run `module` once a line has named the service and its log."""
    pipe.sendall(READY)
    with pipe, pipe.makefile("rb") as lines:
        line = lines.readline()
    if not line:
        return
    order = json.loads(line)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.environ["TETHER_INSTANCE"] = order["name"]
    start_time.begin_now()
    sys.argv = [module]
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it runs once more, as `__main__`, which Python otherwise warns about
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Be a spare of the service that the command line names."""
    module = sys.argv[1]
    pipe = socket.socket(fileno=os.dup(0))  # so that no process that is started from here keeps it open
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    environ = dict(os.environ)
    preload(module)
    os.environ.clear()  # the service sets its variables itself, in its own order
    os.environ.update(environ)
    wait_and_become(module, pipe)


if __name__ == "__main__":
    main()
