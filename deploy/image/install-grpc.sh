#!/usr/bin/env bash
# Builds gRPC with its Protobuf and Abseil into /opt/grpc, static, from a tag of its repository.
#
#   deploy/image/install-grpc.sh [TAG]     without TAG: nothing, Debian's is used
set -euo pipefail
tag=${1:-}
[ -n "$tag" ] || exit 0
"$(dirname "$0")/../install-packages.sh" ca-certificates git libssl-dev

source=$(mktemp -d)
git clone -q --depth 1 --branch "$tag" --recurse-submodules --shallow-submodules https://github.com/grpc/grpc "$source"
{
  printf 'grpc\t%s\thttps://github.com/grpc/grpc\n' "$tag"
  git -C "$source" submodule --quiet foreach 'printf "%s\t%s\t%s\n" "${name##*/}" "$sha1" "$(git remote get-url origin)"'
} >/tmp/sources
cmake -S "$source" -B "$source/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_STANDARD=20 \
  -DCMAKE_INSTALL_PREFIX=/opt/grpc -DgRPC_INSTALL=ON -DgRPC_BUILD_TESTS=OFF -DgRPC_SSL_PROVIDER=package \
  -DABSL_PROPAGATE_CXX_STD=ON -DABSL_ENABLE_INSTALL=ON
cmake --build "$source/build" --target install
mv /tmp/sources /opt/grpc/sources  # for the bill of materials
rm -rf "$source"
