# Container engines of our own for the tests of this folder, which source it: files, sockets and logs lie in $scratch, and
# no firewall rule is changed. `start_docker` and `start_podman` set DOCKER_HOST and `cli`, `stop_engine` ends the engine.
scratch=$(mktemp -d)
limits=(nofile=20000:20000 nproc=32768:32768) # an engine's own defaults may be more than root may give

say() { printf -- '-- %s\n' "$*"; }
die() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 1; }

start_docker() {
  [ "$(id -u)" = 0 ] && command -v dockerd >/dev/null || die "no container engine answers: start Docker, or run as root with dockerd installed"
  export DOCKER_HOST=unix://$scratch/docker.sock
  cli=(docker)
  dockerd --iptables=false --bridge=none --ip-forward=false --ip-masq=false "${limits[@]/#/--default-ulimit=}" \
    --data-root "$scratch/data" --exec-root "$scratch/exec" --pidfile "$scratch/dockerd.pid" -H "$DOCKER_HOST" >"$scratch/engine.log" 2>&1 &
  engine=$!
  wait_for_engine docker info
}

start_podman() {
  command -v podman >/dev/null || die "podman is not installed"
  export DOCKER_HOST=unix://$scratch/podman.sock CONTAINERS_CONF=$scratch/containers.conf
  cli=(podman --root "$scratch/podman" --runroot "$scratch/podman-run" --tmpdir "$scratch/podman-tmp")
  {
    printf '[containers]\ndefault_ulimits = ["%s", "%s"]\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n' "${limits[@]}"
    [ ! -d /sys/fs/cgroup/unified ] || echo 'runtime = "runc"' # crun refuses cgroups of both versions
  } >"$CONTAINERS_CONF"
  "${cli[@]}" system service --time 0 "$DOCKER_HOST" >"$scratch/engine.log" 2>&1 &
  engine=$!
  wait_for_engine test -S "$scratch/podman.sock"
}

wait_for_engine() {
  for _ in $(seq 60); do "$@" >/dev/null 2>&1 && return; sleep 1; done
  tail -5 "$scratch/engine.log" >&2
  die "the engine did not start within 60 s"
}

stop_engine() {
  [ -n "${engine:-}" ] || return 0
  kill "$engine" 2>/dev/null || true
  wait "$engine" || true
  engine=
  umount "$scratch"/exec/netns/* "$scratch"/podman/overlay 2>/dev/null || true # bind mounts that engines leave behind
}

# Print the name of an image that the engine has: $1, which may be pulled, or else $2, a Debian of our own with the packages $3.
have_image() {
  has() { "${cli[@]}" image inspect "$1" >/dev/null 2>&1; }
  if has "$1" || timeout 300 "${cli[@]}" pull -q "$1" >/dev/null 2>&1; then
    echo "$1"
    return
  fi
  has "$2" || make_debian "$2" "$3"
  echo "$2"
}

make_debian() {
  command -v debootstrap >/dev/null || die "no image can be pulled, and there is no debootstrap to make one"
  [ -e "$scratch/root.tar" ] || {
    say "making $1" >&2
    debootstrap --variant=minbase --include="ca-certificates,python3,$2" bookworm "$scratch/root" \
      >"$scratch/debootstrap.log" 2>&1 || die "$(tail -1 "$scratch/debootstrap.log")"
    tar -C "$scratch/root" -cf "$scratch/root.tar" .
    rm -rf "$scratch/root"
  }
  "${cli[@]}" import - "$1" <"$scratch/root.tar" >/dev/null 2>&1 || die "the engine does not import $1"
}
