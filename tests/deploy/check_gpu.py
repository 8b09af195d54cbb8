#!/usr/bin/env python3
"""Runs one part of tests/deploy/check-gpu.sh on a machine with a GPU and prints its table.

Usage: check_gpu.py all|check|measure FOLDER      FOLDER: what check-gpu.sh --build has packed

The steps stand in check_gpu_steps.py, in the order of their importance; each has a limit, and all of them
$MESHFILL_GPU_MINUTES together (9.5): what is left when that is over is not begun, and says so.
"""
import json
import os
import pathlib
import subprocess
import sys
import time

import check_gpu_steps

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MOST_COLUMNS = 100  # of a result in the table


class Runner:
    """Runs steps, each with a limit, all of them within `minutes`, and keeps their rows."""

    def __init__(self, folder, device, minutes, device_kind="cuda"):
        self.folder = pathlib.Path(folder)
        self.device = device            # its name; empty: none
        self.device_kind = device_kind  # as --device has it
        self.end = time.monotonic() + 60 * minutes
        self.rows = []
        # PyTorch's wheels have cuBLAS and NCCL, too, where CUDA's own folder has not.
        wheels = sorted(map(str, pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/lib")))
        self.libraries = ":".join([f"{self.folder}/lib", os.environ.get("LD_LIBRARY_PATH", ""), *wheels])

    def environment(self):
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries, "MESHFILL_PARITY_DIR": str(ROOT / "tests/parity")}

    def step(self, name, target, limit, body):
        begin = time.monotonic()
        own_limit, limit = limit, min(limit, self.end - begin)
        if not self.device:
            result, verdict = "not run: no device", "-"
        elif limit < 5:
            result, verdict = "not run: out of time", "-"
        else:
            try:
                result, met = body(limit)
                verdict = "met" if met else "NOT MET"
            except check_gpu_steps.NotRun as reason:
                result, verdict = f"not run: {reason}", "-"
            except subprocess.TimeoutExpired:
                result, verdict = f"not over after {limit:.0f} s", "NOT MET" if limit == own_limit else "-"
            except (check_gpu_steps.Failed, OSError, ValueError, KeyError) as error:
                result, verdict = " ".join(str(error).split()) or type(error).__name__, "NOT MET"
        result = result if len(result) <= MOST_COLUMNS else result[: MOST_COLUMNS - 1] + "…"
        seconds = time.monotonic() - begin
        self.rows.append((name, result, target, verdict, f"{seconds:.0f} s"))
        print(f"... {name}: {result} [{verdict}]", file=sys.stderr, flush=True)

    def program(self, name, *arguments, limit, environment=None, wrapper=(), statuses=(0,)):
        """Runs one of the packed programs; its standard output."""
        path = self.folder / "bin" / name
        if not path.exists():
            raise check_gpu_steps.NotRun(f"{name} is not in the package")
        done = subprocess.run(
            [*map(str, wrapper), path, *map(str, arguments)],
            capture_output=True, text=True, timeout=limit,
            env={**self.environment(), **(environment or {})},
        )
        if done.returncode == 77:
            raise check_gpu_steps.NotRun(done.stdout.strip().splitlines()[-1].removeprefix("not run: ") if done.stdout.strip() else "no device")
        if done.returncode not in statuses:
            tail = (done.stderr.strip() or done.stdout.strip()).splitlines()
            failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
            raise check_gpu_steps.Failed(f"{name} ended with {done.returncode}: {(failed or tail or [''])[-1]}")
        return done.stdout if done.returncode == 0 else done.stderr

    def test(self, name, limit, wrapper=(), arguments=()):
        output = self.program(name, *arguments, limit=limit, wrapper=wrapper, environment={"MESHFILL_TEST_DEVICE": self.device_kind})
        passed = [line for line in output.splitlines() if "[  PASSED  ]" in line]
        if not passed or " 0 test" in passed[-1]:
            raise check_gpu_steps.Failed(f"{name}: no test passed")
        return passed[-1].split("]")[1].strip().rstrip("."), True

    def bench(self, name, *arguments, limit):
        arguments = ["--device", self.device_kind, *arguments, "--json"]
        return json.loads(self.program("meshfill", "bench", name, *arguments, limit=limit))

    def torch(self, *arguments, limit):
        script = ROOT / "tests/deploy/check_gpu_torch.py"
        done = subprocess.run([sys.executable, script, *map(str, arguments)], capture_output=True, text=True, timeout=limit)
        if done.returncode != 0:
            raise check_gpu_steps.NotRun(f"PyTorch's {arguments[0]}: {(done.stderr.strip().splitlines() or [''])[-1]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def table(self):
        rows = [("step", "result", "target", "", "took"), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def status(self):
        verdicts = [row[3] for row in self.rows]
        if not self.device:
            return 77
        return 0 if all(verdict == "met" for verdict in verdicts) else 1


def device_name():
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def main(arguments):
    if len(arguments) != 2 or arguments[0] not in check_gpu_steps.PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        minutes = float(os.environ.get("MESHFILL_GPU_MINUTES", "9.5"))
    except ValueError:
        print("check_gpu.py: MESHFILL_GPU_MINUTES is no number of minutes", file=sys.stderr)
        return 2
    device = device_name()
    run = Runner(arguments[1], device, minutes)
    check_gpu_steps.PARTS[arguments[0]](run)
    print(f"\n{device or 'no device'}: {arguments[0]}\n")
    print(run.table())
    return run.status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
