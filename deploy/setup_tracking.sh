#!/usr/bin/env bash
# Build the environment in which the slow tests run the trackers wandb, mlflow and trackio: only what the main environment lacks,
# which it sees through one path file. It is a second one because mlflow and trackio need older versions of two packages.
# usage: deploy/setup_tracking.sh VENV TRACKING_VENV
set -euo pipefail
base=${1:?usage: deploy/setup_tracking.sh VENV TRACKING_VENV}
venv=${2:?usage: deploy/setup_tracking.sh VENV TRACKING_VENV}
here=$(cd "$(dirname "$0")/.." && pwd)
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$base/bin/python" -m venv --without-pip --clear "$venv"
"$base/bin/python" -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
  -r "$here/deploy/locks/tracking.txt"
"$base/bin/python" -c "$packages" >"$("$venv/bin/python" -c "$packages")/tether-base.pth"
