#!/usr/bin/env bash
# Sandboxes in real containers: contract suite, hostile programs, a storm of starts and killed workers, and no container left behind.
# usage: deploy/docker/test_containers.sh [docker] [podman]     (or `make test-containers`)
#   DOCKER_HOST    an engine that runs: it alone is tested; by default a private Docker, then a private Podman, need root
#   SANDBOX_IMAGE  image with Python, default python:3.11-slim-bookworm; made by debootstrap where it cannot be pulled
#   PYTHON         default .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/../.."
. deploy/docker/private_engine.sh
wanted=${SANDBOX_IMAGE:-python:3.11-slim-bookworm}

finish() {
  local code=$?
  trap - EXIT
  stop_engine
  rm -rf "$scratch"
  exit "$code"
}

run_suite() {
  SANDBOX_IMAGE=$(have_image "$wanted" tether-sandbox-test libc-bin)
  export SANDBOX_IMAGE
  say "$1: sandboxes of $SANDBOX_IMAGE"
  "${PYTHON:-.venv/bin/python}" -m pytest --durations 5 -m "slow or not slow" tests/rollout/sandboxes/test_container.py
  local left
  left=$("${cli[@]}" ps -aq --filter label=tether.folder) # an engine that does not answer ends the script here
  [ -z "$left" ] || die "containers are left: $left"
}

trap finish EXIT
trap 'exit 130' INT TERM
if [ -n "${DOCKER_HOST:-}" ]; then
  cli=(docker)
  run_suite "$DOCKER_HOST"
else
  [ $# -gt 0 ] || set -- docker podman
  for kind in "$@"; do
    "start_$kind"
    run_suite "$kind"
    stop_engine
  done
fi
say "passed"
