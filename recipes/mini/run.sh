#!/bin/sh
# All stages in order, each resumable; two cores and about an hour and a half. See README.md.
set -e
cd "$(dirname "$0")/../.."
export PYTHONPATH=src OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE
python=${PYTHON:-.venv-mini/bin/python}
run() { nice -n 10 "$python" -m "$@"; }
run recipes.mini.prepare
run recipes.mini.features seen 4000
run recipes.mini.features unseen 4000
run recipes.mini.features train 20000
run recipes.mini.train --steps 500
run recipes.mini.names
run recipes.mini.photos
run recipes.mini.tune --steps 400
run recipes.mini.drop --steps 500
run recipes.mini.pictures
run recipes.mini.export
run recipes.mini.evaluate --json recipes/mini/evaluation.json
