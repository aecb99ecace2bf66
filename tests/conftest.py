"""Settings of all tests."""

import os

from hypothesis import settings

# Two test processes share two cores: OpenMP's threads would spin against each other, a hundred times slower. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("tether", deadline=None)  # a slow machine is no failure
settings.load_profile("tether")
