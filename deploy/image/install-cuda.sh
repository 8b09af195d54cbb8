#!/usr/bin/env bash
# Installs NVIDIA's packages for Debian 12. Does nothing where what it would install is there already.
#
#   deploy/image/install-cuda.sh build     nvcc, and headers and libraries of cuBLAS and NCCL
#   deploy/image/install-cuda.sh run       the libraries that the binary loads
set -euo pipefail
release=13-0
repository=https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64
case $1 in
  build)
    wanted=/usr/local/cuda/bin/nvcc
    packages=("cuda-nvcc-$release" "cuda-cudart-dev-$release" "libcublas-dev-$release" libnccl-dev)
    ;;
  run)
    wanted=/usr/local/cuda/lib64/libcublasLt.so
    packages=("cuda-cudart-$release" "libcublas-$release" libnccl2)
    ;;
  *)
    echo "install-cuda.sh: build or run, not $1" >&2
    exit 2
    ;;
esac
[ ! -e "$wanted" ] || exit 0

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates curl >/dev/null
keyring=$(mktemp --suffix=.deb)
curl -fsSL "$repository/cuda-keyring_1.1-1_all.deb" -o "$keyring"
dpkg -i "$keyring" >/dev/null
rm "$keyring"
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
