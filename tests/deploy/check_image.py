"""Takes the steps of deploy/Dockerfile in chroots.

Usage: check_image.py TARGET    (tests/deploy/check-image.sh calls it, and says more)
"""
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

ROOT = pathlib.Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
MIRROR = os.environ.get("MESHFILL_MIRROR", "http://deb.debian.org/debian")
CUDA_HOME = os.environ.get("MESHFILL_CUDA_HOME")
ARGUMENTS = {"GRPC": os.environ.get("MESHFILL_GRPC", "")}
SEED_PACKAGES = "ca-certificates"  # for mirrors of https; what they bring is purged where the image that runs begins
AUTHORITIES = "etc/ssl/certs/ca-certificates.crt"
LENT = "/run/lent"  # where the stages that run find what apt needs for a mirror of https, and the image has nothing of it
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IGNORED = ("EXPOSE", "HEALTHCHECK")


def instructions(text):
    """[(instruction, rest)] of a Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def stages_of(text):
    """{name: [(instruction, rest)]}, each beginning with its FROM; the nameless last one is not needed here."""
    stages = {}
    for name, rest in instructions(text):
        if name == "FROM":
            current = stages.setdefault(rest.partition(" AS ")[2], [])
        if stages:
            current.append((name, rest))
    stages.pop("", None)
    return stages


def needed(stages, target):
    """The stages that `target` stands on, in the order of the file."""
    wanted = {target}
    for name in reversed(stages):
        if name in wanted:
            for instruction, rest in stages[name]:
                source = re.match(r"--from=(\S+)", rest) if instruction == "COPY" else re.match(r"(\S+)", rest)
                if instruction in ("FROM", "COPY") and source and source[1] in stages:
                    wanted.add(source[1])
    return [name for name in stages if name in wanted]


def ignored():
    """The rules of the .dockerignore."""
    return [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line and not line.startswith("#")]


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

    def __init__(self, root, source=None):
        self.root = root
        self.workdir = source.workdir if source else "/"
        self.user = source.user if source else None
        self.entrypoint = source.entrypoint if source else None
        self.environment = dict(source.environment) if source else {"PATH": PATH, "HOME": "/tmp"}
        self.mounts = dict(source.mounts) if source else {"/proc": "/proc", "/dev": "/dev"}

    def path(self, name):
        return self.root / os.path.join(self.workdir, name).lstrip("/")

    def run(self, command, user=None, mounts=()):
        mounted = []
        try:
            for target, source in [*self.mounts.items(), *mounts]:
                at = self.root / target.lstrip("/")
                at.mkdir(parents=True, exist_ok=True)
                subprocess.run(["mount", "--rbind", source, at], check=True)
                subprocess.run(["mount", "--make-rslave", at], check=True)
                mounted.insert(0, at)
            as_user = ["--userspec", user] if user else []
            return subprocess.run(["chroot", *as_user, self.root, "/bin/sh", "-ec", f"cd {self.workdir}; {command}"], check=True,
                                  env=self.environment, stdout=subprocess.PIPE, text=True).stdout
        finally:
            for at in mounted:
                subprocess.run(["umount", "-R", "-l", at], check=True)


def debootstrapped(root):
    """A stage with what every other one begins with."""
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={SEED_PACKAGES}", "bookworm", root, MIRROR],
                   check=True, stdout=subprocess.DEVNULL)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    return Stage(root)


class Image:
    """The stages of one target, each a copy of the one that it begins with."""

    def __init__(self, folder, base, mirror=MIRROR):
        self.folder, self.base, self.mirror = folder, base, mirror
        self.stages, self.stage = {}, None
        self.context = folder / "context"

    def export_context(self):
        ignore = ignored()
        self.context.mkdir()
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", self.context], input=archive, check=True)
        for path in [each for each in self.context.rglob("*") if each.is_file() or each.is_symlink()]:
            if not in_context(path.relative_to(self.context), ignore):
                path.unlink()

    def do_from(self, rest):
        source, _, name = rest.partition(" AS ")
        root = self.folder / name
        if source == "scratch":
            root.mkdir()
            self.stage = Stage(root)
        else:
            origin = self.stages.get(source, self.base)
            subprocess.run(["cp", "-a", origin.root, root], check=True)
            self.stage = Stage(root, origin)
            if name == "runtime":
                if self.mirror.startswith("https:"):
                    self._lend_authorities(origin.root / AUTHORITIES)
                self.stage.run(f"apt-get purge -y -qq {SEED_PACKAGES} openssl >/dev/null; rm -rf /etc/ssl/certs")
        if CUDA_HOME and "cuda" in name:
            self.stage.mounts["/usr/local/cuda"] = CUDA_HOME
        self.stages[name] = self.stage

    def _lend_authorities(self, bundle):
        """Apt checks the mirror's certificate in this stage and those that begin with it, which have no authorities yet."""
        lent = self.folder / "lent"
        lent.mkdir()
        shutil.copy(bundle, lent)
        (lent / "apt.conf").write_text(f'Acquire::https::CAInfo "{LENT}/{bundle.name}";\n')
        self.stage.mounts[LENT] = lent
        self.stage.environment["APT_CONFIG"] = f"{LENT}/apt.conf"

    def do_arg(self, rest):
        name, _, default = rest.partition("=")
        self.stage.environment[name] = ARGUMENTS.get(name, default)

    def do_env(self, rest):
        self.stage.environment.update(word.split("=", 1) for word in rest.split())

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
        start, mounts, command = time.monotonic(), [], rest
        while bind := re.match(r"--mount=type=bind,source=([^,\s]+),target=(\S+) ", command):
            mounts.append((bind[2], self.context / bind[1]))
            command = command[bind.end():]
        self.stage.run(command, mounts=mounts)
        print(f"  {time.monotonic() - start:6.1f} s  RUN {command[:90]}", flush=True)

    def do_user(self, rest):
        self.stage.user = rest

    def do_entrypoint(self, rest):
        self.stage.entrypoint = json.loads(rest)

    def build(self, stages):
        for name, rest in [each for stage in stages for each in stage]:
            step = getattr(self, "do_" + name.lower(), None)
            if step:
                step(rest)
            elif name not in IGNORED:
                sys.exit(f"check-image: {name} is not understood")


