#!/usr/bin/env bash
# Builds the image's binary as /out/meshfill, and lists the packages that it needs in /out/packages.
#
#   deploy/image/build.sh [CMAKE-OPTION]…
set -euo pipefail
cmake --preset release -DMESHFILL_BUILD_TESTS=OFF -DCMAKE_PREFIX_PATH=/opt/grpc -DCMAKE_FIND_PACKAGE_PREFER_CONFIG=ON "$@"
cmake --build --preset release --target meshfill --parallel "$(nproc)"
install -D -s build/release/server/meshfill /out/meshfill
"$(dirname "$0")/runtime-packages.sh" /out/meshfill >/out/packages
