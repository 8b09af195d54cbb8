#!/usr/bin/env python3
"""Dependencies run one way: proto <- kernels <- engine <- server, and one way inside engine/ and server/.

Reads the includes of every source. The kernels know no proto; CUDA headers appear only under kernels/cuda and in the
NCCL communicator. A folder holds at most 25 concepts: a header and its source count once.
"""
import collections
import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What each folder may include, besides itself and the system.
ALLOWED = {
    "kernels": set(),
    "engine": {"kernels"},
    "server": {"kernels", "engine", "meshfill", "google"},
}
# The inner order: a folder includes those that its line names, and needs each. Nothing includes engine/sim but the
# commands.
INNER = {
    "engine/mesh": set(),
    "engine/schedule": {"engine/mesh"},
    "engine/model": set(),
    "engine/model/families": {"engine/model"},
    "engine/comm": {"engine/mesh"},
    "engine/comm/gloo": {"engine/comm"},
    "engine/comm/nccl": {"engine/comm"},
    "engine/plan": {"engine/mesh", "engine/schedule", "engine/model"},
    "engine/speed": {"engine/model", "engine/plan"},
    "engine/kv": {"engine/mesh", "engine/model"},
    "engine/run": {"engine/mesh", "engine/schedule", "engine/model", "engine/comm", "engine/plan", "engine/kv"},
    "engine/devices": {"engine/model", "engine/plan", "engine/comm"},
    "engine/devices/cpu": {"engine/devices", "engine/model", "engine/speed", "engine/comm/gloo"},
    "engine/devices/cuda": {"engine/devices", "engine/model", "engine/plan", "engine/speed", "engine/comm/nccl"},
    "engine/sim": {"engine/mesh", "engine/schedule", "engine/model", "engine/plan"},
    "engine": {"engine/mesh", "engine/schedule", "engine/model", "engine/comm", "engine/plan", "engine/kv", "engine/run",
               "engine/speed", "engine/devices", "engine/devices/cpu", "engine/devices/cuda"},
    "server/config": set(),
    "server/pictures": set(),
    "server/observe": {"server/config", "server/pictures"},
    "server/access": {"server/config", "server/observe"},
    "server/listener": {"server/config", "server/observe", "server/access"},
    "server/queue": {"server/config", "server/observe"},
    "server/api": {"server/config", "server/observe", "server/access", "server/listener", "server/queue"},
    "server/pool": {"server/config", "server/observe", "server/access", "server/listener", "server/api"},
    "server/pool/worker": {"server/config", "server/observe", "server/access", "server/listener", "server/api", "server/pool"},
    "server/cli": {"server/config", "server/access", "server/api"},
    "server/cli/commands": {"server/config", "server/pictures", "server/api", "server/pool", "server/cli",
                            "server"},
    "server/cli/bench": {"server/config", "server/queue", "server/api", "server/pool", "server/pool/worker", "server/cli",
                         "server/cli/commands"},
    "server": {"server/config", "server/observe", "server/api", "server/pool", "server/pool/worker"},
}
# The binary's root, which knows the commands.
ABOVE_ALL = {"server/main.cc"}
MOST_CONCEPTS = 25
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
CUDA_HEADER = re.compile(r"^(cuda|cublas|nccl|nvrtc|cudnn)")


def sources(folder):
    for suffix in ("*.h", "*.cc", "*.cu", "*.cuh"):
        yield from (ROOT / folder).rglob(suffix)


def includes(path):
    return INCLUDE.findall(path.read_text())


def folder_of(name):
    return name.rpartition("/")[0]


def included():
    """{file: [what it includes]} of engine/ and server/."""
    return {str(path.relative_to(ROOT)): includes(path) for top in ("engine", "server") for path in sources(top)}


def violations(files):
    """The includes of `files`, {file: [includes]}, that INNER does not allow."""
    found = []
    for name, names in sorted(files.items()):
        if name in ABOVE_ALL:
            continue
        folder = folder_of(name)
        for include in names:
            target = folder_of(include)
            if target.split("/")[0] != name.split("/")[0] or target == folder:
                continue
            if target not in INNER.get(folder, set()):
                found.append(f"{name} includes {include}")
    return found


def arrows(files):
    """{folder: {folders}} of `files`, {file: [includes]}: who includes whom inside engine/ and inside server/."""
    found = collections.defaultdict(set)
    for name, names in files.items():
        folder = folder_of(name)
        targets = {folder_of(include) for include in names} if name not in ABOVE_ALL else set()
        found[folder] |= {each for each in targets if each.split("/")[0] == name.split("/")[0] and each != folder}
    return found


