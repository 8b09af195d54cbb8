"""The list of mutants: small mistakes, each with the test that must find it.

A TOML file holds the mutants of one source folder, as entries of this form:

    [[mutant]]
    name = "least_gain_is_not_asked_for"    # unique over all files
    file = "engine/plan/planner.cc"
    old = '''text that stands in the file once'''
    new = '''what stands there instead'''
    test = "planner_test"                   # the test of ctest that must fail
    filter = "Planner.*"                    # optional: its cases (--gtest_filter, or a script's arguments)
    why = "A layout that gains half a percent is taken."
"""
import collections
import dataclasses
import pathlib
import tomllib

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
REQUIRED = {"name", "file", "old", "new", "test", "why"}
KEYS = REQUIRED | {"filter"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # below the repository's root
    old: str
    new: str
    test: str
    why: str
    filter: str = ""
    listed_in: str = ""  # the TOML file, below the repository's root

    def planted(self, root=ROOT):
        """The file's text with the mistake; ValueError if it does not apply."""
        problem = misfit(self, root)
        if problem:
            raise ValueError(problem)
        return (root / self.file).read_text().replace(self.old, self.new)


def misfit(mutant, root=ROOT):
    """Why the mutant does not apply to the sources, or None."""
    path = root / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    if mutant.old == mutant.new:
        return "old and new are the same"
    count = path.read_text().count(mutant.old) if mutant.old else 0
    if count != 1:
        return f"old stands in {mutant.file} {count} times, not once"
    return None


def read(text, listed_in=""):
    """The mutants of one TOML file; ValueError names the entry that is none."""
    mutants = []
    for number, entry in enumerate(tomllib.loads(text).get("mutant", []), 1):
        name = entry.get("name", f"entry {number}")
        missing, unknown = REQUIRED - entry.keys(), entry.keys() - KEYS
        if missing or unknown:
            raise ValueError(f"{listed_in}: {name}: missing {sorted(missing)}, unknown {sorted(unknown)}")
        mutants.append(Mutant(**entry, listed_in=listed_in))
    return mutants


def load(folder=FOLDER, root=ROOT):
    """All mutants of the folder's TOML files, by file and name."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        mutants += read(path.read_text(), str(path.relative_to(root)))
    return mutants


def problems(mutants, tests, root=ROOT):
    """One line for each mutant that cannot be planted or whose test is not among `tests`."""
    found = []
    names = collections.Counter(mutant.name for mutant in mutants)
    for mutant in mutants:
        where = f"{mutant.listed_in}: {mutant.name}"
        if names[mutant.name] > 1:
            found.append(f"{where}: the name stands in the list {names[mutant.name]} times")
        problem = misfit(mutant, root)
        if problem:
            found.append(f"{where}: {problem}")
        if mutant.test not in tests:
            found.append(f"{where}: ctest has no {mutant.test}")
    return found
