#!/usr/bin/env python3
"""Writes docs/api.md and docs/configuration.md from the comments in proto/meshfill/v1/{prefill,config}.proto.

Usage: make_api_docs.py            write them
       make_api_docs.py --check    exit 1 where a file is not what this would write
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
PROTOS = ROOT / "proto/meshfill/v1"

API = """# The API

Generated from the comments of [`prefill.proto`](../proto/meshfill/v1/prefill.proto) by `deploy/make_api_docs.py`. The server
also offers gRPC reflection and `grpc.health.v1`: service `""` says that the process lives, `meshfill.v1.PrefillService` that
it takes prefills.

    grpcurl -plaintext 127.0.0.1:50051 describe meshfill.v1.PrefillService
    grpcurl -plaintext -d '{"token_count": 1000000}' 127.0.0.1:50051 meshfill.v1.PrefillService/Plan
"""
CONFIGURATION = """# Configuration

Generated from the comments of [`config.proto`](../proto/meshfill/v1/config.proto) by `deploy/make_api_docs.py`. The file is YAML;
`--set path=value` overrides a key. Unknown and badly typed keys are refused with file, line and path. Durations and sizes have
units (`500ms`, `30s`, `2h`; `512MiB`, `8GiB`). Examples with every key: [`configs/local.yaml`](../configs/local.yaml),
[`configs/pool.yaml`](../configs/pool.yaml), [`configs/worker.yaml`](../configs/worker.yaml); of a machine with GPUs:
[`configs/h100x8.yaml`](../configs/h100x8.yaml).

| key | type | meaning |
|---|---|---|
"""
TYPES = {"google.protobuf.Duration": "duration", "string": "text", "bool": "true or false"}
DECLARATION = re.compile(r"^(service|message|enum|oneof)\s+(\w+)\s*\{(\s*\})?")
RPC = re.compile(r"^rpc\s+(\w+)\((.*?)\)\s*returns\s*\((.*?)\)")
FIELD = re.compile(r"^((?:repeated |optional )?[\w.]+)\s+(\w+)\s*=\s*(\d+);\s*(?://\s*(.*))?$")
VALUE = re.compile(r"^(\w+)\s*=\s*(\d+);\s*(?://\s*(.*))?$")


def cell(text):
    return (text or "").replace("|", "\\|")


class Section:
    def __init__(self, kind, path, comment):
        self.kind, self.path, self.comment, self.rows = kind, path, comment, []

    def lines(self):
        yield f"\n## {self.path}\n"
        if self.comment:
            yield self.comment + "\n"
        if self.kind == "service":
            for name, request, reply, comment in self.rows:
                yield f"**{name}** (`{request}`) → `{reply}`  \n{comment}\n"
        elif self.rows:
            head = ("value", "number", "meaning") if self.kind == "enum" else ("field", "type", "meaning")
            yield f"| {' | '.join(head)} |\n|---|---|---|"
            for row in self.rows:
                yield f"| `{row[0]}` | {row[1]} | {cell(row[2])} |"


def parse(text):
    """(the file's comment, sections)"""
    head, body = text.split('\nsyntax = "proto3";', 1)
    comment = "\n".join(line.removeprefix("//").removeprefix(" ") for line in head.splitlines())
    sections, open_, notes = [], [], []
    last = None  # the row that a comment on a line of its own, indented under a field's, goes on with
    for raw in body.splitlines():
        line = raw.strip()
        if line.startswith("//"):
            indented = len(raw) - len(raw.lstrip()) > 20
            if last is not None and indented:
                last[2] += " " + line[2:].strip()
            else:
                notes.append(line[2:].strip())
            continue
        last = None
        note, row = " ".join(notes), None
        if match := DECLARATION.match(line):
            kind, name, closed = match.groups()
            path = ".".join([each.path.split(".")[-1] for each in open_ if each.kind != "oneof"] + [name])
            section = Section(kind, path, note)
            if kind != "oneof":
                sections.append(section)
            if not closed:
                open_.append(section)
        elif line.startswith("}"):
            open_.pop()
        elif match := RPC.match(line):
            sections[-1].rows.append((match[1], match[2], match[3], note))
        elif open_ and (match := FIELD.match(line)):
            oneof = open_[-1].kind == "oneof"
            owner = next(each for each in reversed(open_) if each.kind == "message")
            row = [match[2], f"`{match[1]}`" + (f", one of `{open_[-1].path.split('.')[-1]}`" if oneof else ""),
                   (note + " " + (match[4] or "")).strip()]
            owner.rows.append(row)
        elif open_ and (match := VALUE.match(line)):
            row = [match[1], match[2], (note + " " + (match[3] or "")).strip()]
            open_[-1].rows.append(row)
        last = row
        notes = []
    return comment, sections


def api_reference():
    comment, sections = parse((PROTOS / "prefill.proto").read_text())
    introduction, _, statuses = comment.partition("\n\n")
    text = API + f"\n{introduction}\n\n```text\n{statuses.strip()}\n```\n"
    return text + "\n".join(line for section in sections for line in section.lines()) + "\n"


def keys(sections, path, prefix):
    """(key, type, meaning) of a message's fields, and of the messages in it."""
    for name, kind, meaning in sections[path].rows:
        kind = kind.strip("`").removeprefix("optional ")
        inner = next((each for each in (f"{path}.{kind}", kind) if each in sections), None)
        if inner:
            yield from keys(sections, inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "size" if name.endswith("_bytes") else TYPES.get(kind, "number"), meaning


def configuration_reference():
    _, sections = parse((PROTOS / "config.proto").read_text())
    rows = keys({section.path: section for section in sections}, "Config", "")
    return CONFIGURATION + "".join(f"| `{key}` | {kind} | {cell(meaning)} |\n" for key, kind, meaning in rows)


def main():
    for name, text in (("api.md", api_reference()), ("configuration.md", configuration_reference())):
        output = ROOT / "docs" / name
        if sys.argv[1:] != ["--check"]:
            output.write_text(text)
        elif not output.exists() or output.read_text() != text:
            sys.exit(f"{output} is not what make_api_docs.py writes; run it")


if __name__ == "__main__":
    main()
