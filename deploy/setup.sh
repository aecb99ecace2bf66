#!/usr/bin/env bash
# Build an environment as locked, without resolving anything again.
# usage: deploy/setup.sh VENV [cpu|cuda|sglang-cuda|sglang-jax]     PYTHON names the interpreter: 3.11 for cpu, else 3.12
set -euo pipefail
venv=${1:?usage: deploy/setup.sh VENV [cpu|cuda|sglang-cuda|sglang-jax]}
kind=${2:-cpu}
here=$(cd "$(dirname "$0")/.." && pwd)
case $kind in
  cpu) version=3.11 ;;  # vLLM's CPU build has wheels for it alone
  cuda | sglang-cuda) version=3.12 ;; # what the GPU suite ran with
  sglang-jax) version=3.12 ;; # the oldest that sglang-jax has wheels for
  *) echo "deploy/setup.sh: $kind is none of cpu, cuda, sglang-cuda, sglang-jax" >&2; exit 2 ;;
esac
python=${PYTHON:-python$version}
command -v "$python" >/dev/null || python=python3
"$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" || {
  echo "tether's $kind environment needs Python $version, because its lock is for it; found $("$python" --version)" >&2; exit 2; }
if [ "$kind" = cpu ]; then
  "$python" -c 'import ctypes.util, sys; sys.exit(ctypes.util.find_library("numa") is None)' ||
    echo "libnuma was not found: vLLM's CPU engine needs it (on Debian: apt-get install libnuma1)" >&2
elif [ "$kind" != sglang-jax ] && ! command -v nvidia-smi >/dev/null; then
  echo "nvidia-smi was not found: a driver for CUDA 13 is needed to run on the GPU" >&2
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# pip would compile modules one after the other
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
"${pip[@]}" --upgrade pip
# Where PyPI's torch is a CUDA build, PIP_EXTRA_INDEX_URL may name PyTorch's CPU index: it saves gigabytes.
[ "$kind" != cpu ] || "${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps -r "$here/deploy/locks/$kind.txt"
# sglang-jax's process finds this project by its PYTHONPATH
[ "$kind" = sglang-jax ] || "${pip[@]}" --no-deps --no-build-isolation --editable "$here"
PYTHONWARNINGS=ignore "$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" || true # some packages have templates that are no Python
