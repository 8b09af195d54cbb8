#!/usr/bin/env python3
"""Every command of meshfill that a document shows is one that the binary has, with options and keys that it knows.

Usage: commands_test.py PATH_OF_MESHFILL [unittest arguments]

README.md and docs/quickstart.md run in readme_test.py. The commands elsewhere are held to the help of each command: its
name, its options, those that it wants, and the keys of `--set`. A span of code may show a part of a command.
"""
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

import docs_test

sys.path.insert(0, str(docs_test.ROOT / "deploy"))
import make_manual  # noqa: E402

ROOT = docs_test.ROOT
COMMENTED = [*sorted(ROOT.glob("configs/**/*.yaml")), ROOT / "deploy/prometheus/prometheus.yml", ROOT / "python/README.md"]


def blocks(text):
    """Code that stands in lines of its own, as one text for each block."""
    yield from re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S)
    yield from re.findall(r"(?:^    .*\n)+", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)


def spans(text):
    return re.findall(r"`([^`]+)`", re.sub(r"^(```.*?^```|    .*$)", "", text, flags=re.M | re.S))


def shown(text):
    """[(words after `meshfill`, whether it is whole)] of a document."""
    found = []
    for block in blocks(text):
        for line in re.sub(r"\\\n\s*", " ", block).split("\n"):
            if match := re.match(r"\s*(?:docker run\s.*\s)?meshfill(?::\S+)?\s+(.*)", line):
                found.append((match[1], True))
    for span in spans(text):
        span = " ".join(span.split())
        if match := re.match(r"meshfill (.*)", span):
            found.append((match[1], False))
        elif re.match(r"(serve|worker|prefill|plan|simulate|make-model|status|cancel|bench [\w|]+) --", span):
            found.append((span, False))
    return [(words_of(text), whole) for text, whole in found]


def comments(text):
    """Commands in the comments of a YAML file are whole."""
    return [(words_of(each), True) for each in re.findall(r"^# {2,}meshfill\s+(.*)$", text, re.M)]


def words_of(line):
    """Without what the shell takes for itself: what follows a pipe, a redirection, a comment, and a note in brackets."""
    words = []
    for word in shlex.split(re.sub(r" {2,}\(.*\)$", "", line), comments=True):
        if re.match(r"[|<>&]", word):
            break
        words.append(word)
    return words


def complaints(words, whole, helps, keys):
    """What is wrong with a command, by {words after meshfill: its help} and the keys of the configuration."""
    path, rest = [], list(words)
    while rest and tuple(path) in helps and make_manual.subcommands(helps[tuple(path)]):
        if rest[0].startswith("-") or "…" in rest[0]:
            break
        names = rest.pop(0).split("|")  # `attention|gemm` is one or the other
        for name in names:
            if name not in make_manual.subcommands(helps[tuple(path)]):
                yield f"there is no command {' '.join([*path, name])}"
                return
        path.append(names[0])
    text = helps[tuple(path)]
    known = dict(make_manual.options(text))
    given = [word.split("=")[0] for word in rest if word.startswith("--")]
    for option in given:
        if option not in known:
            yield f"{' '.join(path)} has no option {option}"
    wanted = set(re.findall(r"^  (?:-\w,)?(--[\w-]+)[^\n]* REQUIRED", text, re.M)) if whole else set()
    if "--help" not in given and (missing := sorted(wanted - set(given))):
        yield f"{' '.join(path)} wants {', '.join(missing)}"
    for option, value in zip(rest, rest[1:]):
        key = value.split("=")[0]
        if option == "--set" and key not in keys:
            yield f"there is no key {key}"


class CommandsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.helps = dict(make_manual.commands(MESHFILL))
        cls.keys = docs_test.configuration_keys()

    def check(self, commands, path):
        for words, whole in commands:
            found = list(complaints(words, whole, self.helps, self.keys))
            self.assertEqual(found, [], f"{path}: meshfill {' '.join(words)}")

    def test_documents_show_commands_that_are_there(self):
        count = 0
        for path in docs_test.DOCUMENTS:
            commands = shown(docs_test.read(path))
            self.check(commands, path)
            count += len(commands)
        self.assertGreater(count, 40)

    def test_comments_show_commands_that_are_there(self):
        for path in COMMENTED:
            text = path.read_text()
            self.check(shown(text) if path.suffix == ".md" else comments(text), path)
        self.assertGreater(len(comments((ROOT / "configs/local.yaml").read_text())), 1)

    @unittest.skipUnless(shutil.which("openssl"), "there is no openssl")
    def test_the_pools_certificates_are_made_as_operating_says(self):
        section = re.search(r"^### Certificates\n(.*?)^### ", docs_test.read("docs/operating.md"), re.M | re.S)[1]
        commands = "".join(blocks(section)).replace("\n    ", "\n")
        with tempfile.TemporaryDirectory() as folder:
            script = f"set -e\nkubectl() {{ echo kubectl \"$@\" >>{folder}/asked; }}\ncd {folder}\n{commands}"
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            made = pathlib.Path(folder, "meshfill-tls")
            for name, purpose in (("front-end", "sslserver"), ("worker", "sslclient")):
                subprocess.run(["openssl", "verify", "-CAfile", "ca.crt", "-purpose", purpose, f"{name}.crt"], cwd=made,
                               capture_output=True, check=True)
                asked = [line for line in pathlib.Path(folder, "asked").read_text().split("\n") if f"meshfill-{name}-tls" in line]
                self.assertEqual(len(asked), 1)
                for file in re.findall(r"--from-file=(?:\S+=)?(\S+)", asked[0]):
                    self.assertTrue((made / file).is_file(), asked)
            subprocess.run(["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "meshfill-control", "front-end.crt"],
                           cwd=made, capture_output=True, check=True)

    def test_what_is_planted_is_found(self):
        for text, message in (
            ("`meshfill prefil --tokens F`", "no command prefil"),
            ("`meshfill bench atention`", "no command bench atention"),
            ("`meshfill bench attention|gem --json`", "no command bench gem"),
            ("    meshfill plan --config F --ranks 4\n", "plan wants --tokens"),
            ("```sh\nmeshfill plan \\\n  --config F\n```\n", "plan wants --tokens"),
            ("`meshfill prefill --sever H:1`", "prefill has no option --sever"),
            ("`prefill --trace F`", "prefill has no option --trace"),
            ("    meshfill serve --config F --set pool.ranks=4\n", "no key pool.ranks"),
            ("    docker run -p 1:1 \\\n      meshfill:0.1.0-cpu serve --modl /m\n", "serve has no option --modl"),
        ):
            (words, whole), = shown(text)
            found = list(complaints(words, whole, self.helps, self.keys))
            self.assertEqual(len(found), 1, text)
            self.assertIn(message, found[0])
        for text in ("`meshfill plan`", "`meshfill bench attention|gemm --json`", "`--tokens`", "`serve --measure`",
                     "    meshfill plan --config F --tokens 5 | less  # --no\n", "    meshfill --version\n",
                     "    meshfill serve --config F --set pool.tls.ca=x &\n", "`meshfill …`"):
            for words, whole in shown(text):
                self.assertEqual(list(complaints(words, whole, self.helps, self.keys)), [], text)


if __name__ == "__main__":
    MESHFILL = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
