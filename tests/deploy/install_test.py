#!/usr/bin/env python3
"""What `cmake --install` installs, and what cpack puts into a Debian package: it runs, and its manual and completion are whole.

Usage: install_test.py BUILD_FOLDER PATH_OF_MESHFILL [unittest arguments]
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "deploy"))
import make_manual  # noqa: E402

SCRIPT = """\
source {script}
COMP_WORDS=({words} {word})
COMP_CWORD={last}
_meshfill
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def run(*command, **options):
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True, **options).stdout


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.prefix = cls.folder / "installed"
        run("cmake", "--install", BUILD, "--prefix", cls.prefix)
        cls.pages = list(make_manual.commands(MESHFILL))

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def test_the_program_runs_where_it_is_installed(self):
        self.assertEqual(run(self.prefix / "bin/meshfill", "--version"), run(MESHFILL, "--version"))
        examples = self.prefix / "share/doc/meshfill/configs"
        self.assertEqual({each.name for each in examples.glob("*.yaml")}, {each.name for each in (ROOT / "configs").glob("*.yaml")})

    def test_what_the_documents_have_people_load_is_there(self):
        documents = self.prefix / "share/doc/meshfill/docs"
        links = {(page, link) for page in documents.glob("*.md")
                 for link in re.findall(r"\]\((\.\./(?:deploy|configs)/[^)#]+)", page.read_text())}
        self.assertGreater(len(links), 5)
        self.assertEqual({(page.name, link) for page, link in links if not (page.parent / link).is_file()}, set())

    def test_every_command_has_a_page_with_every_option(self):
        self.assertGreater(len(self.pages), 10)
        manual = self.prefix / "share/man/man1"
        self.assertEqual({each.name for each in manual.iterdir()}, {f"{'-'.join(('meshfill', *path))}.1" for path, _ in self.pages})
        for path, text in self.pages:
            page = (manual / f"{'-'.join(('meshfill', *path))}.1").read_text()
            self.assertIn(f".TH {'-'.join(('meshfill', *path)).upper()} ", page)
            for option, _ in make_manual.options(text):
                self.assertIn(option.replace("-", "\\-"), page, path)
            for name in make_manual.subcommands(text):
                self.assertIn(name.replace("-", "\\-"), page.replace("make-model", "make\\-model"), path)

    def complete(self, *words):
        """What the shell offers after these words, of which the last is under way."""
        *before, word = ("meshfill", *words)
        script = SCRIPT.format(script=self.prefix / "share/bash-completion/completions/meshfill", words=" ".join(before),
                               word=f"'{word}'", last=len(before))
        return run("bash", "-c", script, cwd=self.folder).split()

    def test_completion_offers_commands_options_and_files(self):
        for path, text in self.pages:
            offered = self.complete(*path, "")
            self.assertEqual(set(offered), {*make_manual.subcommands(text), *(name for name, _ in make_manual.options(text))}, path)
        self.assertEqual(self.complete("pre"), ["prefill"])
        self.assertEqual(self.complete("bench", "sch"), ["schedules"])
        self.assertEqual(self.complete("prefill", "--log"), ["--logits-out"])
        self.assertEqual(self.complete("serve", "--config", "inst"), ["installed"])
        self.assertEqual(self.complete("prefill", "--tokens", "inst"), ["installed"])
        self.assertEqual(self.complete("prefill", "--top-k", ""), [])

    @unittest.skipUnless(shutil.which("dpkg-deb"), "this is no Debian")
    def test_the_debian_package_is_whole(self):
        run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", self.folder / "packages")
        (package,) = (self.folder / "packages").glob("meshfill_*.deb")
        self.assertRegex(package.name, r"^meshfill_\d+\.\d+\.\d+_\w+\.deb$")
        self.assertRegex(run("dpkg-deb", "--field", package, "Depends"), r"\blibc6\b.*libgrpc\+\+|libgrpc\+\+.*libc6")
        run("dpkg-deb", "--extract", package, self.folder / "unpacked")
        self.assertEqual(run(self.folder / "unpacked/usr/bin/meshfill", "--version"), run(MESHFILL, "--version"))
        for path in ("share/man/man1/meshfill-serve.1", "share/bash-completion/completions/meshfill", "share/doc/meshfill/README.md"):
            self.assertTrue((self.folder / "unpacked/usr" / path).is_file(), path)

    def test_options_are_read_from_help(self):
        text = "x\n\nOptions:\n  -h,--help   Print\n  --a FILE    b\n  --c-d N:INT in [1 - 2]   e\n      --no\n\nSubcommands:\n  f g\n"
        self.assertEqual(make_manual.options(text), [("--help", ""), ("--a", "FILE"), ("--c-d", "N")])
        self.assertEqual(make_manual.subcommands(text), ["f"])
        self.assertEqual(re.findall(r"--\w", make_manual.completion([((), text)]).split("esac")[1])[0], "--h")


if __name__ == "__main__":
    BUILD, MESHFILL = (pathlib.Path(each).resolve() for each in sys.argv[1:3])
    del sys.argv[1:3]
    unittest.main(verbosity=2)
