#!/usr/bin/env python3
"""A pool of 8 worker processes under churn: requests while workers are killed, stopped and started again.

Every request must be answered once, and rightly: as an undisturbed embedded pool does under the same plan
(expected_logits.py). With --measured the pool measures its links.
A kill must be noticed within 0.2 s, a stop within 2 s, and no client may wait for more than 5 s. Prints what it saw,
and ends with 1 where one of these does not hold. Takes minutes; the ordinary tests do not run it.

Usage: pool_churn.py PATH_OF_MESHFILL [--requests N] [--every SECONDS] [--seed N] [--measured]
"""
import argparse
import json
import pathlib
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request

from cli_harness import run
from expected_logits import ExpectedLogits
from pool_process import Process

WORKERS = 8
TOKENS = 4096
NOTICE_SECONDS = {signal.SIGKILL: 0.2, signal.SIGSTOP: 2}
ANSWER_SECONDS = 5


class Churn:
    def __init__(self, arguments, folder):
        self.random = random.Random(arguments.seed)
        self.arguments = arguments
        self.folder = folder
        model = folder / "model"
        made = run("make-model", "--arch", "llama", "--out", model, "--layers", 4, "--hidden", 128, "--heads", 8,
                   "--kv-heads", 4, "--vocab", 256, "--dtype", "f32")
        assert made.returncode == 0, made.stderr
        self.prompt = folder / "prompt.bytes"
        self.prompt.write_bytes(self.random.randbytes(TOKENS))
        links = "  measure_links: true\n" if arguments.measured else ""
        (folder / "pool.yaml").write_text(
            f"model:\n  path: {model}\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
            f"pool:\n  control_listen: 127.0.0.1:0\n{links}")
        (folder / "worker.yaml").write_text(
            f"model:\n  path: {model}\n"
            "pool:\n  worker:\n    threads: 1\n    peak_flops: 1e11\n    memory_bytes: 1GiB\n")
        (folder / "embedded.yaml").write_text(
            f"model:\n  path: {model}\npool:\n  embedded:\n    threads: 2\n    peak_flops: 1e11\n")
        self.leader = Process("serve", "--config", folder / "pool.yaml")
        self.metrics = self.leader.wait_for(r"metrics listening on (\S+:\d+)").group(1)
        self.address = self.leader.wait_for(r"Z listening on (\S+:\d+)").group(1)
        self.control = self.leader.wait_for(r"workers join at (\S+:\d+)").group(1)
        self.workers = {}
        self.expected = ExpectedLogits(folder / "embedded.yaml", self.prompt, folder)
        self.noticed = {signal.SIGKILL: [], signal.SIGSTOP: []}
        self.quit = threading.Event()

    def start(self, name):
        self.workers[name] = Process("worker", "--config", self.folder / "worker.yaml", "--join", self.control, "--set",
                                     f"pool.worker.name={name}")

    def losses(self):
        return sum("is lost" in line for line in list(self.leader.lines))

    def disturb(self):
        """One worker after another is killed or stopped, noticed, and started again."""
        while not self.quit.wait(self.random.uniform(0.5, 2 * self.arguments.every - 0.5)):
            name = self.random.choice(sorted(self.workers))
            number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
            before = self.losses()
            start = time.monotonic()
            self.workers[name].signal(number)
            while self.losses() == before and time.monotonic() - start < 10:
                time.sleep(0.005)
            self.noticed[number].append(time.monotonic() - start)
            self.workers[name].end()
            self.start(name)
            self.workers[name].wait_for("joined the pool", seconds=30)

    def run(self):
        for index in range(WORKERS):
            self.start(f"w{index}")
        for worker in self.workers.values():
            worker.wait_for("joined the pool")
        disturber = threading.Thread(target=self.disturb)
        disturber.start()
        wrong = errors = 0
        seconds = []
        logits = self.folder / "logits"
        for _ in range(self.arguments.requests):
            start = time.monotonic()
            done = run("prefill", "--server", self.address, "--tokens", self.prompt, "--format", "bytes", "--json",
                       "--logits-out", logits)
            seconds.append(time.monotonic() - start)
            if done.returncode != 0:
                errors += 1
                print(done.stderr.decode(), end="")
            elif not self.expected.is_right(json.loads(done.stdout)["plan"], logits):
                wrong += 1
        self.quit.set()
        disturber.join()
        for worker in self.workers.values():
            worker.end()
        ended = sum("ended in run" in line for line in self.leader.lines)
        answered = self.answered()
        self.leader.end()
        return self.report(seconds, errors, wrong, answered, ended)

    def answered(self):
        """The leader's own count of answers that were no errors."""
        text = urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5).read().decode()
        return int(re.search(r'meshfill_requests_total\{code="OK"\} (\d+)', text).group(1))

    def report(self, seconds, errors, wrong, answered, ended):
        requests = self.arguments.requests
        seconds.sort()
        print(f"{requests} requests: {errors} errors, {wrong} wrong, {answered} answers told; "
              f"{ended} epochs ended in a run")
        print(self.expected)
        print(f"seconds of a request: median {seconds[len(seconds) // 2]:.2f}, "
              f"most {seconds[-1]:.2f} (limit {ANSWER_SECONDS})")
        good = errors == 0 and wrong == 0 and answered == requests and seconds[-1] <= ANSWER_SECONDS
        for number, times in self.noticed.items():
            if times:
                limit = NOTICE_SECONDS[number]
                good = good and max(times) <= limit
                median = sorted(times)[len(times) // 2]
                print(f"{signal.Signals(number).name}: {len(times)} times, noticed after {median:.3f} s, "
                      f"at most {max(times):.3f} s (limit {limit})")
        print("holds" if good else "DOES NOT HOLD")
        return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=float, default=3, help="seconds between disturbances, on average")
    parser.add_argument("--measured", action="store_true", help="let the pool measure its links")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if Churn(arguments, pathlib.Path(folder)).run() else 1)


if __name__ == "__main__":
    main()
