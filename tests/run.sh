#!/bin/sh
# Installs bmoe and what its tests need into a virtual environment (.venv, or the first argument) and runs them.
# Further arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
[ $# -gt 0 ] && shift
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet -e '.[dev]'
exec "$venv/bin/python" -m pytest "$@"
