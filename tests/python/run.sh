#!/usr/bin/env bash
# Installs python/ into a virtual environment under build/, and runs the unit tests of this folder. Arguments go to
# unittest: tests/python/run.sh -k lease. With --install alone it installs what the package needs, and runs nothing.
# Needs python3 and python3-venv, and PyPI the first time.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${MESHFILL_PYTHON_VENV:-$PWD/build/python-venv}
mkdir -p "$venv"
exec 9>"$venv/.lock"
flock 9 # Two runs share the environment.

# From a copy: a build leaves its folders beside setup.py.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r python "$copy/"
rm -rf "$copy/python/build" "$copy/python/"*.egg-info "$copy/python/meshfill/v1"
export MESHFILL_PROTO=$PWD/proto

# What is installed once: as long as the requirements stay the same.
wanted=$(cat python/pyproject.toml tests/python/run.sh | sha256sum)
if [ "$(cat "$venv/.wanted" 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check 'setuptools>=64' wheel grpcio-tools==1.76.0 \
    'prometheus-client>=0.16' "$copy/python[bf16,tokenizers]"
  rm -rf "$copy/python/build" "$copy/python/"*.egg-info
  echo "$wanted" >"$venv/.wanted"
fi
if [ "${1:-}" = --install ]; then exit; fi

# The package itself, as it is now.
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-index --no-deps \
  --no-build-isolation --force-reinstall "$copy/python"
cd tests/python
# A process with gRPC servers starts others: before Python 3.10 by fork, where gRPC's handlers may abort.
GRPC_ENABLE_FORK_SUPPORT=0 GRPC_VERBOSITY=NONE "$venv/bin/python" -X faulthandler -m unittest discover --pattern '*_test.py' "$@"
