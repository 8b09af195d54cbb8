"""How tests/deploy/check-gpu.sh runs a step: with a limit, in a process group of its own, its whole output in one log.

A step that fails says why in the table, and what needs it is left out. Nothing that a step does loses the table.
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
MOST_COLUMNS = 100   # of a result in the table
SHOWN_LINES = 8      # of a step that is not met, on the screen
LEAST_SECONDS = 5    # with less left, a step is not begun


class Failed(Exception):
    pass


class NotRun(Exception):
    pass


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def end_group(process):
    """With everything that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class Runner:
    """Runs steps, each within its limit and all within `minutes`; keeps their rows, and the figures that they measure."""

    def __init__(self, part, folder, logs, device, minutes, limits=None):
        self.part, self.folder, self.logs = part, pathlib.Path(folder), pathlib.Path(logs)
        self.device = device  # its name; empty: none
        self.limits = limits or {}  # seconds, by step: other than its own
        self.end = time.monotonic() + 60 * minutes
        self.rows, self.broken, self.figures = [], {}, {}
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log_path = self.logs / f"{part}.log"
        self.log = self.log_path.open("wb", buffering=0)
        # PyTorch's wheels have cuBLAS and NCCL, too, where CUDA's own folder has not.
        wheels = sorted(map(str, pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/lib")))
        inherited = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
        self.libraries = ":".join([f"{self.folder}/lib", *inherited, *wheels])

    def environment(self):
        return {**os.environ, "LD_LIBRARY_PATH": self.libraries, "MESHFILL_PARITY_DIR": str(ROOT / "tests/parity")}

    # ---- Steps.

    def step(self, name, target, limit, body, needs=()):
        """`body(limit)` returns what the table says and whether that meets the target. `needs`: steps that must not have
        failed."""
        begin, offset = time.monotonic(), self.log.tell()
        own_limit = self.limits.get(name, limit)
        limit = min(own_limit, self.end - begin)
        missing = [need for need in needs if need in self.broken]
        if not self.device:
            result, verdict = "not run: no device", "-"
        elif missing:
            result, verdict = f"not run: {missing[0]}: {self.broken[missing[0]]}", "-"
        elif limit < min(own_limit, LEAST_SECONDS):
            result, verdict = "not run: out of time", "-"
        else:
            try:
                result, met = body(limit)
                verdict = "met" if met else "NOT MET"
            except NotRun as reason:
                result, verdict = f"not run: {reason}", "-"
            except subprocess.TimeoutExpired:
                result, verdict = f"not over after {limit:.0f} s", "NOT MET" if limit == own_limit else "-"
            except Failed as error:
                result, verdict = " ".join(str(error).split()), "NOT MET"
            except Exception as error:  # whatever a step does, the others and the table follow
                result, verdict = f"{type(error).__name__}: {' '.join(str(error).split())}", "NOT MET"
        if verdict == "NOT MET" or missing:
            self.broken[name] = "failed"
        result = result if len(result) <= MOST_COLUMNS else result[: MOST_COLUMNS - 1] + "…"
        self.rows.append((name, result, target, verdict, f"{time.monotonic() - begin:.0f} s"))
        self.say(f"---- {name}: {result} [{verdict}]")
        if verdict == "NOT MET":
            for line in self.since(offset).splitlines()[-SHOWN_LINES - 1 : -1]:
                print(f"     {line[:200]}", file=sys.stderr, flush=True)

    def say(self, line):
        self.log.write(f"{line}\n".encode())
        print(line, file=sys.stderr, flush=True)

    def since(self, offset):
        with self.log_path.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    # ---- Programs.

    def start(self, command, environment=None, stdin=subprocess.DEVNULL, output=None):
        """In a process group of its own; its output goes to the log, or to the file `output`."""
        command = list(map(str, command))
        self.log.write(f"\n==== {' '.join(command)}\n".encode())
        return subprocess.Popen(command, stdin=stdin, stdout=output or self.log, stderr=subprocess.STDOUT,
                                start_new_session=True, env={**self.environment(), **(environment or {})})

    def execute(self, command, limit, environment=None):
        """Its exit status, and all that it printed."""
        offset = self.log.tell()
        process = self.start(command, environment)
        try:
            status = process.wait(timeout=limit)
        finally:
            end_group(process)
        return status, self.since(offset).split("\n", 2)[2]  # without the command

    def program(self, name, *arguments, limit, environment=None, wrapper=(), statuses=(0,)):
        """Runs one of the packed programs; all that it printed."""
        path = self.folder / "bin" / name
        if not path.exists():
            raise NotRun(f"{name} is not in the package")
        status, output = self.execute([*wrapper, path, *arguments], limit, environment)
        if status == 77:
            raise NotRun(last_line(output).removeprefix("not run: "))
        if status not in statuses:
            failed = [line for line in output.splitlines() if "[  FAILED  ]" in line]
            why = f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
            raise Failed(f"{name} {why}: {failed[-1] if failed else last_line(output)}")
        return output

    def test(self, name, filter_, limit, wrapper=()):
        output = self.program(name, f"--gtest_filter={filter_}", limit=limit, wrapper=wrapper,
                              environment={"MESHFILL_TEST_DEVICE": "cuda"})
        passed = [line for line in output.splitlines() if "[  PASSED  ]" in line]
        if not passed:
            raise Failed(f"{name}: no test passed: {last_line(output)}")
        if " 0 test" in passed[-1]:
            raise NotRun(f"{name} has no {filter_} on this device")
        return passed[-1].split("]")[1].strip().rstrip("."), True

    def json_of(self, output):
        """The last line that is an object."""
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise Failed(f"no JSON: {last_line(output)}")
        return json.loads(lines[-1])

    def bench(self, name, *arguments, limit):
        return self.json_of(self.program("meshfill", "bench", name, "--device", "cuda", *arguments, "--json", limit=limit))

    # ---- What is left of it all.

    def table(self):
        rows = [("step", "result", "target", "", "took"), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def finish(self):
        """Prints the table, and writes it and the figures beside the log."""
        text = f"{self.device or 'no device'}: {self.part}\n\n{self.table()}\n"
        print(f"\n{text}\nlogs: {self.logs}", flush=True)
        (self.logs / f"{self.part}.txt").write_text(text)
        (self.logs / f"{self.part}.json").write_text(json.dumps({"device": self.device, "figures": self.figures}, indent=1))
        self.log.close()

    def status(self):
        if not self.device:
            return 77
        return 0 if all(row[3] == "met" for row in self.rows) else 1
