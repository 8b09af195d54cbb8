#!/usr/bin/env python3
"""The commands of README.md and docs/quickstart.md, run verbatim and in order from clean copies of this repository.

Usage: readme_test.py PATH_OF_MESHFILL [unittest arguments]

A fenced block `sh` holds commands. `on=NAME` says on which of two machines: network namespaces with homes of their own, which
meet in `ssh` and `scp` alone. A block `text` is what the last command prints: `…` stands for anything, and as a line for any
lines; in a block `text measured` every number stands for any number. A server keeps its terminal: the next command there fails,
until the page says "another terminal", which is a new shell, or "Stop … with Ctrl-C".
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
KIND, PACKAGE, CHART = "deploy/kubernetes/overlays/kind", "tests/deploy/check-package.sh", "deploy/kubernetes/base"
# Commands that do not run here: why, and where the same stands that is run or checked: {file: what it says}.
NOT_RUN = {
    "cmake --preset release -DMESHFILL_BUILD_TESTS=OFF": (
        "a whole build", {PACKAGE: ["cmake --preset release -DMESHFILL_BUILD_TESTS=OFF"]}),
    "cmake --build --preset release": ("a whole build", {PACKAGE: ["cmake --build --preset release"]}),
    "cmake --install build/release --prefix ~/.local": (
        "wants that build", {"tests/deploy/install_test.py": ['"cmake", "--install", BUILD, "--prefix"']}),
    "cpack --config build/release/CPackConfig.cmake -B build/packages": (
        "wants that build", {PACKAGE: ['cpack --config "$MESHFILL_BUILD/CPackConfig.cmake" -B']}),
    "sudo apt install ./build/packages/meshfill_*.deb": (
        "installs on this machine", {PACKAGE: ["packages/meshfill_*.deb", "apt-get install -y"]}),
    "pip install huggingface_hub": ("wants the network", {CHART + "/model.yaml": ["huggingface_hub=="]}),
    "hf download Qwen/Qwen3-0.6B --local-dir build/qwen3-0.6b": ("wants the network: the hub's own command", {}),
    "meshfill serve --model build/qwen3-0.6b --set pool.embedded.ranks=4": (
        "wants the download", {"docs/quickstart.md": ["meshfill serve --model build/bytes --set pool.embedded.ranks=4"]}),
    "pip install './python[tokenizers]'": ("wants the network", {"tests/python/run.sh": ["python[bf16,tokenizers]"]}),
    "python -m meshfill prefill --server 127.0.0.1:50051 --text README.md --tokenizer build/qwen3-0.6b": (
        "wants what pip installs", {"tests/python/cli_test.py": ['"prefill"', '"--text"', '"--tokenizer"']}),
    "kind create cluster": ("wants docker", {}),
    "docker build -f deploy/Dockerfile -t meshfill:0.1.0-cpu .": (
        "wants docker", {"tests/deploy/check_image.py": ['"Dockerfile"'], KIND + "/kustomization.yaml": ["newTag: 0.1.0-cpu"]}),
    "kind load docker-image meshfill:0.1.0-cpu": (
        "wants a cluster", {KIND + "/kustomization.yaml": ["kind load docker-image meshfill:0.1.0-cpu"]}),
    f"kubectl apply -k {KIND}": ("wants a cluster", {"tests/deploy/manifests.py": ["kubectl", "kustomize"]}),
    "kubectl -n meshfill wait --timeout=5m --for=condition=Available deployment/meshfill-front-end": (
        "wants a cluster", {KIND + "/kustomization.yaml": ["namespace: meshfill"],
                            KIND + "/demo-model-front-end.yaml": ["kind: Deployment", "name: meshfill-front-end"]}),
    "kubectl -n meshfill port-forward service/meshfill 50051": (
        "wants a cluster", {CHART + "/front-end.yaml": ["kind: Service", "name: meshfill\n", "port: 50051"]}),
    "head -c 4000 README.md | meshfill prefill --server 127.0.0.1:50051 --tokens - --format bytes": (
        "wants that cluster", {"tests/deploy/check_pods.py": ["prefill"]}),
    "pip install vllm==0.32.0 './python[vllm]'": (
        "wants the network", {"tests/python/vllm_venv.py": ['VLLM = "0.32.0"'], "deploy/vllm.Dockerfile": ["v0.32.0", "python[vllm]"]}),
    "vllm serve build/qwen3-0.6b --dtype bfloat16 --kv-transfer-config '{\n"
    '  "kv_connector": "MeshfillConnector",\n'
    '  "kv_connector_module_path": "meshfill.vllm",\n'
    '  "kv_role": "kv_consumer",\n'
    '  "kv_connector_extra_config": {"server": "127.0.0.1:50051", "min_tokens": 8192}}\'': (
        "wants what pip installs", {"tests/python/vllm_test.py": ["MeshfillConnector", "meshfill.vllm", "kv_consumer", "min_tokens"]}),
    "curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\\n  -d @build/request.json": (
        "wants vLLM", {"tests/python/vllm_test.py": ['"/v1/completions"']}),
    "curl -s http://127.0.0.1:9464/metrics | grep '^meshfill_requests_total'": (
        "wants that server", {"server/observe/metric_families.h": ['"meshfill_requests_total"']}),
}
# What these do is never run, even where the line is not the one above.
NEVER_RUN = {"cmake", "cpack", "ctest", "curl", "docker", "hf", "kind", "kubectl", "pip", "python", "sudo", "vllm"}
# Verbatim but for a smaller number or a shorter prompt, or without what nothing here uses.
BENCH = "meshfill bench prefill --model build/M2 --tokens {} --tile 2x2 {}--repeats {}"
SHORT_PROMPT = "SECURITY.md"  # README.md as a prompt takes ten seconds: one command sends it whole, without a server
SHORTENED = {
    "meshfill bench attention": ("attention", "attention --tokens 256 --repeats 1"),
    "meshfill bench attention --dtype f32": ("attention", "attention --tokens 256 --repeats 1"),
    BENCH.format(32768, "--compare 1x1 ", 5): ("32768", "512"),
    BENCH.format(262144, "", 1): ("262144", "512"),
    "meshfill prefill --server 127.0.0.1:50051 --tokens README.md --format bytes": ("README.md", SHORT_PROMPT),
    **{f"python3 -m venv build/{name} && . build/{name}/bin/activate": ("venv", "venv --without-pip") for name in ("python", "vllm")},
}
# In $MACHINES/bin, in front of the real ones: another machine is another namespace, and another home.
COMMANDS = {
    "ssh": 'exec ip netns exec "$1" env HOME="$MACHINES/$1" bash -c "cd && ${*:2}"',
    "scp": 'to=${!#}; exec cp "${@:1:$#-1}" "$MACHINES/${to%%:*}/${to#*:}"',
}
# What tests/run.sh calls, so that it says what it would do. There is no PyPI.
RECORDED = {"cmake": 'echo "$(basename "$0") $*" >>"$RECORD"', "dpkg-query": "echo installed", "nvidia-smi": "exit 1",
            "python3": "exit 1"}


def parts(text):
    """[(prose before it, words of the fence, lines)] of a document's fenced blocks; the prose behind the last has no fence."""
    pieces = re.split(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S)
    found = [(prose, fence.split(), body.rstrip("\n")) for prose, fence, body in zip(pieces[::3], pieces[1::3], pieces[2::3])]
    return [*found, (pieces[-1], [], "")]


