#!/usr/bin/env python3
"""A server under load, as `meshfill bench serve` puts it: each scenario against a server of its own.

Prints every figure with its bound, and whether it is met. With --workers N the pool has so many worker processes, and
with --kill-every S one of them is killed and started again each S seconds. Many in flight on N workers are held against
N servers of one worker each, on the same cores at once. The resident memory of an embedded pool is held against its
budget. With --busy-start the machine is busy until a server is ready. Ends with 1 where a request failed, whatever the speed; with --strict also where a bound
is not met. Takes minutes; with --short it is one of the ordinary tests.

In a large model products are most of a short prompt, in a small one of default shape attention is nearly all of a long one. Wide
layers and narrow heads bring the lengths nearer to each other: --hidden 512 --intermediate 2048 --head-dim 32 --layers 2. With
--kill-every the longest prompt must take well below S seconds, in many layers, for two workers that are lost in one layer make it
poisonous, as --heads 1 --head-dim 16 --layers 16 --hidden 64 --sliding-window 16384.

Usage: load.py PATH_OF_MESHFILL [--short] [--scenario NAME]… [--seconds S] [--hidden N] [--intermediate N] [--heads N]
               [--head-dim N] [--layers N] [--sliding-window N] [--tokens N] [--memory-mib N] [--kv-mib N] [--ranks N | --workers N] [--kill-every S]
               [--max-age S] [--busy-start] [--seed N] [--strict]
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading

from cli_harness import MESHFILL, run
from pool_process import Process

SCENARIOS = ("mix", "flight", "overload", "flood", "classes", "alone")
QUEUE_TOKENS = 4 << 20
MAX_AGE = 600  # seconds that a prompt may wait
TOKEN_BYTES = 4  # of a prompt in the queue


@contextlib.contextmanager
def busy(machine):
    """Keeps all cores busy meanwhile, twice over, where it is asked to."""
    count = 2 * os.cpu_count() if machine else 0
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Pool:
    """A server, and its workers where it has any."""

    def __init__(self, arguments, folder, workers, max_age=MAX_AGE):
        self.random = random.Random(arguments.seed)
        self.quit = threading.Event()
        self.kills = 0
        self.folder = folder
        queue = f"queue:\n  max_requests: {arguments.max_requests}\n  max_tokens: {QUEUE_TOKENS}\n  max_age: {max_age}s\nkv:\n  memory_bytes: {arguments.kv_mib}MiB\n"
        memory = f"    memory_bytes: {arguments.memory_mib}MiB\n"
        head = f"model:\n  path: {folder / 'model'}\n"
        listen = "listen: 127.0.0.1:0\nmetrics_listen: ''\n"
        if workers:
            pool = "pool:\n  control_listen: 127.0.0.1:0\n"
            (folder / "worker.yaml").write_text(
                f"{head}pool:\n  worker:\n    threads: 1\n    peak_flops: 1e11\n{memory}")
        else:
            pool = f"pool:\n  embedded:\n    ranks: {arguments.ranks}\n    peak_flops: 1e11\n{memory}"
        (folder / "serve.yaml").write_text(head + listen + pool + queue)
        self.server = Process("serve", "--config", folder / "serve.yaml")
        self.workers = {}
        if workers:
            self.control = self.server.wait_for(r"workers join at (\S+:\d+)").group(1)
            for index in range(workers):
                self.start(f"w{index}")
            for worker in self.workers.values():
                worker.wait_for("joined the pool")
        self.address = self.server.wait_for(r"Z listening on (\S+:\d+)").group(1)
        self.server.wait_for("Z ready: |waits for workers")
        self.killer = threading.Thread(target=self.kill, args=(arguments.kill_every,))
        if workers and arguments.kill_every:
            self.killer.start()

    def start(self, name):
        self.workers[name] = Process("worker", "--config", self.folder / "worker.yaml", "--join", self.control, "--set",
                                     f"pool.worker.name={name}")

    def kill(self, every):
        while not self.quit.wait(every):
            name = self.random.choice(sorted(self.workers))
            self.workers[name].signal(signal.SIGKILL)
            self.workers[name].end()
            self.kills += 1
            self.start(name)

    def memory(self, key):
        """Bytes of /proc's VmRSS or VmHWM."""
        text = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE).group(1)) * 1024

    def end(self):
        self.quit.set()
        if self.killer.is_alive():
            self.killer.join()
        for process in (*self.workers.values(), self.server):
            process.end()


def bench(pool, lone, scenario, arguments):
    """What `bench serve --json` says."""
    command = [MESHFILL, "bench", "serve", "--server", pool.address, "--scenario", scenario, "--json", "--seed",
               str(arguments.seed), "--tokens", str(arguments.tokens), "--in-flight", str(arguments.in_flight), "--rounds",
               str(arguments.rounds), "--max-age", str(arguments.max_age)]
    command += [part for each in lone for part in ("--lone", each.address)]
    seconds = arguments.seconds if scenario == "mix" else arguments.overload_seconds
    done = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise AssertionError(f"bench serve --scenario {scenario} ended with {done.returncode}")
    return json.loads(done.stdout)


