#!/usr/bin/env bash
# The demo as `docker compose up` runs it, in a real container engine: build, a short run, verify, and nothing left behind.
# usage: deploy/docker/test_compose.sh     (or `make test-compose`)
#   TETHER_STEPS   steps to make, default 5
#   BASE           base image of the build, default python:3.11-slim-bookworm; made by debootstrap where it cannot be pulled
#   IMAGE          image to test, with TETHER_REDIS_IMAGE if need be; by default one is built
#   NETWORK=host   use the host's network (deploy/docker/compose.host.yaml); by default only where bridge networks do not work
#   WAIT_S         how long the trainer may take, default 900
# Where no engine runs, root with `dockerd` installed gets a private one, which is ended and removed at the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
export TETHER_STEPS=${TETHER_STEPS:-5} TETHER_IMAGE=${IMAGE:-tether:cpu} TETHER_MONITOR_PORT=0
base=${BASE:-python:3.11-slim-bookworm}
project=tether-test-$$
files=(-f compose.yaml)
cli=(docker)
. deploy/docker/private_engine.sh

compose() { docker compose -p "$project" "${files[@]}" "$@"; }

build() {
  build_args=()
  base=$(have_image "$base" tether-test-base python3-venv,python3-distutils,libnuma1,redis-server)
  [ "$base" != tether-test-base ] || { # without a registry packages come from wheels
    export TETHER_REDIS_IMAGE=tether-test-base
    deploy/docker/fetch_wheels.sh
    build_args=(--network none --build-arg PIP_NO_INDEX=1)
  }
  say "building $TETHER_IMAGE on $base"
  docker build -q -f deploy/docker/Dockerfile --target cpu -t "$TETHER_IMAGE" --build-arg BASE="$base" "${build_args[@]}" . >/dev/null
  [ "$(docker run --rm --network none "$TETHER_IMAGE" id -u)" != 0 ] || die "$TETHER_IMAGE runs as root"
}

choose_network() {
  network=${NETWORK:-bridge}
  if [ "$network" = bridge ] && docker network create "$project-probe" >/dev/null; then
    docker run --rm --network "$project-probe" "$TETHER_IMAGE" true 2>/dev/null || network=host
    docker network rm "$project-probe" >/dev/null
  fi
  say "network: $network"
  [ "$network" = bridge ] && return
  files=(--profile cpu -f deploy/compose.yaml -f deploy/docker/compose.host.yaml) # an included file cannot be overridden
  export TETHER_REDIS_URL=redis://127.0.0.1:16379/0
}

tools() { compose run --rm --no-deps -T tools "$@"; }

# Containers of the project that have ended other than with exit code 0, and are not restarted.
failures() {
  local container
  for container in $(docker ps -aq --filter label=com.docker.compose.project="$project" --filter status=exited); do
    docker inspect -f '{{if .State.ExitCode}}{{.Name}} exited {{.State.ExitCode}}{{end}}' "$container"
  done | grep . || true
}

wait_for_trainer() {
  local trainer
  trainer=$(compose ps -q trainer)
  for _ in $(seq "${WAIT_S:-900}"); do
    [ -z "$(failures)" ] || die "$(failures)"
    [ "$(docker inspect -f '{{.State.Status}}' "$trainer")" = exited ] && return
    sleep 1
  done
  die "the trainer did not finish in time"
}

run_demo() {
  say "up, $TETHER_STEPS steps"
  compose up -d --no-build
  wait_for_trainer
  say "the trainer is done; the others drain"
  tools tether status "/runs/${TETHER_RUN:-demo}"
  [ "$network" = host ] || tools python -c "import pathlib, urllib.request as r; key = pathlib.Path('/runs/${TETHER_RUN:-demo}/monitor.key').read_text().strip(); print('page:', r.urlopen(f'http://monitor:8080/?key={key}').status)"
  compose stop
  [ -z "$(failures)" ] || die "$(failures)"
  say "verify"
  tools tether verify "/runs/${TETHER_RUN:-demo}"
  tools tail -n 1 "/runs/${TETHER_RUN:-demo}/metrics.jsonl"
}

nothing_left() {
  local left
  left=$(for kind in "ps -aq" "volume ls -q" "network ls -q"; do docker $kind --filter label=com.docker.compose.project="$project"; done)
  [ -z "$left" ] || die "left behind: $left"
  say "nothing is left"
}

finish() {
  local code=$?
  trap - EXIT
  [ "$code" = 0 ] || compose logs --tail 40 2>/dev/null || true
  compose down -v --remove-orphans >/dev/null 2>&1 || true
  stop_engine
  rm -rf "$scratch"
  exit "$code"
}

docker compose version >/dev/null || die "docker compose (2.20 or newer) is needed"
trap finish EXIT
trap 'exit 130' INT TERM
docker info >/dev/null 2>&1 || start_docker
[ -n "${IMAGE:-}" ] || build
choose_network
run_demo
compose down -v --remove-orphans
nothing_left
say "passed"
