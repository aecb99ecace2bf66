#!/usr/bin/env bash
# Install the project, which lies in the working directory, into an engine's own image. What the image brought keeps its version.
# usage: onto_engine_image.sh EXTRAS
set -euo pipefail
extras=${1:?usage: onto_engine_image.sh EXTRAS}
useradd --uid 10001 --create-home tether
install -d -o tether -g tether -m 0700 /runs /keys
python3 -c 'from importlib.metadata import distributions as d; print(*{f"{x.name}=={x.version}" for x in d()}, sep="\n")' >/tmp/keep.txt
python3 -m pip install --quiet --no-cache-dir --constraint /tmp/keep.txt --editable ".[$extras]"
rm /tmp/keep.txt
