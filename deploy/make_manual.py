#!/usr/bin/env python3
"""Writes manual pages and a completion for bash from what the binary says of itself.

Usage: make_manual.py MESHFILL OUT    OUT/man1/meshfill.1, meshfill-serve.1, … and OUT/meshfill.bash

Needs help2man.
"""
import os
import pathlib
import re
import subprocess
import sys

COMPLETION = """\
# Completion of meshfill for bash, made by deploy/make_manual.py from its help.
_meshfill() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command= i
  for ((i = 1; i < COMP_CWORD; ++i)); do
    case "$command ${{COMP_WORDS[i]}}" in
{commands}
    esac
  done
  local words=
  case "$command" in
{words}
  esac
  COMPREPLY=()
  case "$before" in
{values}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o filenames -F _meshfill meshfill
"""
FILES = ("FILE", "DIR", "F")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def subcommands(text):
    _, _, listed = text.partition("\nSubcommands:\n")
    return re.findall(r"^  (\S+) ", listed, re.M)


def options(text):
    """[(option, what its value is called, "" without one)]"""
    return re.findall(r"^  (?:-\w,)?(--[\w-]+)(?: ([A-Z]\w*))?", text, re.M)


def commands(meshfill, path=()):
    """(words after meshfill, its help) of the program and of every command below it."""
    text = run(meshfill, *path, "--help")
    yield path, text
    for name in subcommands(text):
        yield from commands(meshfill, (*path, name))


def manual_page(folder, path, text, version):
    """help2man finds the program on the path, so that its page says "meshfill"."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    summary = text.split("\n")[0].strip().rstrip(".")
    page = run("help2man", "--no-info", f"--name={summary}", f"--version-string={version}", " ".join(("meshfill", *path)),
               env=environment)
    return page.replace(".TH MESHFILL ", f".TH {'-'.join(('meshfill', *path)).upper()} ", 1)


def completion(pages):
    known, words, values = [], [], {}
    for path, text in pages:
        command = " ".join(path)
        if path:
            known.append(f'      "{" ".join(path[:-1])} {path[-1]}") command="{command}" ;;')
        choices = [*subcommands(text), *(name for name, _ in options(text))]
        words.append(f'    "{command}") words="{" ".join(choices)}" ;;')
        for name, value in options(text):  # --tokens is a file of one command, a number of another
            if value in FILES or value and name not in values:
                values[name] = value
    files = "|".join(sorted(name for name, value in values.items() if value in FILES))
    others = "|".join(sorted(name for name, value in values.items() if value not in FILES))
    complete = [f'    {files}) COMPREPLY=($(compgen -f -- "$word")); return ;;', f"    {others}) return ;;"]
    return COMPLETION.format(commands="\n".join(known), words="\n".join(words), values="\n".join(complete))


def main():
    meshfill, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    (out / "man1").mkdir(parents=True, exist_ok=True)
    pages = list(commands(meshfill))
    version = run(meshfill, "--version").split()[-1]
    for path, text in pages:
        (out / "man1" / f"{'-'.join(('meshfill', *path))}.1").write_text(manual_page(meshfill.parent, path, text, version))
    (out / "meshfill.bash").write_text(completion(pages))
    (out / "made").write_text("")


if __name__ == "__main__":
    main()
