#!/usr/bin/env bash
# Build an environment on top of another: only what LOCK names; everything else is seen through one path file.
#   locks/sglang-cpu.txt  SGLang for tests on a CPU: vLLM's CPU build must not find triton or torchvision
#   locks/fp8.txt         torchao for tests of trainer.fp8: transformers imports it in every process that finds it
#   locks/tracking.txt    wandb, mlflow and trackio for the slow tests: they need older versions of two packages
#   locks/bridge.txt      megatron-bridge for a slow test: it needs another megatron-core
#   locks/verifiers.txt   verifiers for a slow test: it needs older versions of openai and mcp
#   locks/openenv.txt     openenv-core for a slow test: its server needs fastmcp and gradio
#   locks/remote-sandboxes.txt  e2b, daytona and modal for slow tests
# usage: deploy/setup_layer.sh BASE_VENV VENV LOCK
set -euo pipefail
usage="usage: deploy/setup_layer.sh BASE_VENV VENV LOCK"
base=${1:?$usage}
venv=${2:?$usage}
lock=${3:?$usage}
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base/bin/python" -m venv --without-pip --clear "$venv"
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps -r "$lock"
"$base/bin/python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/tether-base.pth"
