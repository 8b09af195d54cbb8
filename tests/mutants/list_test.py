#!/usr/bin/env python3
"""Every mutant of the list applies to the sources as they are, and names a test that there is.

Usage: list_test.py BUILD
The mutants themselves are planted by run.py; one that no longer applies would be found there alone.
"""
import pathlib
import sys
import tempfile
import unittest

import mutant_list
from mutated_build import MutatedBuild

ENTRY = """
[[mutant]]
name = "one_more"
file = "x.cc"
old = '''return n;'''
new = '''return n + 1;'''
test = "x_test"
why = "It is one too many."
"""


class TheList(unittest.TestCase):
    def test_every_mutant_applies(self):
        mutants = mutant_list.load()
        self.assertGreaterEqual(len(mutants), LEAST_MUTANTS)
        self.assertEqual(mutant_list.problems(mutants, MutatedBuild(mutant_list.ROOT, BUILD).tests), [])


class WhatIsWrong(unittest.TestCase):
    """Entries that do not apply are named."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "x.cc").write_text("int F(int n) {\n  return n;\n}\n")

    def problems(self, text, tests=("x_test",)):
        return mutant_list.problems(mutant_list.read(text, "x.toml"), tests, self.root)

    def test_nothing(self):
        self.assertEqual(self.problems(ENTRY), [])
        self.assertIn("return n + 1;", mutant_list.read(ENTRY)[0].planted(self.root))

    def test_old_is_gone(self):
        (self.root / "x.cc").write_text("int F(int n) { return -n; }\n")
        self.assertEqual(self.problems(ENTRY), ["x.toml: one_more: old stands in x.cc 0 times, not once"])

    def test_old_is_there_twice(self):
        (self.root / "x.cc").write_text("return n; return n;")
        self.assertEqual(self.problems(ENTRY), ["x.toml: one_more: old stands in x.cc 2 times, not once"])

    def test_nothing_is_changed(self):
        self.assertEqual(self.problems(ENTRY.replace("n + 1", "n")), ["x.toml: one_more: old and new are the same"])

    def test_the_file_is_gone(self):
        self.assertEqual(self.problems(ENTRY.replace("x.cc", "y.cc")), ["x.toml: one_more: there is no y.cc"])

    def test_the_test_is_gone(self):
        self.assertEqual(self.problems(ENTRY, ("y_test",)), ["x.toml: one_more: ctest has no x_test"])

    def test_a_name_stands_twice(self):
        self.assertEqual(self.problems(ENTRY + ENTRY), ["x.toml: one_more: the name stands in the list 2 times"] * 2)

    def test_a_key_is_missing_or_unknown(self):
        with self.assertRaisesRegex(ValueError, r"x.toml: one_more: missing \['why'\], unknown \['reason'\]"):
            mutant_list.read(ENTRY.replace("why", "reason"), "x.toml")


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1))
    LEAST_MUTANTS = 150
    unittest.main()