def show(said, kills):
    text = f"{said['scenario']}: {said['requests']} requests in {said['seconds']:.1f} s, {said['refusals']} tries refused"
    print(text + (f", {kills} workers killed" if kills else ""))
    for length in said["lengths"]:
        line = f"  {length['tokens']} tokens, alone {length['lone_seconds']:.4g} s: {length['requests']}"
        for name in ("slowdown", "first_come_first_served", "by_themselves"):
            if name in length:
                line += f", {name} median {length[name]['median']:.3g}, 99th percentile {length[name]['p99']:.3g}"
        for name, error in length.get("prediction_error", {}).items():
            line += f"\n      prediction error {name}: median {error['median']:.3g}, 95th percentile {error['p95']:.3g}"
            line += f", bias {error['bias']:+.3g}"
        print(line)
    for name, value in said["figures"].items():
        print(f"  {name} {value:.5g}")
    for check in said["checks"]:
        bound = f"at least {check['at_least']:g}" if "at_least" in check else f"at most {check['at_most']:g}"
        print(f"  {check['name']:26} {check['value']:9.4g}  {bound}: {'met' if check['met'] else 'NOT MET'}", flush=True)


def load(scenario, arguments, folder):
    with busy(arguments.busy_start):
        pools = [Pool(arguments, folder, arguments.workers, arguments.max_age if scenario == "classes" else MAX_AGE)]
    try:
        pool = pools[0]
        if scenario == "flight":
            pools.extend(Pool(arguments, folder, 1) for _ in range(arguments.workers))
        before = pool.memory("VmRSS")
        said = bench(pool, pools[1:], scenario, arguments)
        if not arguments.workers:
            grown = pool.memory("VmHWM") - before
            budget = ((arguments.memory_mib + arguments.kv_mib) << 20) + TOKEN_BYTES * QUEUE_TOKENS
            said["checks"].append({"name": "memory_of_budget", "value": grown / budget, "at_most": 1.05,
                                   "met": grown <= 1.05 * budget})
    finally:
        for each in pools:
            each.end()
    show(said, pool.kills)
    return said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true", help="a tiny model and seconds: an ordinary test")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS)
    parser.add_argument("--seconds", type=float, help="while prompts of the mix come")
    parser.add_argument("--overload-seconds", type=float, help="while prompts of the overload come")
    parser.add_argument("--hidden", type=int, help="of the model")
    parser.add_argument("--intermediate", type=int, help="of the model")
    parser.add_argument("--heads", type=int, default=4, help="of the model; half as many, at least one, of K and V")
    parser.add_argument("--head-dim", type=int, help="of the model")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--sliding-window", type=int, help="of the model, in tokens; none: each token sees all before it")
    parser.add_argument("--dtype", default="f32", help="of the model's weights")
    parser.add_argument("--tokens", type=int, help="of the shortest prompts")
    parser.add_argument("--max-age", type=int, help="seconds that a prompt may wait, in classes")
    parser.add_argument("--max-requests", type=int, help="that wait or upload")
    parser.add_argument("--in-flight", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--memory-mib", type=int, help="for what runs: of the server, or of each worker")
    parser.add_argument("--kv-mib", type=int, help="for kept K and V")
    parser.add_argument("--ranks", type=int, help="of the embedded pool")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kill-every", type=float, default=0, help="seconds")
    parser.add_argument("--busy-start", action="store_true", help="servers start on a busy machine")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--strict", action="store_true")
    short = dict(seconds=3, overload_seconds=0.3, hidden=64, layers=2, tokens=64, max_requests=24, max_age=1, in_flight=16, rounds=1,
                 memory_mib=256, kv_mib=64, ranks=4)
    long = dict(seconds=600, overload_seconds=12, hidden=256, layers=4, tokens=1024, max_requests=64, max_age=10, in_flight=64, rounds=5,
                memory_mib=768, kv_mib=768, ranks=1)
    parser.set_defaults(**(short if "--short" in sys.argv else long))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # not the user's
        arch = "mistral" if arguments.sliding_window else "llama"
        make = ["make-model", "--arch", arch, "--out", folder / "model", "--layers", arguments.layers, "--hidden", arguments.hidden,
                "--heads", arguments.heads, "--kv-heads", max(1, arguments.heads // 2), "--vocab", 1000, "--dtype", arguments.dtype, "--context", 1 << 20]
        if arguments.sliding_window:
            make += ["--sliding-window", arguments.sliding_window]
        if arguments.intermediate:
            make += ["--intermediate", arguments.intermediate]
        if arguments.head_dim:
            make += ["--head-dim", arguments.head_dim]
        made = run(*make)
        assert made.returncode == 0, made.stderr
        said = [load(scenario, arguments, folder) for scenario in arguments.scenario or SCENARIOS]
    overloads = [each for each in said if each["scenario"] == "overload"]
    good = all(each["failed"] == 0 and each["requests"] > 0 for each in said)
    good = good and all(each["refusals"] > 0 for each in overloads)
    if arguments.strict:
        good = good and all(check["met"] for each in said for check in each["checks"])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
