"""Builds tests with some sources changed, beside a build folder that holds everything unchanged.

Nothing is built twice: the changed sources are compiled by the build's own commands, and their objects are linked in front
of its archives. A changed header compiles those objects of the test again that include it. The build folder itself stays
as it is; what is made lies in a folder below it.
"""
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time

BUILD_LIMIT = 900  # seconds for one compile or link
TIMED_OUT = "the time limit"  # how a test ended that took too long
BASIC_HEADERS = ("absl/status/statusor.h", "absl/strings/str_cat.h", "absl/strings/str_format.h", "absl/strings/str_join.h",
                 "absl/strings/str_split.h", "absl/time/time.h", "algorithm", "cmath", "cstring", "deque", "filesystem", "fstream",
                 "functional", "list", "map", "memory", "numeric", "optional", "random", "set", "sstream", "string", "thread",
                 "tuple", "variant", "vector", "nlohmann/json.hpp")
SERVER_HEADERS = (*BASIC_HEADERS, "grpcpp/grpcpp.h", "meshfill/v1/config.pb.h", "meshfill/v1/control.grpc.pb.h",
                  "meshfill/v1/prefill.grpc.pb.h")
TEST_HEADERS = ("gmock/gmock.h", "gtest/gtest.h")
HEADERS = {"engine": BASIC_HEADERS, "server": SERVER_HEADERS, "tests/engine": BASIC_HEADERS + TEST_HEADERS,
           "tests/server": SERVER_HEADERS + TEST_HEADERS}


# Random tests draw the same each time: what they find today they find tomorrow. The simulation plays many stories.
SEEDS = {"MESHFILL_SEED": "1"}
SIMULATION, SIMULATION_SEEDS = "pool_simulation_test", {"MESHFILL_FIRST_SEED": "1"}


class DoesNotBuild(Exception):
    """The compiler or the linker refused; str() is what it said."""


@dataclasses.dataclass(frozen=True)
class Test:
    name: str
    command: tuple  # of strings
    environment: tuple  # of NAME=value
    skip_code: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    passed: bool
    how: str  # the first case that failed, a signal, the time limit
    seconds: float
    skipped: bool = False
    output: str = ""

    @property
    def timed_out(self):
        return self.how == TIMED_OUT


@dataclasses.dataclass(frozen=True)
class Binary:
    """What is linked for one executable or shared library of the build."""

    link: tuple  # the command
    objects: dict  # object -> its compile command


