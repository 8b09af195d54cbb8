#!/usr/bin/env python3
"""Every planted bug fits the sources: each hunk's lines are there, in one place.

run.sh plants them, builds and runs; that takes long. A bug that no longer fits would be found there alone.
"""
import pathlib
import re
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[3]
HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@.*\n", re.MULTILINE)


def hunks(patch):
    """(file, text before, text after) of each hunk of a patch's text."""
    for part in re.split(r"^--- a/", patch, flags=re.MULTILINE)[1:]:
        path = part[: part.index("\n")].split("\t")[0]
        starts = list(HUNK.finditer(part))
        for start, end in zip(starts, [*(hunk.start() for hunk in starts[1:]), len(part)]):
            lines = part[start.end() : end].splitlines(keepends=True)
            yield (
                path,
                "".join(line[1:] for line in lines if line[0] in " -"),
                "".join(line[1:] for line in lines if line[0] in " +"),
            )


def misfits(patch, read):
    return [path for path, before, _ in hunks(patch) if read(path).count(before) != 1]


class PlantedBugs(unittest.TestCase):
    def test_all_fit(self):
        patches = sorted(FOLDER.glob("*.patch"))
        self.assertGreater(len(patches), 30)
        for path in patches:
            with self.subTest(path.name):
                text = path.read_text()
                found = list(hunks(text))
                self.assertTrue(found, "no hunk")
                for _, before, after in found:
                    self.assertNotEqual(before, after)
                self.assertEqual(misfits(text, lambda name: (ROOT / name).read_text()), [])

    def test_one_that_does_not_fit_is_found(self):
        patch = "--- a/x.cc\n+++ b/x.cc\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
        self.assertEqual(misfits(patch, lambda _: "zero\none\ntwo\n"), [])
        self.assertEqual(misfits(patch, lambda _: "one\n"), ["x.cc"])
        self.assertEqual(misfits(patch, lambda _: "one\ntwo\none\ntwo\n"), ["x.cc"])


if __name__ == "__main__":
    unittest.main()
