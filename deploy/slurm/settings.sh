# shellcheck shell=bash
# What the scripts in this directory have in common: edit it, or set the same names in the environment of submit.sh.
: "${CONFIG:?a settings file, such as deploy/examples/gsm8k/eight_gpus.toml}"
: "${RUN_DIR:?a directory on a file system that all hosts have}"
: "${VENV:=$PWD/.venv-cuda}" # has tether; modules may be loaded here instead
: "${TRAINER_NODES:=2}"      # hosts of the trainer, each with
: "${TRAINER_GPUS:=8}"       # so many GPUs: together the ranks that [parallel] asks for
: "${ROLLOUTS:=4}"           # engines, each a job of its own with
: "${ROLLOUT_GPUS:=1}"       # so many GPUs: engine.tensor_parallel_size
: "${REWARDS:=2}"
: "${TRAINER_PORT:=29400}" # of the trainer's first host, for the others
: "${REDIS_PORT:=6379}"    # of the trainer's first host, for all services
: "${WAIT_S:=600}"         # how long workers wait for the run to be prepared
export CONFIG RUN_DIR VENV TRAINER_NODES TRAINER_GPUS ROLLOUTS ROLLOUT_GPUS REWARDS TRAINER_PORT REDIS_PORT WAIT_S
export PATH="$VENV/bin:$PATH"