class MutatedBuild:
    """A build folder's commands and tests. All of it may be called from several threads."""

    def __init__(self, root, build):
        self.root = root.resolve()
        self.build = build.resolve()
        self.work = self.build / f"mutants-{os.getpid()}"  # what is made
        if not (self.build / "build.ninja").is_file():
            raise SystemExit(f"{build} is no build folder of Ninja: configure it by cmake --preset release")
        self.tests = self._read_tests()
        self._binaries = {}
        self._including = None
        self._header_locks = {}
        self._lock = threading.Lock()

    def _read_tests(self):
        # ctest leaves out the command of a test that is not built yet, so that it is read from CTestTestfile.cmake.
        commands = {}
        for path in self.build.rglob("CTestTestfile.cmake"):
            for name, command in re.findall(r"^add_test\(\[=\[(.+?)\]=\] (.*)\)$", path.read_text(), re.MULTILINE):
                commands[name] = tuple(shlex.split(command))
        listed = subprocess.run(["ctest", "--show-only=json-v1"], cwd=self.build, capture_output=True, text=True, check=True)
        tests = {}
        for test in json.loads(listed.stdout)["tests"]:
            properties = {entry["name"]: entry["value"] for entry in test.get("properties", [])}
            tests[test["name"]] = Test(test["name"], commands[test["name"]], tuple(properties.get("ENVIRONMENT", [])),
                                       properties.get("SKIP_RETURN_CODE", -1))
        return tests

    def outputs(self, test):
        """The binaries of the build that the test's command or environment names, below the build folder."""
        words = [*self.tests[test].command, *(entry.partition("=")[2] for entry in self.tests[test].environment)]
        found = []
        for word in words:
            path = pathlib.Path(word)
            if path.is_absolute() and path.is_relative_to(self.build) and path != self.build:
                found.append(str(path.relative_to(self.build)))
        return sorted(set(found))

    def clear(self):
        shutil.rmtree(self.work, ignore_errors=True)

    def prepare(self, tests, jobs):
        """Builds what the tests need, unchanged."""
        targets = sorted({output for test in tests for output in self.outputs(test)})
        if targets:
            subprocess.run(["ninja", "-j", str(jobs), *targets], cwd=self.build, check=True, stdout=subprocess.DEVNULL)

    def binary(self, output):
        with self._lock:
            if output not in self._binaries:
                listed = subprocess.run(["ninja", "-t", "commands", output], cwd=self.build, capture_output=True, text=True,
                                        check=True).stdout.splitlines()
                objects = {}
                for line in listed:
                    words = shlex.split(line) if " -c " in line else []
                    if "-c" in words and "-o" in words:
                        objects[words[words.index("-o") + 1]] = words
                self._binaries[output] = Binary(tuple(_link_words(listed[-1])), objects)
            return self._binaries[output]

    def users(self, output, file):
        """The objects of a binary that a file of the sources goes into."""
        binary = self.binary(output)
        path = str(self.root / file)
        direct = [name for name, words in binary.objects.items() if words[words.index("-c") + 1] == path]
        if direct:
            return direct
        including = self._objects_including(path)
        return [name for name in binary.objects if name in including]

    def _objects_including(self, path):
        with self._lock:
            if self._including is None:
                self._including = {}
                listed = subprocess.run(["ninja", "-t", "deps"], cwd=self.build, capture_output=True, text=True, check=True)
                name = ""
                for line in listed.stdout.splitlines():
                    if line.startswith(" "):
                        file = os.path.normpath(self.build / line.strip())
                        if file.startswith(f"{self.root}/"):
                            self._including.setdefault(file, set()).add(name)
                    elif line:
                        name = line.split(":")[0]
            return self._including.get(path, set())

    def compile(self, output, name, file, overlay, made, flags):
        """The object `name` of a binary, compiled into `made` with the file below `overlay` in place of the sources'."""
        words = list(self.binary(output).objects[name])
        for flag in ("-MD", "-MMD"):
            if flag in words:
                words.remove(flag)
        for flag in ("-MT", "-MF"):
            if flag in words:
                del words[words.index(flag) : words.index(flag) + 2]
        source = words.index("-c") + 1
        compiled = os.path.relpath(words[source], self.root)
        if compiled == file:
            words[source] = str(overlay / file)
        made.parent.mkdir(parents=True, exist_ok=True)
        words[words.index("-o") + 1] = str(made)
        words = words[1:] if words[0].endswith("ccache") else words
        # The same text of __FILE__, so that equal code gives equal objects.
        words[-4:-4] = [*flags(compiled), "-w"]
        include = self._precompiled(words[:-4], compiled)
        words[-4:-4] = [f"-ffile-prefix-map={overlay}={self.root}"]
        words[1:1] = [f"-I{overlay}", *include]
        self._run(words)

    def _precompiled(self, command, file):
        """Includes a header of what most files beside `file` include, compiled once for each kind of command: parsing it takes
        longer than all the rest of a source."""
        folder = next((folder for folder in HEADERS if file.startswith(f"{folder}/")), None)
        if folder is None:
            return []
        key = hashlib.sha256("\n".join([*command, folder]).encode()).hexdigest()[:16]
        with self._lock:
            lock = self._header_locks.setdefault(key, threading.Lock())
        header = self.work / "headers" / key / "precompiled.h"
        with lock:
            if not header.is_file():
                header.parent.mkdir(parents=True)
                header.write_text("".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n"
                                          for name in HEADERS[folder]))
                self._run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
        return ["-include", str(header)]

    def link(self, output, objects, made):
        """The binary, linked into `made` with the objects {name: path} in place of its own."""
        words = list(self.binary(output).link)
        made.parent.mkdir(parents=True, exist_ok=True)
        words[words.index("-o") + 1] = str(made)
        in_front = []
        for name, path in objects.items():
            if name in words:
                words[words.index(name)] = str(path)
            else:
                in_front.append(str(path))
        place = words.index("-o")
        words[place:place] = in_front
        self._run(words)

    def _run(self, words):
        result = subprocess.run(words, cwd=self.build, capture_output=True, text=True, check=False, timeout=BUILD_LIMIT)
        if result.returncode:
            raise DoesNotBuild(result.stderr.strip() or result.stdout.strip())

    def run(self, test, cases, linked, limit):
        """Runs a test with the binaries {output: path} in place of the build's; `cases` is its filter or empty."""
        instead = {str(self.build / output): str(path) for output, path in linked.items()}
        words = [instead.get(word, word) for word in self.tests[test].command]
        environment = {**(SIMULATION_SEEDS if test == SIMULATION else SEEDS), **os.environ, "GTEST_FAIL_FAST": "1", "GTEST_COLOR": "no"}
        for entry in self.tests[test].environment:
            name, _, value = entry.partition("=")
            environment[name] = instead.get(value, value)
        if cases and str(self.build) in self.tests[test].command[0]:
            words.append(f"--gtest_filter={cases}")
        elif cases:
            words += cases.split()
        with tempfile.TemporaryDirectory(prefix="mutant-") as temporary:
            environment["TMPDIR"] = temporary
            began = time.monotonic()
            with open(pathlib.Path(temporary) / "output", "w+b") as written:
                process = subprocess.Popen(words, cwd=temporary, env=environment, stdin=subprocess.DEVNULL, stdout=written,
                                           stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    code = process.wait(limit)
                except subprocess.TimeoutExpired:
                    code = None
                finally:
                    _end_group(process)
                seconds = time.monotonic() - began
                written.seek(0)
                output = written.read().decode(errors="replace")
        how = TIMED_OUT if code is None else first_failure(output) or how_it_ended(code)
        ran = not re.search(r"^\[==========\] Running 0 tests|^Ran 0 tests", output, re.MULTILINE)
        return Outcome(code == 0 and ran, how if ran else "no case ran", seconds,
                       code == self.tests[test].skip_code, output)


class Edition:
    """The sources with another text of one file, and what is built of them. May be used from several threads."""

    def __init__(self, build, file, text, folder, flags=None):
        self._build = build
        self._file = file
        self._folder = folder
        self._flags = flags or fast_flags
        self._lock = threading.Lock()
        self._objects = {}
        overlay = folder / "source" / file
        overlay.parent.mkdir(parents=True, exist_ok=True)
        overlay.write_text(text)

    def objects(self, output):
        """{name: path} of a binary's objects that the file goes into. Raises DoesNotBuild."""
        names = self._build.users(output, self._file)
        with self._lock:
            for name in names:
                if name not in self._objects:
                    made = self._folder / name
                    self._build.compile(output, name, self._file, self._folder / "source", made, self._flags)
                    self._objects[name] = made
            return {name: self._objects[name] for name in names}

    def run(self, test, cases, limit):
        """Links what the test runs, and runs it. Raises DoesNotBuild; LookupError where the file is not in the test."""
        linked = {}
        for output in self._build.outputs(test):
            objects = self.objects(output)
            if objects:
                linked[output] = self._folder / "linked" / test / output
                self._build.link(output, objects, linked[output])
        if not linked:
            raise LookupError(f"{test} does not contain {self._file}")
        try:
            return self._build.run(test, cases, linked, limit)
        finally:
            shutil.rmtree(self._folder / "linked" / test, ignore_errors=True)

    def remove(self):
        shutil.rmtree(self._folder, ignore_errors=True)


class Unchanged:
    """What tests say of files that are compiled as their mutants are, but unchanged. Each is asked once."""

    LIMIT = 900  # seconds

    def __init__(self, build):
        self._build = build
        self._folder = build.work / "unchanged"
        self._lock = threading.Lock()
        self._editions = {}
        self._outcomes = {}  # key -> (its lock, [the outcome])

    def edition(self, file):
        with self._lock:
            if file not in self._editions:
                text = (self._build.root / file).read_text()
                self._editions[file] = Edition(self._build, file, text, self._folder / str(len(self._editions)))
            return self._editions[file]

    def outcome(self, file, test, cases):
        with self._lock:
            lock, outcome = self._outcomes.setdefault((file, test, cases), (threading.Lock(), []))
        with lock:
            if not outcome:
                outcome.append(self.edition(file).run(test, cases, self.LIMIT))
        return outcome[0]


def _end_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def fast_flags(file):
    """What is added to a compile command, so that it takes less. At -O0 loops over elements would take longer than that saves."""
    return ["-O1" if file.startswith(("kernels/", "engine/sim/")) else "-O0"]


def _link_words(line):
    for part in line.split(" && "):
        words = shlex.split(part)
        if "-o" in words:
            return words
    raise SystemExit(f"no link command: {line[:200]}")


def first_failure(output):
    found = re.search(r"^\[  FAILED  \] ([\w/.:-]+)", output, re.MULTILINE) or re.search(
        r"^(?:FAIL|ERROR): (\w+)", output, re.MULTILINE)
    return found.group(1) if found else ""


def how_it_ended(code):
    return f"signal {-code}" if code < 0 else f"exit status {code}"
