#!/usr/bin/env bash
# Keeps one service of this host running: keep_running.sh COMMAND...
#
# Starts it again when it has failed, after KEEP_PAUSE_S seconds (2). Ends with its exit code when it is done (0), when somebody has to
# change a setting (2), after KEEP_FAILURES failures (20) none of which came an hour after its start, or once SIGTERM or SIGINT
# has been passed on and the service has ended.
set -u
failures=0
stopping=
child=

pass_on() {
  stopping=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap pass_on TERM INT

while true; do
  began=$SECONDS
  "$@" &
  child=$!
  [ -z "$stopping" ] || pass_on # the signal came just before
  while true; do # a signal interrupts the wait, not the service
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  child=
  case $code in 0 | 2) exit "$code" ;; esac
  [ -z "$stopping" ] || exit "$code"
  [ $((SECONDS - began)) -lt 3600 ] || failures=0
  failures=$((failures + 1))
  if [ "$failures" -gt "${KEEP_FAILURES:-20}" ]; then
    echo "keep_running.sh: $* failed $failures times, last with exit code $code" >&2
    exit "$code"
  fi
  echo "keep_running.sh: $* ended with exit code $code; starts again" >&2
  sleep "${KEEP_PAUSE_S:-2}"
  [ -z "$stopping" ] || exit "$code"
done
