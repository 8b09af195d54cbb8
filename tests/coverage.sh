#!/usr/bin/env bash
# What the tests reach.
#
# tests/coverage.sh [--lines]              the parsers' lines, by gcov: of all that reads bytes which others have written
# tests/coverage.sh --folders [--files]    lines and branches of engine/ and server/ by folder, by clang (needs clang and llvm)
#
# The first builds the fuzz targets and the parsers' own tests, with the parsers' sources compiled for gcov, runs them, and
# prints each parser with its files; it fails below 0.95 of the lines. The second builds everything but CUDA for clang's counters,
# runs all tests, those of whole processes too, and prints each folder; it fails below 0.95 of the lines or 0.85 of the branches.
# --lines also prints the lines that nothing has run, --files each file of a folder.
#
# MESHFILL_COVERAGE_BUILD: the build folder (default: build/coverage, build/coverage-folders).
# MESHFILL_COVERAGE_TESTS: for --folders, which tests run (ctest -R; default: all).
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=${MESHFILL_JOBS:-$(nproc)}

if [ "${1:-}" = --folders ]; then
  shift
  for tool in clang++ llvm-profdata llvm-cov; do
    command -v "$tool" > /dev/null || { echo "this needs $tool: apt-get install clang llvm" >&2; exit 2; }
  done
  build=${MESHFILL_COVERAGE_BUILD:-build/coverage-folders}
  chosen=${MESHFILL_COVERAGE_TESTS:-}
  cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g0" -DMESHFILL_CUDA=OFF -DMESHFILL_PRECOMPILE=ON "-DMESHFILL_COVERAGE=-fprofile-instr-generate;-fcoverage-mapping" \
    "-DMESHFILL_COVERED=$(python3 tests/folder_coverage.py --sources)" > /dev/null
  if [ -z "$chosen" ]; then
    cmake --build "$build" --parallel "$jobs"
  else  # what these tests run, and the binary, which says which code there is
    mapfile -t targets < <(ctest --test-dir "$build" -N -R "$chosen" | sed -n 's/^ *Test *#[0-9]*: \(.*_\(test\|fuzz\)\)$/\1/p')
    known=$(ninja -C "$build" -t targets all)
    for i in "${!targets[@]}"; do grep -q "^${targets[i]}: phony" <<< "$known" || unset "targets[i]"; done
    cmake --build "$build" --parallel "$jobs" --target meshfill "${targets[@]}"
  fi
  rm -rf "$build/profiles"
  mkdir "$build/profiles"
  # A folder for each test: %m tells binaries of one set of libraries not apart, and counts of all but one would be lost.
  # Mutants are built as the ordinary build is.
  ctest --test-dir "$build" -N -E '^mutant' ${chosen:+-R "$chosen"} | sed -n 's/^ *Test *#[0-9]*: //p' > "$build/tests.txt"
  [ -s "$build/tests.txt" ] || { echo "no test is named $chosen" >&2; exit 2; }
  xargs -a "$build/tests.txt" -P "$jobs" -I{} env "LLVM_PROFILE_FILE=$PWD/$build/profiles/{}/%4m.profraw" \
    ctest --test-dir "$build" --output-on-failure --quiet --output-log "$build/profiles/{}.log" -R '^{}$' || failed=1
  grep -h 'Failed\|Timeout' "$build"/profiles/*.log || true
  llvm-profdata merge -sparse "$build"/profiles/*/*.profraw -o "$build/all.profdata"
  llvm-cov export -summary-only -instr-profile "$build/all.profdata" "$build/server/meshfill" > "$build/summary.json"
  python3 tests/folder_coverage.py --summary "$build/summary.json" "$@" || failed=1
  exit "${failed:-0}"
fi

build=${MESHFILL_COVERAGE_BUILD:-build/coverage}
targets=(config_fuzz kv_request_fuzz leader_fuzz model_config_fuzz rendezvous_fuzz request_stream_fuzz run_plan_fuzz
  safetensors_fuzz worker_fuzz
  access_test callers_test config_test control_stream_test front_end_test front_end_tls_test gloo_encryption_test gloo_test
  gzip_test holder_service_test http_pages_test kv_embedded_test kv_fetch_test kv_service_test leader_runs_test leader_test
  link_survey_test make_model_test membership_test model_config_test pool_kv_reader_test pool_kv_test pool_profile_test rope_test
  run_plan_test safetensors_test scenario_test slab_reader_test status_details_test tls_channel_test tls_files_test
  token_file_test traceparent_test wide_token_test worker_link_test worker_machine_test)

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0 -g0" -DMESHFILL_CUDA=OFF \
  -DMESHFILL_PRECOMPILE=ON "-DMESHFILL_COVERED=$(python3 tests/line_coverage.py --sources)" >/dev/null
cmake --build "$build" --parallel "$jobs" --target "${targets[@]}"
find "$build" -name '*.gcda' -delete
ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "$jobs" \
  -R "^($(IFS='|'; echo "${targets[*]}"))\$"
exec python3 tests/line_coverage.py --build "$build" "$@"