def commands(body):
    """The commands of a block. Lines go on after a backslash, within quotes, and until the end of a loop or a here-document."""
    command = ""
    for line in body.split("\n"):
        command += line + "\n"
        parsed = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False)
        if parsed.returncode == 0 and not parsed.stderr and not line.endswith("\\"):  # of a here-document without its end it warns
            yield command.strip()
            command = ""
    if command:
        raise AssertionError(f"an unfinished command: {command}")


def matches(expected, printed, measured):
    patterns = []
    for line in expected.split("\n"):
        pattern = re.escape(line).replace("…", ".+?")
        if measured:
            pattern = re.sub(r"\d(?:[\d,]|\\\.)*", r"[\\d,.]+", pattern)
            pattern = re.sub(r"(?:\\ )+", r" +", pattern)
        patterns.append("(?s:.*)" if line == "…" else pattern)
    return re.fullmatch("\n".join(patterns), printed.strip("\n")) is not None


class Shell:
    """A bash on one machine, a terminal: it keeps its variables from command to command, and is a server's while that runs."""

    def __init__(self, address, folder):
        self.server, self.busy, home = None, "", folder / address
        environment = {**os.environ, "HOME": str(home), "MACHINES": str(folder), "PATH": f"{folder}/bin:{os.environ['PATH']}",
                       "MESHFILL": MESHFILL, "MESHFILL_DEMO_TOKENS": "512"}
        environment.pop("XDG_CACHE_HOME", None)
        self.log = folder / f"{address}.log"
        self.bash = subprocess.Popen(["ip", "netns", "exec", address, "bash"], cwd=home / "meshfill", env=environment, text=True,
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
        self.log.write_text("")  # the background job opens it later, and an earlier server may have been ready
        status, pid = self.run(f"{command} >{shlex.quote(str(self.log))} 2>&1 &\necho $!")
        if status != 0:
            raise AssertionError(f"{command}: {pid}")
        self.server, self.busy = int(pid.split()[-1]), command
        deadline = time.monotonic() + SECONDS
        while not READY.search(self.log.read_text()):
            alive = self.run(f"kill -0 {self.server}")[0] == 0
            if not alive or time.monotonic() > deadline:
                raise AssertionError(f"{command} is not ready: {self.log.read_text()}")
            time.sleep(0.05)

    def stop(self):
        """Ctrl-C: the server drains."""
        if self.server is not None:
            status, printed = self.run(f"kill -INT {self.server}; wait {self.server}")
            self.server = None
            if status not in (0, 130):
                raise AssertionError(f"a server ended with status {status}: {printed}")

    def close(self):
        if self.server is not None:
            self.run(f"kill -KILL {self.server}; wait {self.server}")
        self.bash.stdin.close()
        self.bash.wait(SECONDS)
        self.bash.stdout.close()


class Page:
    """A document whose commands are typed into terminals, as its reader would."""

    def __init__(self, name, folder):
        self.name, self.folder, self.used = name, folder, set()
        self.shells = {machine: [] for machine in MACHINES}  # the last one is the reader's
        self.printed = None

    def follow(self, text):
        for machine in MACHINES:
            self.open(machine)
        try:
            for prose, fence, body in parts(text):
                if re.search(r"\bStop\b[^.]*\bCtrl-C\b", prose):
                    self.stop()
                on = next((word.removeprefix("on=") for word in fence if word.startswith("on=")), "first")
                if re.search(r"\banother\s+terminal\b", prose) and fence[:1] == ["sh"]:
                    self.open(on)
                if fence[:1] == ["text"]:
                    self.compare(body, "measured" in fence)
                elif fence[:1] == ["sh"]:
                    for command in commands(body):
                        self.type(command, list(MACHINES) if on == "both" else [on])
            if left := [shell.busy for shells in self.shells.values() for shell in shells if shell.server is not None]:
                raise AssertionError(f"{self.name} does not say when to stop {left}")
        finally:
            for shells in self.shells.values():
                for shell in shells:
                    shell.close()

    def open(self, machine):
        self.shells[machine].append(Shell(MACHINES[machine], self.folder))

    def stop(self):
        for machine in reversed(MACHINES):
            for shell in self.shells[machine]:
                shell.stop()

    def compare(self, expected, measured):
        if self.printed is None:
            raise AssertionError(f"{self.name}: what prints this? {expected}")
        if not matches(expected, self.printed, measured):
            raise AssertionError(f"{self.name} says\n{expected}\nbut it is\n{self.printed}")

    def type(self, command, machines):
        if command in NOT_RUN:
            self.used.add(command)
            return
        if command.split()[0] in NEVER_RUN:
            raise AssertionError(f"{self.name}: nothing runs this: {command}")
        if command in SHORTENED:
            self.used.add(command)
            command = command.replace(*SHORTENED[command], 1)
        for machine in machines:
            shell = self.shells[machine][-1]
            if shell.server is not None:
                raise AssertionError(f"{self.name}: {command}\nis typed into the terminal of\n{shell.busy}")
            if re.match(r"meshfill (serve|worker)\b", command):
                shell.start(command)
                self.printed = None
                continue
            record = shell.log.with_suffix(".record")
            status, self.printed = shell.run(f"RECORD={record} PATH={self.folder}/recorded:$PATH {command}"
                                             if command == "tests/run.sh" else command)
            if status != 0:
                raise AssertionError(f"{self.name}: {command}\n{self.printed}")


class PagesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        files = subprocess.run(["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True)
        for address in MACHINES.values():
            clone = cls.folder / address / "meshfill"
            for name in filter(None, files.stdout.decode().split("\0")):
                if (ROOT / name).is_file():
                    (clone / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, clone / name)
            built = clone / "build/release/server/meshfill"
            built.parent.mkdir(parents=True)
            built.symlink_to(MESHFILL)
        for folder, programs in (("bin", COMMANDS), ("recorded", {**RECORDED, "ctest": RECORDED["cmake"]})):
            (cls.folder / folder).mkdir()
            for name, script in programs.items():
                (cls.folder / folder / name).write_text(f"#!/bin/bash\n{script}\n")
                (cls.folder / folder / name).chmod(0o755)
        connect()
        cls.used = set()

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def follow(self, name, text=None):
        page = Page(name, self.folder)
        page.follow(text or (ROOT / name).read_text())
        self.used.update(page.used)

    def test_1_readme(self):
        self.follow("README.md")
        out = self.folder / MACHINES["first"] / "meshfill/build/run-local"
        for picture in ("mesh.svg", "ring.svg"):
            self.assertIn("<svg", (out / picture).read_text())
        expected, _ = make_demo_model.continuation((out / "document").read_bytes())
        for name in ("mesh", "ring", "one"):
            self.assertEqual(json.loads((out / f"{name}.json").read_text())["first_token"], expected, name)
        # "Install" in README builds the same folder without tests.
        record = (self.folder / f"{MACHINES['first']}.record").read_text().splitlines()
        self.assertIn("cmake --preset release -DMESHFILL_BUILD_TESTS=ON", record)
        self.assertTrue(record[-1].startswith("ctest --preset release --no-tests=error"), record)

    def test_2_quick_starts(self):
        self.follow("docs/quickstart.md")
        request = json.loads((self.folder / MACHINES["first"] / "meshfill/build/request.json").read_text())
        self.assertGreater(len(request["prompt"]), 50000)

    def test_3_every_exception_is_needed(self):
        self.assertEqual(self.used, {*NOT_RUN, *SHORTENED})

    def test_what_is_not_run_stands_where_it_is_checked(self):
        for command, (reason, evidence) in NOT_RUN.items():
            self.assertTrue(reason, command)
            for path, texts in evidence.items():
                for text in texts:
                    self.assertIn(text, (ROOT / path).read_text(), f"{path}: {command}")
            for word in shlex.split(command):
                if re.match(r"(deploy|configs|docs)/", word):
                    self.assertTrue((ROOT / word).exists(), command)
        served, = (command for command in NOT_RUN if command.startswith("vllm serve"))
        self.assertEqual(json.loads(shlex.split(served)[-1])["kv_role"], "kv_consumer")

    def test_what_is_planted_in_a_page_is_found(self):
        page = (ROOT / "docs/quickstart.md").read_text()
        page = page[:page.index("### A real model")].replace("--tokens README.md", f"--tokens {SHORT_PROMPT}")
        for old, new, message in (
                ("--format bytes", "--format byts", "byts"),
                ("--svg build/plan.svg", "--svg nowhere/plan.svg", "nowhere"),
                ("tokens          1,000,000\n", "tokens          1,000,000 of them\n", "but it is"),
                ("tokens/s        9,197\n", "", "but it is"),
                ("In another terminal", "Then", "is typed into the terminal of"),
                ("Stop the server with Ctrl-C", "Go on", "does not say when to stop"),
                ("--out build/bytes", "--out build/other", "not ready"),
                ("echo '[1", "pip install meshfil\necho '[1", "nothing runs this")):
            self.assertEqual(page.count(old), 1, old)
            for name in ("bytes", "other"):
                shutil.rmtree(self.folder / MACHINES["first"] / "meshfill/build" / name, ignore_errors=True)
            with self.assertRaisesRegex(AssertionError, message):
                self.follow("planted", page.replace(old, new))

    def test_kept_server_serves_on(self):
        shell = Shell(MACHINES["second"], self.folder)
        self.addCleanup(shell.close)
        status, printed = shell.run("deploy/run-local.sh --keep")
        self.assertEqual(status, 0, printed)
        prefill, kill = re.search(r"(meshfill prefill .*)", printed)[1], re.search(r"(kill \d+)", printed)[1]
        self.assertIn(" --tokens README.md ", prefill)
        status, printed = shell.run(prefill.replace("meshfill", "$MESHFILL", 1).replace("README.md", SHORT_PROMPT))
        self.assertEqual(status, 0, printed)
        self.assertEqual(shell.run(kill)[0], 0)


class ChecksTest(unittest.TestCase):
    """What the pages are read with."""

    def test_commands_are_told_apart(self):
        body = "a=1\nb \\\n  --c 'x\ny'\nfor i in 1 2; do\n  echo $i\ndone\ncat <<'E'\nx\nE\nd"
        self.assertEqual(list(commands(body)), ["a=1", "b \\\n  --c 'x\ny'", "for i in 1 2; do\n  echo $i\ndone",
                                                "cat <<'E'\nx\nE", "d"])
        with self.assertRaises(AssertionError):
            list(commands("echo 'x"))

    def test_output_is_compared(self):
        self.assertTrue(matches("a 12 … c", "a 12 anything at all c\n", False))
        self.assertTrue(matches("…\na 12\n…", "x\ny\na 12\nz", False))
        for expected, printed in (("a 12", "a 13"), ("a …", "a"), ("a …", "b c"), ("a", "a\nb"), ("a.c", "abc"), ("…\na", "a\nb"),
                                  ("a …\nb", "a c\nd\nb")):
            self.assertFalse(matches(expected, printed, False), (expected, printed))
        self.assertTrue(matches("x   1.5 s  24,322", "x 13.25 s    9", True))
        self.assertFalse(matches("x 1.5 s", "x much s", True))
        self.assertFalse(matches("x 1.5 s", "y 1.5 s", True))

    def test_blocks_are_found_with_what_is_said_before(self):
        self.assertEqual(parts("t\n```sh on=a\nb\n```\nc\n```text\nd\ne\n```\nf\n"),
                         [("t\n", ["sh", "on=a"], "b"), ("\nc\n", ["text"], "d\ne"), ("\nf\n", [], "")])


def connect():
    """Two machines on one cable."""
    steps = ["mount -t tmpfs none /run", *(f"ip netns add {address}" for address in MACHINES.values()),
             "ip link add cable0 netns {} type veth peer name cable1 netns {}".format(*MACHINES.values())]
    for index, address in enumerate(MACHINES.values()):
        steps += [f"ip -n {address} addr add {address}/24 dev cable{index}", f"ip -n {address} link set cable{index} up",
                  f"ip -n {address} link set lo up"]
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
