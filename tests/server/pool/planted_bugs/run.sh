#!/bin/bash
# Shows that the pool's simulation finds bugs: plants each bug of this folder in a copy of the sources, builds the
# simulation alone, and runs its ordinary seeds, which must fail.
#
# Usage: tests/server/pool/planted_bugs/run.sh [BUG]…      (default: all; a bug is the name of its patch)
# MESHFILL_SEEDS (default 2000) and MESHFILL_FIRST_SEED (default 1) choose the seeds; MESHFILL_BUGS_DIR keeps the copy
# and its build there for the next time.
set -euo pipefail
command -v patch > /dev/null || { echo "this needs patch: apt-get install patch" >&2; exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../../.." && pwd)
work=${MESHFILL_BUGS_DIR:-$(mktemp -d)}
[[ -n ${MESHFILL_BUGS_DIR:-} ]] || trap 'rm -rf "$work"' EXIT
export MESHFILL_SEEDS=${MESHFILL_SEEDS:-2000} MESHFILL_FIRST_SEED=${MESHFILL_FIRST_SEED:-1}
export CCACHE_BASEDIR=$work

mkdir -p "$work/source"
for file in $(cd "$root" && git ls-files); do
  [[ -f "$root/$file" ]] || continue
  mkdir -p "$work/source/$(dirname "$file")"
  # Only what differs, so that a kept build stays fresh.
  cmp -s "$root/$file" "$work/source/$file" || cp "$root/$file" "$work/source/$file"
done
cmake -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMESHFILL_CUDA=OFF > "$work/cmake.log"

build_and_run() {
  ninja -C "$work/build" pool_simulation_test > "$work/build.log" || { cat "$work/build.log"; exit 1; }
  timeout 120 "$work/build/tests/server/pool_simulation_test" > "$work/test.log" 2>&1
}

build_and_run || { cat "$work/test.log"; echo "the simulation fails without a planted bug"; exit 1; }
echo "no bug: passes"

bugs=("$@")
[[ ${#bugs[@]} -gt 0 ]] || bugs=($(cd "$here" && ls ./*.patch | sed 's|./||; s|\.patch$||'))
missed=0
for bug in "${bugs[@]}"; do
  patch -s -p1 -d "$work/source" < "$here/$bug.patch"
  if build_and_run; then
    echo "$bug: MISSED"
    missed=$((missed + 1))
  else
    found=$(grep -m1 -o 'seed [0-9]*: at .*' "$work/test.log" || echo "the test crashed")
    echo "$bug: found, ${found% (replay*}"
  fi
  patch -s -R -p1 -d "$work/source" < "$here/$bug.patch"
done
[[ $missed -eq 0 ]] || { echo "$missed bugs were missed"; exit 1; }
echo "all ${#bugs[@]} bugs were found"
