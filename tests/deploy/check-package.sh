#!/usr/bin/env bash
# The Debian package on a bare Debian 12: a debootstrap chroot with nothing but apt installs it, and in a network of its own a
# model is made, served and prefilled, and its plan drawn. Prints what each command took, and how many bytes. It ends with the
# first that fails.
#
#   tests/deploy/check-package.sh
#
# Needs root, debootstrap (installed where it is missing), a Debian mirror and about 2 GB under TMPDIR. MESHFILL_BUILD names a
# build folder that is whole; without it the release preset is built. MESHFILL_MIRROR names another mirror.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "check-package.sh: needs root, for a chroot" >&2; exit 1; }
deploy/install-packages.sh debootstrap iproute2
restore() { :; }
if [ -z "${MESHFILL_BUILD:-}" ]; then
  deploy/install-packages.sh
  MESHFILL_BUILD=build/release
  # The folder may be one with tests: it keeps them, or a later ctest would run what nobody builds any more.
  tests=$(sed -n 's/^MESHFILL_BUILD_TESTS:BOOL=//p' "$MESHFILL_BUILD/CMakeCache.txt" 2>/dev/null || true)
  restore() { cmake --preset release "-DMESHFILL_BUILD_TESTS=${tests:-ON}" >/dev/null; }
  trap restore EXIT
  cmake --preset release -DMESHFILL_BUILD_TESTS=OFF >/dev/null
  cmake --build --preset release --parallel "$(nproc)"
fi

root=$(mktemp -d)
chmod 755 "$root"  # apt fetches as a user of its own
mounts=(proc sys dev)
finish() {
  for mount in "${mounts[@]}"; do umount -R -l "$root/$mount" 2>/dev/null || true; done
  rm -rf --one-file-system "$root"
  restore
}
trap finish EXIT
megabytes() { du -sxm "$root" | cut -f 1; }
in_chroot() { env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 chroot "$root" /bin/bash -euc "cd /root; $1"; }
# The same where nothing but loopback is, and nobody else has its ports.
alone() { unshare --net bash -euc "ip link set lo up; $(declare -f in_chroot); root=$root; in_chroot \"\$1\"" alone "$1"; }
timed() {
  local start=$SECONDS before
  before=$(megabytes)
  printf '\n== %s\n' "$2"
  "$1" "$2"
  times+=("$(printf '%4d s  %+6d MB  %s' $((SECONDS - start)) $(($(megabytes) - before)) "${2%%$'\n'*}")")
}

debootstrap --variant=minbase bookworm "$root" "${MESHFILL_MIRROR:-http://deb.debian.org/debian}" >/dev/null
cpack --config "$MESHFILL_BUILD/CPackConfig.cmake" -B "$root/root/packages" >/dev/null
mv "$root"/root/packages/meshfill_*.deb "$root/root/meshfill.deb"
rm -r "$root/root/packages"
bytes=$(stat -c %s "$root/root/meshfill.deb")
cp /etc/resolv.conf "$root/etc/resolv.conf"
printf "127.0.0.1 localhost\n" >"$root/etc/hosts"  # as the installer writes it
for mount in "${mounts[@]}"; do
  mount --rbind "/$mount" "$root/$mount"
  mount --make-rslave "$root/$mount"
done

times=()
timed in_chroot "apt-get update -qq"
timed in_chroot "apt-get install -y -qq --no-install-recommends ./meshfill.deb >/dev/null"
timed in_chroot "meshfill make-model --arch llama --layers 4 --hidden 256 --out bytes"
timed alone 'meshfill serve --model bytes --set pool.embedded.ranks=4 2>server.log &
for ((i = 0; i < 600; ++i)); do ! grep -qs " ready: " server.log || break; kill -0 $!; sleep 0.1; done
grep -q " ready: " server.log || { cat server.log; echo "not ready within 60 s"; exit 1; }
meshfill prefill --server 127.0.0.1:50051 --tokens /usr/share/doc/meshfill/README.md --format bytes --tile 2x2
kill $!; wait $!'
timed in_chroot "meshfill plan --config /usr/share/doc/meshfill/configs/local.yaml --model bytes --tokens 1000000 --svg plan.svg | head -n 3"
in_chroot "grep -q '<svg' plan.svg && zcat -f /usr/share/man/man1/meshfill-serve.1* | grep -q MESHFILL"
printf '\nOn a bare Debian 12, a package of %d bytes:\n' "$bytes"
printf '%s\n' "${times[@]}"
