#!/usr/bin/env bash
# Is one worker, `worker.sh rollout` or `worker.sh reward`: waits until the trainer's job has prepared the run, and says where Redis is.
set -euo pipefail
for ((waited = 0; ; waited++)); do
  [ ! -s "$RUN_DIR/redis/url" ] || [ ! -s "$RUN_DIR/settings.json" ] || break
  if [ "$waited" -ge "$WAIT_S" ]; then
    echo "worker.sh: the trainer's job has not prepared $RUN_DIR within $WAIT_S s (WAIT_S)" >&2
    exit 1
  fi
  sleep 1
done
TETHER_REDIS_URL=$(cat "$RUN_DIR/redis/url")
export TETHER_REDIS_URL TETHER_CONFIG="$RUN_DIR/settings.json" TETHER_INSTANCE="$1.$HOSTNAME.${SLURM_ARRAY_TASK_ID:-0}"
exec python -m "services.$1"
