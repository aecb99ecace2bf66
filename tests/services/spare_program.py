"""A service for the tests of `services/spare.py`: it says what it has become."""

import json
import os
import random
import sys

import numpy.random

from services.runtime.start_time import seconds_since_start
from services.settings.sections import Settings

MARK = "SPARE_TEST_PRELOADED"


def preload(settings: Settings) -> None:
    """Note for which run; the variable is one that a library might set as it is imported."""
    os.environ[MARK] = settings.run.name
    print(f"preloaded for {settings.run.name}", flush=True)


if __name__ == "__main__":
    facts = {
        "instance": os.environ["TETHER_INSTANCE"],
        "left": os.environ.get(MARK),
        "arguments": sys.argv[1:],
        "drawn": [random.random(), numpy.random.random()],
        "stdin": os.read(0, 1).decode(),
        "age_s": seconds_since_start(),
        "sockets": sum(
            os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
            for number in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{number}")
        ),
    }
    print(json.dumps(facts), flush=True)
    sys.exit(7)
