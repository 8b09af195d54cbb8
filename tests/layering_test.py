#!/usr/bin/env python3
"""Dependencies between folders run one way: proto <- kernels <- engine <- server (DESIGN section 2).

Reads the includes of every source. The kernels know no proto; CUDA headers appear only under kernels/cuda and in the
NCCL communicator.
"""
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
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
CUDA_HEADER = re.compile(r"^(cuda|cublas|nccl|nvrtc|cudnn)")


def sources(folder):
    for suffix in ("*.h", "*.cc", "*.cu", "*.cuh"):
        yield from (ROOT / folder).rglob(suffix)


def includes(path):
    return INCLUDE.findall(path.read_text())


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

    def test_kernels_and_engine_know_no_proto(self):
        for folder in ("kernels", "engine"):
            for path in sources(folder):
                for include in includes(path):
                    self.assertNotRegex(include, r"grpc|protobuf|\.pb\.h", f"{path.relative_to(ROOT)}")

    def test_cuda_headers_stay_in_their_place(self):
        for folder in ALLOWED:
            for path in sources(folder):
                name = str(path.relative_to(ROOT))
                if name.startswith("kernels/cuda/") or name.startswith("engine/comm/nccl"):
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
