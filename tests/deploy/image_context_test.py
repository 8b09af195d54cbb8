#!/usr/bin/env python3
"""The build context of the image (deploy/Dockerfile.dockerignore) has all that the build reads, and nothing that is not for it.
Where check_image.py takes packages from a mirror of https, the stages without authorities can check its certificate.

Usage: image_context_test.py [unittest arguments]
"""
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
from unittest import mock

from check_image import AUTHORITIES, ROOT, Image, Stage, ignored, in_context


def configure(folder):
    """cmake, as deploy/image/build.sh runs it; it names each file that is missing."""
    return subprocess.run(["cmake", "--preset", "release", "-DMESHFILL_BUILD_TESTS=OFF", "-DMESHFILL_CUDA=OFF"],
                          cwd=folder, capture_output=True, text=True, check=False)


class ImageContextTest(unittest.TestCase):
    def test_the_build_can_be_configured_from_it(self):
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"], check=True,
                                capture_output=True, text=True).stdout.splitlines()
        paths = [path for path in map(pathlib.Path, listed) if in_context(path, ignored()) and (ROOT / path).is_file()]
        self.assertEqual([path for path in paths if path.parts[0] in ("docs", "tests", "python")], [])
        with tempfile.TemporaryDirectory() as folder:
            context = pathlib.Path(folder) / "src"
            for path in paths:
                (context / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, context / path)
            done = configure(context)
            self.assertEqual(done.returncode, 0, done.stderr)
            (context / "deploy" / "packaging.cmake").unlink()  # the test can fail
            self.assertNotEqual(configure(context).returncode, 0)

    def test_a_mirror_of_https_can_be_checked_without_the_images_authorities(self):
        for mirror, lends in (("https://mirror/debian", True), ("http://mirror/debian", False)):
            with tempfile.TemporaryDirectory() as name, mock.patch.object(Stage, "run") as run:
                base = Stage(pathlib.Path(name) / "base")
                (base.root / AUTHORITIES).parent.mkdir(parents=True)
                (base.root / AUTHORITIES).write_text("authorities")
                image = Image(pathlib.Path(name), base, mirror)
                image.do_from("debian:12-slim AS runtime")
                self.assertIn("rm -rf /etc/ssl/certs", run.call_args.args[0])
                image.do_from("runtime AS cpu")
                cpu = image.stages["cpu"]
                self.assertEqual("APT_CONFIG" in cpu.environment, lends)
                if lends:
                    config = lent(cpu, cpu.environment["APT_CONFIG"]).read_text()
                    bundle, = re.findall(r'^Acquire::https::CAInfo "(.*)";$', config)
                    self.assertEqual(lent(cpu, bundle).read_text(), "authorities")


def lent(stage, path):
    """The file that a mount puts at a path of a stage."""
    folder, _, name = path.rpartition("/")
    return pathlib.Path(stage.mounts[folder]) / name


if __name__ == "__main__":
    unittest.main()
