#!/usr/bin/env python3
"""Shows that a change costs no speed: two binaries in turns, and the median of the pairs' ratios.

Usage: tests/processes/same_speed.py OLD NEW [--pairs N] [--only NAME]…

Measures attention (bf16, f32), prefills of 2,048 and 32,768 tokens on one rank and as 2x2, plans of a model without windows,
and the time to the first token of 100 tokens from a server. Prints seconds of NEW over those of OLD: above 1, NEW is slower. Exits
with 1 where a median is above 1.02.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

LIMIT = 1.02


def run(binary, *arguments):
    result = subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, check=True, timeout=600)
    return result.stdout


def attention(dtype):
    def seconds(binary, _):
        return 1 / json.loads(run(binary, "bench", "attention", "--dtype", dtype, "--repeats", 3, "--json"))["flops_per_second"]

    return seconds


def prefill(tokens, tile):
    def seconds(binary, folder):
        arguments = ["--model", folder / "model", "--tokens", tokens, "--tile", tile, "--repeats", 1, "--json"]
        return json.loads(run(binary, "bench", "prefill", *arguments))["runs"][0]["seconds"]

    return seconds


def plans(binary, _):
    """Whole plans of 256, 3,600 and 4,096 ranks for a model without windows: what every version plans."""
    pools = json.loads(run(binary, "bench", "schedules", "--side", 1, "--max-cost", 1, "--json"))["pools"]
    return sum(pool["plan_seconds"] for pool in pools)


def first_token(binary, folder):
    """The median of 30 requests to one server."""
    ids = folder / "ids"
    ids.write_text(" ".join(str(i % 250) for i in range(100)))
    command = [binary, "serve", "--config", folder / "config.yaml", "--set", f"model.path={folder / 'model'}"]
    server = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)
    try:
        address = ""
        for line in server.stderr:
            if "] listening on" in line or " listening on " in line and "metrics" not in line:
                address = line.split()[-1]
            if " ready: " in line:
                break
        seconds = []
        for _ in range(30):
            result = json.loads(run(binary, "prefill", "--server", address, "--tokens", ids, "--json"))
            seconds.append(result["seconds"]["queue"] + result["seconds"]["prefill"])
        return statistics.median(seconds)
    finally:
        server.kill()
        server.communicate()


MEASURES = {
    "attention bf16": attention("bf16"),
    "attention f32": attention("f32"),
    "prefill 2048 1x1": prefill(2048, "1x1"),
    "prefill 2048 2x2": prefill(2048, "2x2"),
    "prefill 32768 1x1": prefill(32768, "1x1"),
    "prefill 32768 2x2": prefill(32768, "2x2"),
    "plans": plans,
    "first token of 100": first_token,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", action="append", choices=MEASURES, help="this measure alone; may be repeated")
    options = parser.parse_args()
    slower = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = ["--arch", "llama", "--layers", 2, "--hidden", 256, "--out", folder / "model"]
        run(options.old, "make-model", *model)
        (folder / "config.yaml").write_text(
            "listen: 127.0.0.1:0\nmetrics_listen: ''\n"
            f"pool: {{embedded: {{peak_flops: 1e11}}}}\nplan: {{profile_path: {folder / 'speed.json'}}}\n"
        )
        for what in options.only or MEASURES:
            ratios = []
            for pair in range(options.pairs):
                binaries = [options.old, options.new]
                seconds = {b: MEASURES[what](b, folder) for b in (binaries if pair % 2 == 0 else binaries[::-1])}
                ratios.append(seconds[options.new] / seconds[options.old])
            median = statistics.median(ratios)
            slower += median > LIMIT
            print(f"{what:20} {median:.3f}   ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} pairs)", flush=True)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
