#!/usr/bin/env python3
"""Plants mistakes that nobody thought of: random lines, changed at random, against the tests that stand nearest.

Usage: tests/mutants/fresh.py FOLDER… [--count 50] [--seed S]      (FOLDER: engine, kernels/cpu, server/queue/refusal.cc …)
       needs universalmutator from PyPI (its rules for C++ are what changes a line)

A mutant counts if it compiles to other code than the source: those that do not compile, or compile to the same object, are
drawn again. Its tests are those whose binary contains its file: first the one named after the file, then those that include its
header, those of the same folder of tests/, and others, the smallest first. They run until one fails; of the others --tests at
most. Survivors are printed as diffs. Each
is either a change that nothing can see, or a test that is missing. The same seed draws the same mutants of the same sources.
"""
import argparse
import concurrent.futures
import contextlib
import difflib
import filecmp
import io
import os
import pathlib
import random
import subprocess
import sys

import mutant_list
from mutated_build import DoesNotBuild, Edition, MutatedBuild, Unchanged
from run import LEAST_LIMIT, LIMIT_FACTOR

SUFFIXES = (".cc", ".h", ".cuh")
RULES = ["universal.rules", "c_like.rules", "cpp.rules"]


class Draw:
    """Random mutants (file, line number, text before, text after) of the files below some folders."""

    def __init__(self, root, folders, seed):
        try:
            from universalmutator.mutator import mutants_regexp
        except ImportError:
            raise SystemExit("this needs universalmutator: pip install universalmutator") from None
        self._mutants_of = mutants_regexp
        self._root = root
        self._random = random.Random(seed)
        listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=root, capture_output=True, text=True, check=True)
        self._lines = []  # of all files, so that long ones are drawn more often
        for file in listed.stdout.split():
            if file.endswith(SUFFIXES) and not file.startswith("tests/"):
                self._lines += [(file, number) for number in code_lines((root / file).read_text())]
        if not self._lines:
            raise SystemExit(f"no C++ below {', '.join(folders)}")

    def __iter__(self):
        drawn = set()
        while True:
            file, number = self._random.choice(self._lines)
            line = (self._root / file).read_text().splitlines(keepends=True)[number]
            with contextlib.redirect_stdout(io.StringIO()):
                made = self._mutants_of([line], RULES, ignorePatterns=[], ignoreStringOnly=True)
            texts = sorted({entry[1] for entry in made if without_strings(entry[1]) != without_strings(line)})
            if not texts:
                continue
            text = self._random.choice(texts)
            if (file, number, text) not in drawn:
                drawn.add((file, number, text))
                yield file, number, line, text


def code_lines(text):
    """The numbers, from 0, of lines that hold more than a comment, an include or a bracket."""
    return [number for number, line in enumerate(text.splitlines())
            if not line.lstrip().startswith(("//", "#", "namespace", "using ")) and any(c.isalnum() for c in line)]


def without_strings(line):
    return "".join(part for number, part in enumerate(line.split("//")[0].split('"')) if number % 2 == 0)


class Nearest:
    """The tests of a file, the nearest first."""

    def __init__(self, build):
        self._build = build
        self._sources = {}  # test -> the sources of its own that are below tests/
        self._texts = {}    # test -> what stands in them
        self._sizes = {}    # test -> the objects of its binaries
        for test in sorted(build.tests):
            outputs = build.outputs(test)
            if not all((build.build / output).exists() for output in outputs):
                continue
            objects = {name: words for output in outputs for name, words in build.binary(output).objects.items()}
            sources = [os.path.relpath(words[words.index("-c") + 1], build.root) for words in objects.values()]
            self._sources[test] = [source for source in sources if source.startswith("tests/")]
            self._texts[test] = "".join((build.root / source).read_text() for source in self._sources[test])
            self._sizes[test] = len(objects)

    def of(self, file):
        """(tests, how many of them include the file's header or are of its folder)."""
        stem, parent = pathlib.Path(file).stem, pathlib.Path(file).parent
        folder = f"tests/{parent}"
        header = f'#include "{pathlib.Path(file).with_suffix(".h")}"'

        def distance(test):
            by_name = test == f"{stem}_test"
            includes = header in self._texts[test]
            folders = {str(pathlib.Path(source).parent) for source in self._sources[test]}
            # kernels/cuda has its tests in tests/kernels, as cuda_….
            beside = folder in folders or (f"tests/{parent.parent}" in folders and parent.name in test.split("_"))
            is_binary = bool(self._sources[test])  # else a script runs it: whole processes
            return not by_name, not includes, not beside, not is_binary, self._sizes[test], test

        found = [test for test in self._sources
                 if any(self._build.users(output, file) for output in self._build.outputs(test))]
        distances = sorted(distance(test) for test in found)
        near = sum(not all(each[:3]) for each in distances)
        return [each[-1] for each in distances], near


