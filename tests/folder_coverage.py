#!/usr/bin/env python3
"""Prints how much of each folder of engine/ and server/ the tests reach, by clang's counters (tests/coverage.sh --folders).

Usage: folder_coverage.py --summary FILE [--files]      (FILE: what llvm-cov export -summary-only printed of the binary)
       folder_coverage.py --sources                     (the sources that count, as CMake takes a list)

Fails where a folder has less than 0.95 of its lines or 0.85 of its branches. A branch is one way of a condition: each condition
has two. What is for CUDA is left out. A source that is in no binary is told, too.
"""
import argparse
import collections
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST = {"lines": 0.95, "branches": 0.85}
CUDA = ("engine/devices/cuda/", "engine/comm/nccl/")


def sources():
    """The sources, below the repository's root."""
    found = [path.relative_to(ROOT).as_posix() for top in ("engine", "server") for path in (ROOT / top).rglob("*.cc")]
    return sorted(path for path in found if not path.startswith(CUDA))


def read_counts(summary):
    """{file: {"lines": (covered, all), "branches": (covered, all)}} of the files of engine/ and server/."""
    counts = {}
    for file in summary["data"][0]["files"]:
        path = pathlib.Path(os.path.normpath(file["filename"]))  # ccache may have written "BUILD/../../server/serve.cc"
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if not name.startswith(("engine/", "server/")) or name.startswith(CUDA):
            continue
        of_file = {kind: (file["summary"][kind]["covered"], file["summary"][kind]["count"]) for kind in LEAST}
        # A header may be there twice, by either name.
        counts[name] = {kind: max(of_file[kind], counts.get(name, of_file)[kind]) for kind in LEAST}
    return counts


def by_folder(counts):
    """{folder: the sum of its files}."""
    folders = collections.defaultdict(lambda: {kind: (0, 0) for kind in LEAST})
    for file, of_file in counts.items():
        of_folder = folders[str(pathlib.PurePosixPath(file).parent)]
        for kind, (covered, count) in of_file.items():
            of_folder[kind] = (of_folder[kind][0] + covered, of_folder[kind][1] + count)
    return folders


def share(covered, count):
    return covered / count if count else 1.0


def below(of_folder):
    return [kind for kind, least in LEAST.items() if share(*of_folder[kind]) < least]


def row(name, counts):
    return f"{name:44}" + "".join(f" {share(*counts[kind]):6.3f} {f'{counts[kind][0]}/{counts[kind][1]}':>13}" for kind in LEAST)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--summary", type=pathlib.Path)
    what.add_argument("--sources", action="store_true")
    parser.add_argument("--files", action="store_true", help="also print each file")
    options = parser.parse_args()
    if options.sources:
        print(";".join(sources()))
        return 0
    counts = read_counts(json.loads(options.summary.read_text()))
    folders = by_folder(counts)
    low = 0
    print(f"{'folder':44} {'lines':>20} {'branches':>20}")
    for folder in sorted(folders):
        less = below(folders[folder])
        low += bool(less)
        print(row(folder, folders[folder]) + (f"   BELOW: {', '.join(less)}" if less else ""))
        for file in sorted(counts) if options.files else []:
            if str(pathlib.PurePosixPath(file).parent) == folder:
                print("  " + row(pathlib.PurePosixPath(file).name, counts[file]))
    missing = [file for file in sources() if file not in counts]
    if missing:
        print("in no binary: " + ", ".join(missing))
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
