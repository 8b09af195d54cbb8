#!/usr/bin/env bash
# Everything that only a GPU can tell: correctness of the kernels and of the engine on a device, and speed. Three calls:
#
#   tests/deploy/check-gpu.sh --build            here: builds what runs there, and collects it with its libraries:
#                                                build/gpu/meshfill-gpu.tar.gz
#   tests/deploy/check-gpu.sh check [LOGS]       there, first: the gpu tests, and the speed of attention and of products
#   tests/deploy/check-gpu.sh model [LOGS]       there: an 8B-shaped model: prefills, predictions, four ranks, the longest prompt;
#                                                layers of experts
#   tests/deploy/check-gpu.sh compare [LOGS]     there, right after model: beside PyTorch's attention, products and TTFT;
#                                                NCCL; compute-sanitizer. FlashAttention-3 is compared with where
#                                                PyPI's fa3-fwd is installed
#
# Each prints a table and leaves in LOGS (build/gpu/logs): PART.log, the whole output of every step; PART.txt, the table;
# PART.json, the figures. compare reads model's there; make-ARCH.log and torch.log are of what runs beside the steps.
#
# "There" is a bare machine with a driver, CUDA, Python and, for the comparisons, PyTorch. To it travel the files of this
# repository and the package, 36 MiB: meshfill, the gpu tests, and all libraries that they need but the C and C++ runtimes,
# cuBLASLt and NCCL, which CUDA and PyTorch bring. Where the package is missing, it is built first, if there are nvcc, cmake
# and ninja and the libraries of deploy/packages.txt.
#
# Each step has a limit of its own, and those of a call together MESHFILL_GPU_MINUTES (9.5); a step that fails takes with it
# only those that need it, and what was left out says why. Room: 25 GB in /dev/shm or TMPDIR, for the model.
# Status: 0 all met, 1 something is not, or was left out, 77 no device.
set -euo pipefail
cd "$(dirname "$0")/../.."
self=tests/deploy/check-gpu.sh
package=build/gpu/meshfill-gpu.tar.gz
most_bytes=$((64 << 20))   # of the package and the tree that it travels with

build() {
  local binaries=(server/meshfill tests/kernels/cuda_attention_test tests/kernels/cuda_stream_test
                  tests/engine/parity_test tests/engine/independence_test tests/engine/nccl_test
                  tests/engine/submeshes_test)
  local folder=${MESHFILL_BUILD:-build/release} stage
  [ -n "${MESHFILL_BUILD:-}" ] || cmake --preset release -DMESHFILL_CUDA=ON >/dev/null
  cmake --build "$folder" --parallel "$(nproc)" --target "${binaries[@]##*/}"
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' RETURN
  mkdir -p "$stage/bin" "$stage/lib" build/gpu
  for binary in "${binaries[@]}"; do
    strip -o "$stage/bin/$(basename "$binary")" "$folder/$binary"
  done
  # What a bare machine may lack: all but the C and C++ runtimes.
  ldd "$stage"/bin/* | awk '$2 == "=>" && $3 ~ /^\// {print $3}' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libgcc_s|libstdc\+\+|ld-linux[^/]*)\.so' |
    xargs -I{} cp -L {} "$stage/lib/"
  tar -C "$stage" -czf "$package" bin lib
  local bytes tree
  bytes=$(stat -c %s "$package")
  tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 cat | wc -c)
  echo "$package: $((bytes >> 20)) MiB, $(ls "$stage/bin" | wc -l) programs, $(ls "$stage/lib" | wc -l) libraries;" \
    "with the tree $(((bytes + tree) >> 20)) MiB"
  [ $((bytes + tree)) -le "$most_bytes" ] ||
    { echo "check-gpu.sh: above $((most_bytes >> 20)) MiB: too large to travel" >&2; exit 1; }
}

build_where_missing() {
  [ -f "$package" ] && return
  for tool in nvcc cmake ninja; do
    PATH=$PATH:/usr/local/cuda/bin command -v "$tool" >/dev/null ||
      { echo "check-gpu.sh: no $package, and no $tool to build it; run tests/deploy/check-gpu.sh --build where there is" >&2; exit 1; }
  done
  "$self" --build >&2 || { echo "check-gpu.sh: no $package, and it cannot be built here; bring it along" >&2; exit 1; }
}

case "${1:-}" in
  --build) build ;;
  check | model | compare)
    build_where_missing
    unpacked=${TMPDIR:-/tmp}/meshfill-gpu
    mkdir -p "$unpacked" && tar -C "$unpacked" -xzf "$package"
    exec python3 tests/deploy/check_gpu.py "$1" "$unpacked" "${2:-build/gpu/logs}"
    ;;
  *) sed -n '2,/^set/p' "$self" | sed '$d' | cut -c3- >&2; exit 2 ;;
esac
