#!/usr/bin/env bash
# Builds the binary with clang, whose -Wthread-safety holds every access of a guarded member against the locks that are held,
# and shows that a planted unguarded access is found.
set -euo pipefail
cd "$(dirname "$0")/.."

deploy/install-packages.sh clang
cmake --preset thread-safety >/dev/null
cmake --build --preset thread-safety --target meshfill --parallel "$(nproc)"
echo "no unguarded access"

planted=$(mktemp --suffix=.cc)
trap 'rm -f "$planted"' EXIT
cat >"$planted" <<'CC'
#include "kernels/mutex.h"

class Planted {
 public:
  int Guarded() {
    const meshfill::MutexLock lock(mu_);
    return count_;
  }
  int Unguarded() { return count_; }

 private:
  meshfill::Mutex mu_;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
};
CC
said=$(clang++ -std=c++20 -I. -fsyntax-only -Wthread-safety -Werror=thread-safety "$planted" 2>&1) && {
  echo "thread-safety.sh: the planted unguarded access was missed" >&2
  exit 1
}
[ "$(grep -c "requires holding mutex 'mu_'" <<<"$said")" -eq 1 ] || { echo "$said" >&2; exit 1; }
echo "the planted unguarded access: found"
