#!/usr/bin/env bash
# Submits a run: CONFIG=deploy/examples/gsm8k/eight_gpus.toml RUN_DIR=/shared/runs/gsm8k deploy/slurm/submit.sh
# settings.sh has the rest. Words after it go to every sbatch, such as --partition=gpu --account=me --time=1-0.
# Submitted again with the same RUN_DIR, the run continues where it stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source deploy/slurm/settings.sh
mkdir -p "$RUN_DIR/logs"

submit() { sbatch --parsable --output="$RUN_DIR/logs/%x.%A_%a.log" "$@"; }
trainer=$(submit --nodes="$TRAINER_NODES" --gpus-per-node="$TRAINER_GPUS" "$@" deploy/slurm/trainer.sbatch)
trainer=${trainer%%;*} # of "id;cluster"
workers=(--job-name="tether-worker-$trainer" "$@")
submit --array="1-$ROLLOUTS" --gpus="$ROLLOUT_GPUS" "${workers[@]}" deploy/slurm/rollout.sbatch
submit --array="1-$REWARDS" "${workers[@]}" deploy/slurm/reward.sbatch
echo "trainer: job $trainer, $TRAINER_NODES hosts; $ROLLOUTS rollout and $REWARDS reward workers: jobs called tether-worker-$trainer"
