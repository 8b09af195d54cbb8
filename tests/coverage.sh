#!/usr/bin/env bash
# The line coverage of the parsers: of all that reads bytes which others have written. Builds the fuzz targets and the parsers'
# own tests, with the parsers' sources compiled for gcov, runs them, and prints each parser with its files. Fails below 0.95.
#
# Usage: tests/coverage.sh [--lines]      (--lines: also prints the lines that nothing has run)
# MESHFILL_COVERAGE_BUILD: the build folder (default: build/coverage).
set -euo pipefail
cd "$(dirname "$0")/.."
build=${MESHFILL_COVERAGE_BUILD:-build/coverage}
targets=(config_fuzz kv_request_fuzz leader_fuzz model_config_fuzz rendezvous_fuzz request_stream_fuzz run_plan_fuzz
  safetensors_fuzz worker_fuzz
  access_test callers_test config_test control_stream_test front_end_test front_end_tls_test gloo_encryption_test gloo_test
  gzip_test holder_service_test http_pages_test kv_embedded_test kv_fetch_test kv_service_test leader_test link_survey_test
  make_model_test model_config_test pool_kv_reader_test pool_kv_test pool_profile_test rope_test run_plan_test
  safetensors_test scenario_test slab_reader_test status_details_test tls_channel_test tls_files_test
  token_file_test traceparent_test wide_token_test worker_machine_test)

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O0 -g0" -DMESHFILL_CUDA=OFF \
  -DMESHFILL_PRECOMPILE=ON "-DMESHFILL_COVERED=$(python3 tests/line_coverage.py --sources)" >/dev/null
cmake --build "$build" --parallel "${MESHFILL_JOBS:-$(nproc)}" --target "${targets[@]}"
find "$build" -name '*.gcda' -delete
ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "${MESHFILL_JOBS:-$(nproc)}" \
  -R "^($(IFS='|'; echo "${targets[*]}"))\$"
exec python3 tests/line_coverage.py --build "$build" "$@"