def circle(order):
    """A folder that reaches itself by `order`, {folder: {folders}}; None: there is none."""
    for start in order:
        reached, todo = set(), list(order[start])
        while todo:
            folder = todo.pop()
            if folder == start:
                return start
            if folder not in reached:
                reached.add(folder)
                todo.extend(order.get(folder, ()))
    return None


def concepts(files):
    """{folder: concepts} of source files."""
    names = collections.defaultdict(set)
    for name in files:
        folder, _, base = name.rpartition("/")
        names[folder].add(base.split(".")[0])
    return {folder: len(each) for folder, each in names.items()}


class LayeringTest(unittest.TestCase):
    def test_folders_include_only_what_they_may(self):
        project_folders = set(ALLOWED) | {"meshfill", "tests"}
        seen = 0
        for folder, allowed in ALLOWED.items():
            for path in sources(folder):
                for include in includes(path):
                    top = include.split("/")[0]
                    if top not in project_folders:
                        continue
                    seen += 1
                    self.assertIn(top, allowed | {folder}, f"{path.relative_to(ROOT)} includes {include}")
        self.assertGreater(seen, 50, "the sources were not found")

    def test_the_inner_order_is_kept(self):
        self.assertEqual(violations(included()), [])

    def test_no_arrow_is_allowed_that_nobody_needs(self):
        needed = arrows(included())
        for folder, allowed in INNER.items():
            self.assertEqual(allowed - needed[folder], set(), f"{folder} may include these, and does not")
        self.assertEqual(arrows({"engine/a/b.cc": ["engine/c/d.h", "engine/a/e.h", "kernels/f.h"]}),
                         {"engine/a": {"engine/c"}})

    def test_the_inner_order_has_no_circle(self):
        self.assertIsNone(circle(INNER))

    def test_every_folder_has_its_line(self):
        folders = {folder_of(name) for name in included()} - {"engine/comm/gloo/gloo_debian/gloo/common"}
        self.assertEqual(folders, set(INNER))

    def test_a_planted_violation_is_found(self):
        planted = {"engine/comm/planted.cc": ["engine/comm/communicator.h", "engine/plan/planner.h", "kernels/dtype.h"]}
        self.assertEqual(violations({**included(), **planted}), ["engine/comm/planted.cc includes engine/plan/planner.h"])
        self.assertEqual(violations({"engine/mesh/planted.h": ["engine/prefill_engine.h"]}),
                         ["engine/mesh/planted.h includes engine/prefill_engine.h"])
        self.assertEqual(violations({"server/api/planted.cc": ["server/pool/leader.h", "engine/kv/kv_store.h"]}),
                         ["server/api/planted.cc includes server/pool/leader.h"])
        self.assertIn(circle({**INNER, "engine/mesh": {"engine/plan"}}), INNER)

    def test_folders_stay_small(self):
        for folder, count in concepts(included()).items():
            self.assertLessEqual(count, MOST_CONCEPTS, folder)
        self.assertEqual(concepts(["a/b.h", "a/b.cc", "a/c.h"]), {"a": 2})

    def test_kernels_and_engine_know_no_proto(self):
        for folder in ("kernels", "engine"):
            for path in sources(folder):
                for include in includes(path):
                    self.assertNotRegex(include, r"grpc|protobuf|\.pb\.h", f"{path.relative_to(ROOT)}")

    def test_the_queue_knows_no_grpc(self):
        for path in sources("server/queue"):
            for include in includes(path):
                self.assertNotRegex(include, r"grpc", f"{path.relative_to(ROOT)}")

    def test_cuda_headers_stay_in_their_place(self):
        for folder in ALLOWED:
            for path in sources(folder):
                name = str(path.relative_to(ROOT))
                if name.startswith("kernels/cuda/") or name.startswith("engine/comm/nccl/"):
                    continue
                for include in includes(path):
                    self.assertNotRegex(include, CUDA_HEADER, name)

    def test_every_include_is_from_the_root(self):
        for folder in ALLOWED:
            for path in sources(folder):
                for include in re.findall(r'#\s*include\s+"([^"]+)"', path.read_text()):
                    self.assertNotIn("..", include, f"{path.relative_to(ROOT)}")


if __name__ == "__main__":
    unittest.main()
