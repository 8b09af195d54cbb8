#!/usr/bin/env python3
"""The commands of README.md and docs/quickstart.md, run verbatim and in order from a clean copy of this repository.

Usage: readme_test.py PATH_OF_MESHFILL [unittest arguments]

A fenced block `sh` holds commands. `on=NAME` says on which of two machines, which are network namespaces here. A block `text`
is what the last of them prints: `…` stands for anything; in a block `text measured` every number stands for any number.
`meshfill serve` and `meshfill worker` run on in the background, until the next server on that machine, or the page's end.
Needs namespaces (unshare, ip); where there are none it is skipped.
"""
import json
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "deploy"))
import make_demo_model  # noqa: E402

INSIDE = "MESHFILL_README_TEST_INSIDE"
SKIPPED = 77
SECONDS = 120 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))
MACHINES = {"first": "10.0.0.1", "second": "10.0.0.2"}
READY = re.compile(r" ready: | waits for workers| joined ")
# Commands that do not run here, by their beginning, and why.
NOT_RUN = {
    "tests/run.sh": "runs this test",
    "cmake ": "is a whole build; tests/deploy/install_test.py installs this one",
    "cpack ": "is a whole build; tests/deploy/install_test.py packs this one",
    "sudo apt install ./build/packages": "installs on this machine; tests/deploy/check-package.sh installs it on a bare one",
    "pip install": "wants the network",
    "hf download": "wants the network",
    "meshfill serve --model models/qwen3": "wants the download",
    "python -m meshfill": "wants what pip installs; tests/python has its test",
    "vllm serve": "wants what pip installs; tests/python/vllm_test.py runs it",
    "docker build": "wants docker; tests/deploy/check-image.sh takes its steps",
    "kind load": "wants a cluster",
    "kubectl": "wants a cluster; tests/deploy/check-kubernetes.sh and check-pods.sh check what it would start",
    "ssh ": "both machines have one file system here",
    "scp ": "both machines have one file system here",
}
# Verbatim but for a smaller number: what would take minutes.
SHORTENED = {
    "meshfill bench attention": ("attention", "attention --tokens 256 --repeats 1"),
    "meshfill bench prefill --model build/M2 --tokens 32768": ("32768", "512"),
    "meshfill bench prefill --model build/M2 --tokens 262144": ("262144", "512"),
}


