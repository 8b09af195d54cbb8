#!/usr/bin/env bash
# The README's two commands on a bare Debian 12: a debootstrap chroot with nothing but git and apt, and a clone of HEAD. First
# deploy/run-local.sh: from nothing to a served prefill with its picture. Then tests/run.sh. Prints of each the minutes, the
# bytes on the disk and the bytes downloaded; ends with the first that fails.
#
#   tests/deploy/check-bare-debian.sh
#
# Needs root, debootstrap (installed where it is missing), a Debian mirror, about 4 GB under TMPDIR, and the time of a whole
# build. MESHFILL_MIRROR names another mirror. Behind a proxy with certificates of its own, PIP_CERT is the file that has them;
# without it the tests that install from PyPI fail.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" -eq 0 ] || { echo "check-bare-debian.sh: needs root, for a chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || deploy/install-packages.sh debootstrap

root=$(mktemp -d)
mounts=(proc sys dev)
finish() {
  for mount in "${mounts[@]}"; do umount -R -l "$root/$mount" 2>/dev/null || true; done
  rm -rf --one-file-system "$root"
}
trap finish EXIT
environment=(PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)
in_chroot() {
  env -i "${environment[@]}" chroot "$root" /bin/bash -c "cd /meshfill && $1"
}
bytes() { du -sx --block-size=1 "$root" | cut -f 1; }
# The packages that apt fetched, and its indices as they lie there.
downloaded() {
  { du -scb "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*_* 2>/dev/null || true; } | tail -n 1 | cut -f 1
}
timed() {
  local start=$SECONDS before fetched
  before=$(bytes)
  fetched=$(downloaded)
  printf '\n== %s\n' "$1"
  in_chroot "$1"
  times+=("$(printf '%4d min %02d s  %+14d bytes on disk  %+14d downloaded  %s' $(((SECONDS - start) / 60)) \
    $(((SECONDS - start) % 60)) $(($(bytes) - before)) $(($(downloaded) - fetched)) "$1")")
  printf '\n%s\n' "${times[-1]}"
}

debootstrap --variant=minbase --include=git,ca-certificates bookworm "$root" \
  "${MESHFILL_MIRROR:-http://deb.debian.org/debian}" >/dev/null
cp /etc/resolv.conf "$root/etc/resolv.conf"
printf "127.0.0.1 localhost\n" >"$root/etc/hosts"  # as the installer writes it
for mount in "${mounts[@]}"; do
  mount --rbind "/$mount" "$root/$mount"
  mount --make-rslave "$root/$mount"
done
git bundle create -q "$root/meshfill.bundle" HEAD
mkdir "$root/meshfill"
in_chroot "git clone -q /meshfill.bundle ."
if [ -n "${PIP_CERT:-}" ]; then
  cp "$PIP_CERT" "$root/etc/ssl/proxy.pem"
  environment+=(PIP_CERT=/etc/ssl/proxy.pem)
fi
# What apt fetched stays, to be counted.
echo 'APT::Keep-Downloaded-Packages "true";' >"$root/etc/apt/apt.conf.d/99keep"

times=()
timed deploy/run-local.sh
in_chroot "grep -l '<svg' build/run-local/mesh.svg build/run-local/ring.svg"
timed tests/run.sh
printf '\nOn a bare Debian 12:\n'
printf '%s\n' "${times[@]}"