def same_code(build, file, tests, mutated, work):
    """Whether the mutant's objects are those of the unchanged file under the build's own flags."""
    own = Edition(build, file, (build.root / file).read_text(), work / "own", flags=lambda _: [])
    other = Edition(build, file, mutated, work / "other", flags=lambda _: [])
    try:
        for output in build.outputs(tests[0]):
            left, right = own.objects(output), other.objects(output)
            if any(not filecmp.cmp(left[name], right[name], shallow=False) for name in left):
                return False
        return True
    finally:
        own.remove()
        other.remove()


def judge(build, nearest, unchanged, candidate, work, most_tests):
    """(verdict, details): "found", "SURVIVED", or why it does not count."""
    file, number, _, text = candidate
    tests, near = nearest.of(file)
    if not tests:
        return "in no test", ""
    lines = (build.root / file).read_text().splitlines(keepends=True)
    lines[number] = text
    mutated = "".join(lines)
    edition = Edition(build, file, mutated, work / "mutant")
    passed = []
    try:
        for output in build.outputs(tests[0]):
            edition.objects(output)
        for test in tests:
            outcome = edition.run(test, "", LEAST_LIMIT)
            if outcome.skipped:
                continue
            if not outcome.passed:
                before = unchanged.outcome(file, test, "")
                if not before.passed:
                    continue
                limit = LIMIT_FACTOR * before.seconds
                if outcome.timed_out and limit > LEAST_LIMIT:
                    outcome = edition.run(test, "", limit)
            if not outcome.passed:
                return "found", f"{test} {outcome.how}"
            if not passed and same_code(build, file, tests, mutated, work):
                return "the same code", ""
            passed.append(test)
            if len(passed) == near + most_tests:
                break
    except DoesNotBuild:
        return "does not compile", ""
    finally:
        edition.remove()
    return "SURVIVED", f"passed: {', '.join(passed)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--tests", type=int, default=12, help="the most tests of other folders that may pass before a mutant has survived")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--build", type=pathlib.Path, default=mutant_list.ROOT / "build/release", help="what is built there is asked")
    options = parser.parse_args()

    build = MutatedBuild(mutant_list.ROOT, options.build)
    build.clear()
    nearest = Nearest(build)
    unchanged = Unchanged(build)
    draw = enumerate(Draw(mutant_list.ROOT, options.folders, options.seed))
    found, survivors, redrawn = 0, [], {}
    print(f"{options.count} mutants of {' '.join(options.folders)} (--seed {options.seed})", flush=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        while found + len(survivors) < options.count:
            batch = [next(draw) for _ in range(options.count - found - len(survivors))]
            judged = pool.map(lambda entry: judge(build, nearest, unchanged, entry[1], build.work / str(entry[0]), options.tests), batch)
            for (_, candidate), (verdict, details) in zip(batch, judged):
                file, number, before, after = candidate
                if verdict not in ("found", "SURVIVED"):
                    redrawn[verdict] = redrawn.get(verdict, 0) + 1
                    continue
                found += verdict == "found"
                print(f"{verdict} {file}:{number + 1}: {details}", flush=True)
                if verdict == "SURVIVED":
                    survivors.append(candidate)
                    diff = difflib.unified_diff([before], after.splitlines(keepends=True), n=0)
                    print("".join(list(diff)[3:]), end="", flush=True)
    build.clear()
    print(f"{found} found, {len(survivors)} survived; drawn again: "
          + (", ".join(f"{count} {why}" for why, count in sorted(redrawn.items())) or "none"))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
