#!/usr/bin/env bash
# Fetch every package of the CPU image as a wheel into deploy/docker/wheels, for builds without network or with a private index.
# Uses this machine's pip configuration. usage: deploy/docker/fetch_wheels.sh [PYTHON 3.11]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
wheel=("$python" -m pip wheel -qq --wheel-dir deploy/docker/wheels --find-links deploy/docker/wheels)
"${wheel[@]}" ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch==2.13.0
"${wheel[@]}" --no-deps -r deploy/locks/cpu.txt
