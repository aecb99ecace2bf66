#!/usr/bin/env bash
# Build SGLang's environment for tests on a CPU: only what the main environment lacks, which it sees through one path file.
# It is a second one because vLLM's CPU build must not find triton or torchvision.
# usage: deploy/setup_sglang.sh VENV SGLANG_VENV
set -euo pipefail
base=${1:?usage: deploy/setup_sglang.sh VENV SGLANG_VENV}
venv=${2:?usage: deploy/setup_sglang.sh VENV SGLANG_VENV}
here=$(cd "$(dirname "$0")/.." && pwd)
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base/bin/python" -m venv --without-pip --clear "$venv"
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
  -r "$here/deploy/locks/sglang-cpu.txt"
"$base/bin/python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/tether-base.pth"
