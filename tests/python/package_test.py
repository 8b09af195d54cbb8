"""The installed package: which Python reads it, and what type checkers need."""

import ast
import pathlib
import unittest

import meshfill

PACKAGE = pathlib.Path(meshfill.__file__).parent


class PackageTest(unittest.TestCase):
    def test_python_3_9_reads_every_file(self):
        files = sorted(PACKAGE.rglob("*.py"))
        self.assertIn(PACKAGE / "vllm" / "connector.py", files)
        for path in files:
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))

    def test_it_says_that_it_is_typed(self):
        self.assertTrue((PACKAGE / "py.typed").is_file())


if __name__ == "__main__":
    unittest.main()
