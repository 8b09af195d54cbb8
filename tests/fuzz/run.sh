#!/bin/bash
# The long mode of the fuzz targets: builds them with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and
# runs each for a while. It begins with the seeds, with what was found before (corpus/), and with what earlier runs kept.
#
# Usage: tests/fuzz/run.sh [SECONDS [TARGET]…]      (default: 60 seconds of every target)
# MESHFILL_FUZZ_BUILD: the build folder (default: build/fuzz). What a run learns is kept in corpus/ there.
#
# A finding ends the script. Mend it, and keep its input, so that the tests replay it from then on:
#   base64 -w0 build/fuzz/findings/TARGET-crash-… >> tests/fuzz/corpus/TARGET.txt; echo >> tests/fuzz/corpus/TARGET.txt
set -euo pipefail
command -v clang++ > /dev/null || { echo "this needs clang: apt-get install clang" >&2; exit 2; }

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
build=${MESHFILL_FUZZ_BUILD:-$root/build/fuzz}
seconds=${1:-60}
targets=("${@:2}")
if [[ ${#targets[@]} -eq 0 ]]; then
  targets=($(cd "$here" && ls ./*_fuzz.cc | sed 's|./||; s|\.cc$||'))
fi

cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1" \
  -DCMAKE_CXX_COMPILER=clang++ -DMESHFILL_CUDA=OFF -DMESHFILL_SANITIZE=address,undefined,fuzzer-no-link > /dev/null
ninja -C "$build" ${MESHFILL_JOBS:+-j "$MESHFILL_JOBS"} "${targets[@]}" "${targets[@]/%/er}"

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
mkdir -p "$build/findings"
for target in "${targets[@]}"; do
  corpus=$build/corpus/$target
  mkdir -p "$corpus"
  known=()
  [[ -f $here/corpus/$target.txt ]] && known=("$here/corpus/$target.txt")
  "$build/tests/fuzz/$target" --write "$corpus" "${known[@]}"
  echo "== $target, $seconds s"
  "$build/tests/fuzz/${target}er" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
    -verbosity=0 -artifact_prefix="$build/findings/$target-" "$corpus"
done
echo "no finding in ${#targets[@]} targets"
