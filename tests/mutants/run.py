#!/usr/bin/env python3
"""Plants the mutants of the list one at a time, and runs the test that must find each.

Usage: tests/mutants/run.py [NAME|GLOB|FILE.toml]…        (default: all)
       tests/mutants/run.py --changed-since main          (those whose file, test or entry has changed)
       tests/mutants/run.py --sample 10 --seed 7          (ten of them, the same for the same seed; by default HEAD is the seed)
       tests/mutants/run.py --shard 1/4                   (the first quarter of them)
       tests/mutants/run.py --list

Prints for each: found (by which case), MISSED, does not build, no longer applies, or what is wrong with its test. A test that
ends by a signal or that runs into the time limit has found it, too. The build folder is only read, after Ninja has built there
what the tests need: mutated_build.py says how. Before a file's first mutant each test runs with that file unchanged, compiled
in the same way: it must pass. Fails unless all are found.
"""
import argparse
import collections
import concurrent.futures
import fnmatch
import os
import pathlib
import random
import subprocess
import sys
import time

import mutant_list
from mutated_build import DoesNotBuild, Edition, MutatedBuild, Unchanged

LEAST_LIMIT = 30  # seconds that a test may take in any case
LIMIT_FACTOR = 10  # times what it takes unchanged


def judge(build, unchanged, mutant):
    """(verdict, details, output)."""
    edition = None
    try:
        text = mutant.planted(build.root)
        before = unchanged.outcome(mutant.file, mutant.test, mutant.filter)
        if before.skipped:
            return "skipped", f"{mutant.test} does not run on this machine", ""
        if not before.passed:
            return "BROKEN", f"{mutant.test} fails without the mutant: {before.how}", before.output
        edition = Edition(build, mutant.file, text, build.work / mutant.name)
        outcome = edition.run(mutant.test, mutant.filter, max(LEAST_LIMIT, LIMIT_FACTOR * before.seconds))
    except ValueError as error:
        return "NO LONGER APPLIES", str(error), ""
    except LookupError as error:
        return "BROKEN", str(error), ""
    except (DoesNotBuild, subprocess.TimeoutExpired) as error:
        return "DOES NOT BUILD", first_error(str(error)), str(error)
    finally:
        if edition is not None:
            edition.remove()
    if outcome.passed:
        return "MISSED", f"{mutant.test} passes: {mutant.why}", outcome.output
    return "found", f"{mutant.test} {outcome.how} ({outcome.seconds:.1f} s)", outcome.output


def first_error(output):
    lines = [line for line in output.splitlines() if "error:" in line or "undefined" in line]
    return (lines or output.splitlines() or [""])[0]


def changed_files(root, revision):
    listed = subprocess.run(["git", "diff", "--name-only", revision, "--"], cwd=root, capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def head_of(root):
    """The commit, or "0" where there is no repository."""
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "0"


def chosen(mutants, options, root):
    """The mutants that the command line asks for."""
    if options.names:
        unknown = []
        picked = set()
        for name in options.names:
            stem = pathlib.Path(name).name
            found = {mutant for mutant in mutants
                     if fnmatch.fnmatch(mutant.name, name) or pathlib.Path(mutant.listed_in).name == stem}
            unknown += [] if found else [name]
            picked |= found
        if unknown:
            raise SystemExit(f"no mutant is called {', '.join(unknown)} (tests/mutants/run.py --list shows them)")
        mutants = [mutant for mutant in mutants if mutant in picked]
    if options.changed_since:
        changed = changed_files(root, options.changed_since)
        stems = {pathlib.Path(path).stem for path in changed}
        mutants = [mutant for mutant in mutants
                   if mutant.file in changed or mutant.listed_in in changed or mutant.test in stems]
    if options.sample is not None:
        # A header's mutants compile many objects each.
        small = sorted((mutant for mutant in mutants if mutant.file.endswith(".cc")), key=lambda mutant: mutant.name)
        options.seed = options.seed or head_of(root)
        mutants = random.Random(options.seed).sample(small, min(options.sample, len(small)))
    if options.shard:
        part, parts = (int(number) for number in options.shard.split("/"))
        mutants = mutants[part - 1 :: parts]
    return sorted(mutants, key=lambda mutant: (mutant.file, mutant.test, mutant.name))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="names, globs, or files of the list")
    parser.add_argument("--build", type=pathlib.Path, default=mutant_list.ROOT / "build/release")
    parser.add_argument("--built", action="store_true", help="the build folder is up to date: do not ask Ninja")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--changed-since", metavar="REVISION")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS", help="begin none after so long")
    parser.add_argument("--shard", metavar="I/N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="also print what compilers and tests said of those not found")
    options = parser.parse_args()

    mutants = chosen(mutant_list.load(), options, mutant_list.ROOT)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  {mutant.file}  {mutant.test}: {mutant.why}")
        return 0
    build = MutatedBuild(mutant_list.ROOT, options.build)
    wrong = mutant_list.problems(mutants, build.tests)
    if wrong:
        print("\n".join(wrong))
        return 2
    if options.sample is not None:
        print(f"a sample of {len(mutants)} (--sample {options.sample} --seed {options.seed})")
    if not options.built:
        build.prepare({mutant.test for mutant in mutants}, options.jobs)

    build.clear()
    unchanged = Unchanged(build)
    counts = collections.Counter()
    began = time.monotonic()
    def judge_in_time(mutant):
        in_time = time.monotonic() - began < options.within
        return judge(build, unchanged, mutant) if in_time else ("left out", "no time", "")

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        judged = {pool.submit(judge_in_time, mutant): mutant for mutant in mutants}
        for future in concurrent.futures.as_completed(judged):
            mutant, (verdict, details, output) = judged[future], future.result()
            counts[verdict] += 1
            print(f"{verdict:8} {mutant.name}: {details}", flush=True)
            if options.verbose and verdict != "found":
                print(output)
    build.clear()
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{len(mutants)} mutants in {time.monotonic() - began:.0f} s: {summary or 'none chosen'}")
    return 0 if set(counts) <= {"found", "skipped", "left out"} else 1


if __name__ == "__main__":
    sys.exit(main())
