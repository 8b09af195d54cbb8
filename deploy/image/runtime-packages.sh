#!/usr/bin/env bash
# Prints the Debian packages, one a line, whose libraries a binary loads.
#
#   deploy/image/runtime-packages.sh BINARY
set -euo pipefail
ldd "$1" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | while read -r library; do
  # The linker may name a library by its path before /usr was merged, dpkg by its path since, or the other way round.
  dpkg-query -S "$(readlink -f "$library")" 2>/dev/null || dpkg-query -S "/${library#/usr/}" || dpkg-query -S "/usr${library}"
done | cut -d: -f1 | sort -u
