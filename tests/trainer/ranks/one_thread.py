"""Run as a rank: rank 0 prints how many threads its environment asks for."""

import json
import os

if os.environ["RANK"] == "0":
    print(json.dumps({"threads": os.environ["OMP_NUM_THREADS"]}))
