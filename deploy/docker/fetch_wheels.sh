#!/usr/bin/env bash
# Fetch every package of the CPU image as a wheel into deploy/docker/wheels, for builds without network or with a private index.
# Uses this machine's pip configuration. usage: deploy/docker/fetch_wheels.sh [PYTHON 3.11]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-.venv/bin/python}
wheel=("$python" -m pip wheel -qq --wheel-dir deploy/docker/wheels --find-links deploy/docker/wheels)
"${wheel[@]}" torch==2.13.0+cpu 2>/dev/null || "${wheel[@]}" --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
"${wheel[@]}" --no-deps -r deploy/locks/cpu.txt
