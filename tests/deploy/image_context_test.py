#!/usr/bin/env python3
"""The build context of the image (deploy/Dockerfile.dockerignore) has all that the build reads, and nothing that is not for it.

Usage: image_context_test.py [unittest arguments]
"""
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from check_image import ROOT, ignored, in_context


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


if __name__ == "__main__":
    unittest.main()
