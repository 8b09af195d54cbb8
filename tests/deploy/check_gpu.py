#!/usr/bin/env python3
"""Runs one part of tests/deploy/check-gpu.sh on a machine with a GPU and prints its table.

Usage: check_gpu.py check|model|compare FOLDER LOGS      FOLDER: what check-gpu.sh --build has packed

All steps together have $MESHFILL_GPU_MINUTES (9.5): what is left when that is over is not begun, and says so.
MESHFILL_GPU_DRY=1 takes the smallest shapes, for a device that the host plays, and MESHFILL_GPU_LIMITS='{"STEP": 2}'
another limit for a step, in seconds.
"""
import json
import os
import signal
import subprocess
import sys

import check_gpu_compare
import check_gpu_model
import check_gpu_run
import check_gpu_steps

PARTS = {"check": check_gpu_steps.check, "model": check_gpu_model.model, "compare": check_gpu_compare.compare}


def device_name():
    """'NVIDIA H200, 580.1'; empty: there is none."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return f"{len(lines)} × {lines[0]}" if len(lines) > 1 else (lines or [""])[0]


def stop(*_):
    raise SystemExit("check_gpu.py: told to end")  # the table follows


def main(arguments):
    if len(arguments) != 3 or arguments[0] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        minutes = float(os.environ.get("MESHFILL_GPU_MINUTES", "9.5"))
        limits = json.loads(os.environ.get("MESHFILL_GPU_LIMITS", "{}"))
    except ValueError:
        print("check_gpu.py: MESHFILL_GPU_MINUTES is no number, or MESHFILL_GPU_LIMITS no JSON", file=sys.stderr)
        return 2
    dry = os.environ.get("MESHFILL_GPU_DRY") == "1"
    part, folder, logs = arguments
    run = check_gpu_run.Runner(part, folder, logs, device_name(), minutes, limits)
    signal.signal(signal.SIGTERM, stop)
    try:
        PARTS[part](run, check_gpu_steps.DRY if dry else check_gpu_steps.FULL)
    finally:
        run.finish()
    return run.status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
