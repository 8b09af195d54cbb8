"""Generates the gRPC stubs from the repository's proto/ while the wheel is built.

The proto is looked for, in this order, in
  $MESHFILL_PROTO            a folder that holds meshfill/v1/prefill.proto
  ./proto                    an unpacked sdist: `sdist` below puts the file there
  ../proto                   a checkout
  $PWD/proto, $PWD/../proto  a checkout, where pip older than 21.3 builds in a copy of this folder alone
"""

import os
import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PROTO = pathlib.PurePath("meshfill/v1/prefill.proto")
HERE = pathlib.Path(__file__).resolve().parent


def find_proto() -> pathlib.Path:
    """The folder that holds PROTO; SystemExit with the places tried where there is none."""
    tried = []
    if os.environ.get("MESHFILL_PROTO"):
        tried.append(pathlib.Path(os.environ["MESHFILL_PROTO"]))
    caller = pathlib.Path(os.environ.get("PWD", os.curdir)).resolve()
    tried += [HERE / "proto", HERE.parent / "proto", caller / "proto", caller.parent / "proto"]
    for folder in tried:
        if (folder / PROTO).is_file():
            return folder
    places = ", ".join(str(folder) for folder in tried)
    raise SystemExit(f"{PROTO} is in none of {places}; set MESHFILL_PROTO to the repository's proto folder")


def generate_stubs(package_root: pathlib.Path) -> list:
    """Writes meshfill/v1/ below package_root; returns the files."""
    from grpc_tools import protoc

    proto = find_proto()
    package_root.mkdir(parents=True, exist_ok=True)
    status = protoc.main(
        ["protoc", f"-I{proto}", f"--python_out={package_root}", f"--grpc_python_out={package_root}", str(proto / PROTO)]
    )
    if status != 0:
        raise SystemExit(f"protoc failed on {proto / PROTO}")
    folder = package_root / "meshfill" / "v1"
    init = folder / "__init__.py"
    init.write_text('"""Stubs of proto/meshfill/v1, generated when the wheel was built."""\n')
    return [init, folder / "prefill_pb2.py", folder / "prefill_pb2_grpc.py"]


class BuildPy(build_py):
    """build_py, and the stubs: beside the sources for an editable install, else in the build folder."""

    def run(self):
        super().run()
        root = HERE if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib)
        self.stubs = [str(path) for path in generate_stubs(root)]

    def get_outputs(self, *args, **kwargs):
        return super().get_outputs(*args, **kwargs) + getattr(self, "stubs", [])


class Sdist(sdist):
    """sdist, with the proto that the wheel is built from."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        target = pathlib.Path(base_dir) / "proto" / PROTO
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(find_proto() / PROTO, target)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