def blocks(text):
    """[(words of the fence, lines)] of a document."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return [(fence.split(), body.rstrip("\n")) for fence, body in found]


def commands(body):
    """The commands of a block. Lines go on after a backslash, within quotes, and until the end of a loop."""
    command = ""
    for line in body.split("\n"):
        command += line + "\n"
        if subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False).returncode == 0 \
                and not line.endswith("\\"):
            yield command.strip()
            command = ""
    if command:
        raise AssertionError(f"an unfinished command: {command}")


def matches(expected, printed, measured):
    pattern = re.escape(expected).replace("…", ".+?")
    if measured:
        pattern = re.sub(r"\d(?:[\d,]|\\\.)*", r"[\\d,.]+", pattern)
        pattern = re.sub(r"(?:\\ )+", r" +", pattern)
    return re.fullmatch(pattern, printed.strip("\n")) is not None


class Shell:
    """A bash on one machine, which keeps its variables from command to command."""

    def __init__(self, machine, folder, environment):
        self.machine, self.folder = machine, folder
        self.servers = []
        self.bash = subprocess.Popen(["ip", "netns", "exec", machine, "bash"], cwd=folder / "meshfill", env=environment, text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.lines = queue.Queue()
        threading.Thread(target=lambda: [self.lines.put(line) for line in self.bash.stdout], daemon=True).start()

    def run(self, command):
        """(exit status, what it printed)"""
        self.bash.stdin.write(f"{command}\nprintf '\\n== %s\\n' $?\n")
        self.bash.stdin.flush()
        printed, deadline = "", time.monotonic() + SECONDS
        while True:
            try:
                line = self.lines.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"no end within {SECONDS} s: {command}\n{printed}") from None
            if line.startswith("== "):
                return int(line[3:]), printed
            printed += line

    def start(self, command):
        """Leaves a server running, once it is ready."""
        if command.startswith("meshfill serve"):
            self.stop()
        log = self.folder / f"{self.machine}-{len(self.servers)}.log"
        log.write_text("")  # the background job opens it later, and an earlier server may have been ready
        status, pid = self.run(f"{command} >{shlex.quote(str(log))} 2>&1 &\necho $!")
        if status != 0:
            raise AssertionError(f"{command}: {pid}")
        self.servers.append(int(pid.split()[-1]))
        deadline = time.monotonic() + SECONDS
        while not READY.search(log.read_text()):
            alive = self.run(f"kill -0 {self.servers[-1]}")[0] == 0
            if not alive or time.monotonic() > deadline:
                raise AssertionError(f"{command} is not ready: {log.read_text()}")
            time.sleep(0.05)

    def stop(self):
        """Every server drains."""
        while self.servers:
            pid = self.servers.pop()
            status, printed = self.run(f"kill -TERM {pid}; wait {pid}")
            if status != 0:
                raise AssertionError(f"a server ended with status {status}: {printed}")

    def close(self):
        self.bash.stdin.close()
        self.bash.wait(SECONDS)


class PagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        clone = cls.folder / "meshfill"
        files = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True)
        for name in filter(None, files.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (clone / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, clone / name)
        built = clone / "build/release/server/meshfill"
        built.parent.mkdir(parents=True)
        built.symlink_to(MESHFILL)
        environment = {**os.environ, "HOME": cls.temporary.name, "XDG_CACHE_HOME": str(cls.folder / "cache"), "MESHFILL": MESHFILL,
                       "MESHFILL_DEMO_TOKENS": "512"}
        connect()
        cls.shells = {machine: Shell(machine, cls.folder, environment) for machine in MACHINES}
        cls.used = set()

    @classmethod
    def tearDownClass(cls):
        for shell in cls.shells.values():
            shell.close()
        cls.temporary.cleanup()

    def shorter(self, command):
        for beginning, (old, new) in SHORTENED.items():
            if command.startswith(beginning):
                self.used.add(beginning)
                self.assertIn(old, command)
                return command.replace(old, new, 1)
        return command

    def run_page(self, path):
        printed = None
        for fence, body in blocks((ROOT / path).read_text()):
            if fence[:1] == ["text"]:
                self.assertIsNotNone(printed, f"{path}: what prints this? {body}")
                self.assertTrue(matches(body, printed, "measured" in fence), f"{path} says\n{body}\nbut it is\n{printed}")
            if fence[:1] != ["sh"]:
                continue
            on = next((word.removeprefix("on=") for word in fence if word.startswith("on=")), "first")
            machines = list(MACHINES) if on == "both" else [on]
            for command in commands(body):
                reason = [beginning for beginning in NOT_RUN if command.startswith(beginning)]
                if reason:
                    self.used.update(reason)
                    continue
                for machine in machines:
                    printed = self.run_command(path, self.shells[machine], self.shorter(command))
        for machine in reversed(MACHINES):
            self.shells[machine].stop()

    def run_command(self, path, shell, command):
        if re.match(r"meshfill (serve|worker)\b", command):
            shell.start(command)
            return None
        status, printed = shell.run(command)
        self.assertEqual(status, 0, f"{path}: {command}\n{printed}")
        return printed

    def test_1_readme(self):
        self.run_page("README.md")
        for picture in ("mesh.svg", "ring.svg"):
            self.assertIn("<svg", (self.folder / "meshfill/build/run-local" / picture).read_text())
        out = self.folder / "meshfill/build/run-local"
        expected, _ = make_demo_model.continuation((out / "document").read_bytes())
        for name in ("mesh", "ring", "one"):
            self.assertEqual(json.loads((out / f"{name}.json").read_text())["first_token"], expected, name)

    def test_2_quick_starts(self):
        self.shells["second"].run("PATH=$PWD/build/release/server:$PATH")
        self.run_page("docs/quickstart.md")

    def test_3_every_exception_is_needed(self):
        self.assertEqual(self.used, {*NOT_RUN, *SHORTENED})

    def test_kept_server_serves_on(self):
        shell = self.shells["second"]
        status, printed = shell.run("deploy/run-local.sh --keep")
        self.assertEqual(status, 0, printed)
        prefill, kill = re.search(r"(meshfill prefill .*)", printed)[1], re.search(r"(kill \d+)", printed)[1]
        status, printed = shell.run(prefill.replace("meshfill", "$MESHFILL", 1))
        self.assertEqual(status, 0, printed)
        self.assertEqual(shell.run(kill)[0], 0)


class ChecksTest(unittest.TestCase):
    """The checks of this file find what is planted."""

    def test_commands_are_told_apart(self):
        body = "a=1\nb \\\n  --c 'x\ny'\nfor i in 1 2; do\n  echo $i\ndone\nd"
        self.assertEqual(list(commands(body)), ["a=1", "b \\\n  --c 'x\ny'", "for i in 1 2; do\n  echo $i\ndone", "d"])
        with self.assertRaises(AssertionError):
            list(commands("echo 'x"))

    def test_output_is_compared(self):
        self.assertTrue(matches("a 12 … c", "a 12 anything at all c\n", False))
        for expected, printed in (("a 12", "a 13"), ("a …", "a"), ("a …", "b c"), ("a", "a\nb"), ("a.c", "abc")):
            self.assertFalse(matches(expected, printed, False), (expected, printed))
        self.assertTrue(matches("x   1.5 s  24,322", "x 13.25 s    9", True))
        self.assertFalse(matches("x 1.5 s", "x much s", True))
        self.assertFalse(matches("x 1.5 s", "y 1.5 s", True))

    def test_blocks_are_found(self):
        self.assertEqual(blocks("t\n```sh on=a\nb\n```\nc\n```text\nd\ne\n```\n"), [(["sh", "on=a"], "b"), (["text"], "d\ne")])


def connect():
    """Two machines on one cable."""
    steps = ["mount -t tmpfs none /run", *(f"ip netns add {machine}" for machine in MACHINES),
             "ip link add cable0 netns first type veth peer name cable1 netns second"]
    for index, (machine, address) in enumerate(MACHINES.items()):
        steps += [f"ip -n {machine} addr add {address}/24 dev cable{index}", f"ip -n {machine} link set cable{index} up",
                  f"ip -n {machine} link set lo up"]
    for step in steps:
        subprocess.run(step.split(), check=True)


if __name__ == "__main__":
    MESHFILL = str(pathlib.Path(sys.argv[1]).resolve())
    if INSIDE not in os.environ:
        namespaces = ["unshare", "--map-root-user", "--net", "--mount"]
        if not shutil.which("ip") or subprocess.run([*namespaces, "ip", "netns"], capture_output=True, check=False).returncode != 0:
            print("skipped: this machine gives no network namespaces (unshare, ip)")
            sys.exit(SKIPPED)
        os.environ[INSIDE] = "1"
        os.execvp(namespaces[0], [*namespaces, sys.executable, *sys.argv])
    del sys.argv[1]
    unittest.main(verbosity=2)
