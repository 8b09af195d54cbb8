"""Takes the steps of deploy/Dockerfile in chroots. Usage: check_image.py (deploy/check-image.sh calls it, and says more)"""
import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
MIRROR = os.environ.get("MESHFILL_MIRROR", "http://deb.debian.org/debian")
SEED_PACKAGES = "ca-certificates"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def instructions(text):
    """[(instruction, rest)] of a Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def in_context(path, ignore):
    """Whether the .dockerignore lets a file through: the last rule that matches it, or a folder above it, decides."""
    names = [str(path), *map(str, path.parents)]
    kept = True
    for rule in ignore:
        if any(fnmatch.fnmatch(name, rule.lstrip("!")) for name in names):
            kept = rule.startswith("!")
    return kept


class Stage:
    """A chroot, and what its instructions set."""

    def __init__(self, folder):
        self.root = folder
        self.workdir, self.user, self.entrypoint = "/", None, None

    def path(self, name):
        return self.root / os.path.join(self.workdir, name).lstrip("/")

    def run(self, command, user=None, mounted=True):
        mounts = [self.root / "proc", self.root / "dev"] if mounted else []
        for mount in mounts:
            subprocess.run(["mount", "--rbind", f"/{mount.name}", mount], check=True)
            subprocess.run(["mount", "--make-rslave", mount], check=True)
        try:
            as_user = ["--userspec", user] if user else []
            return subprocess.run(["chroot", *as_user, self.root, "/bin/sh", "-ec", f"cd {self.workdir}; {command}"], check=True,
                                  env={"PATH": PATH, "HOME": "/tmp"}, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for mount in mounts:
                subprocess.run(["umount", "-R", "-l", mount], check=True)


class Image:
    def __init__(self, folder):
        self.folder, self.stages, self.stage = folder, {}, None
        self.base = folder / "base"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={SEED_PACKAGES}", "bookworm", self.base, MIRROR],
                       check=True, stdout=subprocess.DEVNULL)
        self.context = folder / "context"
        self._export_context()

    def _export_context(self):
        ignore = [line for line in (HERE / "Dockerfile.dockerignore").read_text().splitlines()
                  if line and not line.startswith("#")]
        self.context.mkdir()
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", self.context], input=archive, check=True)
        for path in [each for each in self.context.rglob("*") if each.is_file() or each.is_symlink()]:
            if not in_context(path.relative_to(self.context), ignore):
                path.unlink()

    def do_from(self, rest):
        source, _, name = rest.partition(" AS ")
        if source == "scratch":
            self.stage = Stage(self.folder / f"stage-{len(self.stages)}")
            self.stage.root.mkdir()
        elif source in self.stages:
            self.stage = self.stages[source]  # goes on in the same tree, which no other stage needs as it was
        else:
            self.stage = Stage(self.folder / f"stage-{len(self.stages)}")
            subprocess.run(["cp", "-a", self.base, self.stage.root], check=True)
            shutil.copy("/etc/resolv.conf", self.stage.root / "etc/resolv.conf")
        self.stages[name or "final"] = self.stage

    def do_workdir(self, rest):
        self.stage.workdir = rest
        self.stage.path(".").mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest):
        words = rest.split()
        root = self.context
        if words[0].startswith("--from="):
            root = self.stages[words.pop(0)[len("--from="):]].root
        *sources, target = words
        to = self.stage.path(target)
        if target.endswith("/") or len(sources) > 1 or (root / sources[0].lstrip("/")).is_dir():
            to.mkdir(parents=True, exist_ok=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = root / source.lstrip("/")
            subprocess.run(["cp", "-a", f"{path}/." if path.is_dir() else path, to], check=True)

    def do_run(self, rest):
        start = time.monotonic()
        self.stage.run(rest)
        print(f"  {time.monotonic() - start:6.1f} s  RUN {rest[:90]}", flush=True)

    def do_user(self, rest):
        self.stage.user = rest

    def do_entrypoint(self, rest):
        self.stage.entrypoint = json.loads(rest)

    def build(self, text):
        for name, rest in instructions(text):
            step = getattr(self, "do_" + name.lower(), None)
            if step:
                step(rest)
            elif name not in ("ARG", "EXPOSE", "HEALTHCHECK"):
                sys.exit(f"check-image: {name} is not understood")


def main():
    with tempfile.TemporaryDirectory() as name:
        image = Image(pathlib.Path(name))
        image.build((HERE / "Dockerfile").read_text())
        final = image.stages["final"]
        meshfill = " ".join(final.entrypoint)
        config = "/tmp/config.yaml"
        shutil.copy(ROOT / "configs/local.yaml", final.path(config))
        out = final.run(f"{meshfill} make-model --arch llama --out /tmp/model >/dev/null; "
                        f"echo 1 2 3 4 5 | {meshfill} prefill --config {config} --set model.path=/tmp/model --tokens - --json",
                        user=final.user)
        print(f"as {final.user}: first token {json.loads(out)['first_token']}, plan {json.loads(out)['plan']}")
        bill = json.loads((image.stages["sbom"].root / "meshfill.spdx.json").read_text())
        size = subprocess.run(["du", "-sxm", final.root], check=True, capture_output=True, text=True).stdout.split()[0]
        print(f"image of {size} MB, bill of materials with {len(bill['packages'])} packages")


if __name__ == "__main__":
    main()
