#!/usr/bin/env python3
"""Prints how much of each parser has run, by gcov, and fails below 0.95 (tests/coverage.sh).

Usage: line_coverage.py --build DIR [--lines]      (DIR: where the parsers were compiled for gcov, and have run)
       line_coverage.py --sources                  (the parsers' sources, as CMake takes a list)
"""
import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST = 0.95
PARSERS = {
    "safetensors": ["engine/model/safetensors.cc", "engine/model/safetensors_folder.cc", "engine/model/strict_json.cc"],
    "model config": ["engine/model/family.cc", "engine/model/language_model.cc", "engine/model/model_config.cc",
                     "engine/model/rope_config.cc",
                     *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "engine/model/families").glob("*.cc"))],
    "YAML config": ["server/config/address.cc", "server/config/closest_name.cc", "server/config/config.cc",
                    "server/config/config_reader.cc", "server/config/config_units.cc", "server/config/config_yaml.cc",
                    "server/config/tenants.cc"],
    "scenario": ["server/cli/scenario.cc"],
    "speed profile": ["engine/speed/pool_profile.cc"],
    "tokens of a file": ["server/cli/token_file.cc"],
    "certificates": ["server/access/tls_files.cc"],
    "credentials": ["server/access/access.cc", "server/access/callers.cc"],
    "request stream": ["server/api/decoded.h", "server/api/plan_proto.cc", "server/api/prefill_stream.cc",
                       "server/api/traceparent.cc", "server/api/wide_token.cc"],
    "statuses": ["server/api/status_details.cc", "server/queue/refusal.cc"],
    "KV requests": ["server/api/kv_fetch.cc", "server/api/kv_fetch_stream.cc", "server/api/slab_reader.cc"],
    "KV parts": ["server/pool/holder_call.cc", "server/pool/pool_kv_reader.cc"],
    "HTTP pages": ["server/observe/gzip.cc", "server/observe/http_pages.cc"],
    "control messages": ["server/pool/control_service.cc", "server/pool/kv_directory.cc", "server/pool/leader.cc",
                         "server/pool/link_survey.cc", "server/pool/live_runs.cc", "server/pool/membership.cc",
                         "server/pool/offered_speed.cc", "server/pool/run_coordinator.cc", "server/pool/run_placer.cc",
                         "server/pool/worker/worker_machine.cc"],
    "run plan": ["server/pool/run_plan.cc"],
    "data plane": ["engine/comm/gloo/gloo.cc", "engine/comm/gloo/gloo_rendezvous.cc", "engine/comm/gloo/tls_channel.cc"],
}


def read_counts(build):
    """{file: {line: times that it has run}}, of the checkout's files: a line of a header may be in several objects."""
    counts = {}
    for notes in build.rglob("*.gcno"):
        report = subprocess.run(["gcov", "--json-format", "--stdout", notes.name], cwd=notes.parent, check=True,
                                capture_output=True, text=True).stdout
        for file in json.loads(report)["files"]:
            source = pathlib.Path(file["file"])
            source = (source if source.is_absolute() else build.resolve() / source).resolve()
            if not source.is_relative_to(ROOT):
                continue
            lines = counts.setdefault(str(source.relative_to(ROOT)), {})
            for line in file["lines"]:
                number = line["line_number"]
                lines[number] = max(lines.get(number, 0), line["count"])
    return counts


def ranges(numbers):
    """[1, 2, 3, 7] as "1-3, 7"."""
    found = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--build", type=pathlib.Path)
    what.add_argument("--sources", action="store_true")
    parser.add_argument("--lines", action="store_true", help="also print the lines that nothing has run")
    options = parser.parse_args()
    if options.sources:
        print(";".join(file for files in PARSERS.values() for file in files if file.endswith(".cc")))
        return 0
    counts = read_counts(options.build)
    low = 0
    for name, files in PARSERS.items():
        of_parser = [(file, counts.get(file, {})) for file in files]
        total = sum(len(lines) for _, lines in of_parser)
        run = sum(count > 0 for _, lines in of_parser for count in lines.values())
        missing = [file for file, lines in of_parser if not lines]
        share = run / total if total and not missing else 0
        low += share < LEAST
        print(f"{name:20} {share:.3f}   {run} of {total} lines{'' if share >= LEAST else '   BELOW ' + str(LEAST)}")
        for file, lines in of_parser:
            not_run = [line for line, count in lines.items() if count == 0]
            print(f"  {file:44} {1 - len(not_run) / max(1, len(lines)):.3f}" if lines else f"  {file}: NOT BUILT")
            if options.lines and not_run:
                print(f"    {ranges(not_run)}")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