def main():
    target = sys.argv[1]
    bill = "sbom-cuda" if target == "cuda" else "sbom"
    stages = stages_of((DEPLOY / "Dockerfile").read_text())
    if target not in ("cpu", "cuda"):
        sys.exit(f"check-image: {target} is no image; cpu or cuda")
    print("gRPC:", ARGUMENTS["GRPC"] or "Debian's; MESHFILL_GRPC=TAG builds it from source, where github.com is in reach")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        image = Image(folder, debootstrapped(folder / "base"))
        image.export_context()
        image.build([stages[each] for each in needed(stages, bill)])
        final = image.stages[target]
        meshfill = " ".join(final.entrypoint)
        config = "/tmp/config.yaml"
        shutil.copy(ROOT / "configs/local.yaml", final.path(config))
        out = final.run(f"{meshfill} make-model --arch llama --out /tmp/model >/dev/null; "
                        f"echo 1 2 3 4 5 | {meshfill} prefill --config {config} --set model.path=/tmp/model --tokens - --json",
                        user=final.user)
        final.run(f"test -s /{AUTHORITIES}", user=final.user)  # https, and --tls without --ca
        print(f"as {final.user}: first token {json.loads(out)['first_token']}, plan {json.loads(out)['plan']}")
        packages = json.loads((image.stages[bill].root / "meshfill.spdx.json").read_text())["packages"]
        size = subprocess.run(["du", "-sxm", final.root], check=True, capture_output=True, text=True).stdout.split()[0]
        print(f"image of {size} MB, bill of materials with {len(packages)} packages")


if __name__ == "__main__":
    main()
