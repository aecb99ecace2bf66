"""A program for the tests of `tests/warm`: says as JSON what it finds itself to be, and exits with 3."""

import json
import os
import signal
import sys
from pathlib import Path

from services.runtime.start_time import seconds_since_start

if __name__ == "__main__":
    me = Path("/proc/self")
    begun = [name for name in me.joinpath("environ").read_bytes().split(b"\0") if name.startswith(b"TETHER_")]
    facts = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "output": os.readlink("/proc/self/fd/1"),
        "is_fork": "torch" in sys.modules,
        "arguments": sys.argv[1:],
        "command": [word for word in me.joinpath("cmdline").read_text().split("\0") if word],
        "variables": dict(os.environ),
        "begun": sorted(map(os.fsdecode, begun)),
        "directory": os.getcwd(),
        "leads": os.getsid(0) == os.getpid(),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "threads": len(os.listdir("/proc/self/task")),
        "name": __name__,
        "is_new": seconds_since_start() < 60,
        "ignored": [number.name for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN],
        "imports": sys.path[0],
        "umask": os.umask(0),
    }
    print(json.dumps(facts), flush=True)
    if sys.argv[1] == "wait":
        signal.pause()
    print("to the errors", file=sys.stderr)
    sys.exit(3)
