#!/usr/bin/env bash
# Build the CPU environment: torch first and exactly, then everything else as locked, without resolving anything again.
# usage: deploy/setup.sh VENV
set -euo pipefail
venv=${1:?usage: deploy/setup.sh VENV}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || python=python3
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
  echo "tether's CPU environment needs Python 3.11 (vLLM's CPU build has wheels for it alone); found $("$python" --version)" >&2; exit 2; }
"$python" -c 'import ctypes.util, sys; sys.exit(ctypes.util.find_library("numa") is None)' ||
  echo "libnuma was not found: vLLM's CPU engine needs it (on Debian: apt-get install libnuma1)" >&2
# Where PyPI's torch is a CUDA build, PIP_EXTRA_INDEX_URL may name PyTorch's CPU index: it saves gigabytes.
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --upgrade pip
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps -r "$here/deploy/locks/cpu.txt"
"${pip[@]}" --no-deps --no-build-isolation --editable "$here"
