#!/usr/bin/env python3
"""A pool of 8 worker processes, one of them killed or stopped at each named step of a run, and cancels in the middle.

Each worker joins through a relay that reads the control stream (control_relay.py): the message that begins or ends a
step tells when to strike, whoever it passes first. It holds that

  - every request is answered once, with the bits of an undisturbed pool under the same plan; cancelled ones are not,
  - a kill is noticed within 0.2 s, a stop within 2 s, and the next run is under way within 5 s of the strike,
  - after a client's cancel all ranks stand still within the time of one block.

Prints a table, and ends with 1 where one of these does not hold. Takes minutes; the ordinary tests do not run it.

Usage: pool_steps.py PATH_OF_MESHFILL [--repeats N] [--step NAME]… [--seed N]
"""
import argparse
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from cli_harness import MESHFILL, TIMEOUT_SECONDS, run
from control_relay import ControlRelay
from expected_logits import ExpectedLogits
from pool_process import Process

WORKERS, LAYERS = 8, 4
TOKENS, CANCEL_TOKENS, NEXT_TOKENS = 16_384, 65_536, 512
NOTICE_SECONDS = {signal.SIGKILL: 0.2, signal.SIGSTOP: 2}
SERVE_SECONDS = 5


def in_layer(layer):
    return lambda message: message.kind == "Progress" and message.layers_done() == layer


def has_logits(message):
    return message.kind == "RankDone" and bool(message.all_of(5))


class Step:
    """`reached(message)`: the message that passes at this step. `asks`: what the client or the worker is asked before.

    `swallow`: the message is lost with the worker. `first`: another worker is killed before, in the middle of the run.
    """

    def __init__(self, reached, asks=None, swallow=False, first=False):
        self.reached, self.asks, self.swallow, self.first = reached, asks, swallow, first


STEPS = {
    "before the rendezvous": Step(lambda message: message.kind == "Prepare"),
    "on its tokens' way": Step(lambda message: message.kind == "Shard"),
    "memory is reserved": Step(lambda message: message.kind == "Prepared"),
    "in the rendezvous": Step(lambda message: message.kind == "Run"),
    "in the first layer": Step(in_layer(0)),
    "in the middle": Step(in_layer(LAYERS // 2)),
    "in the last layer": Step(in_layer(LAYERS - 1)),
    "its rank is done": Step(lambda message: message.kind == "RankDone" and not has_logits(message)),
    "the logits have left": Step(has_logits),
    "the logits get lost": Step(has_logits, swallow=True),
    "the run is finished": Step(lambda message: message.kind == "Finish"),
    "an epoch ends": Step(lambda message: message.kind == "Abort", first=True),
    "during cancel": Step(lambda message: message.kind == "Cancel", asks="cancel"),
    "it has stopped": Step(lambda message: message.kind == "Stopped", asks="cancel"),
    "during drain": Step(lambda message: message.kind == "Leave", asks="drain"),
}


class Trap:
    """Springs once, at the first worker that a message of its step passes; `then` is set in its place."""

    def __init__(self, step, number, then=None):
        self.step, self.number, self.then = step, number, then
        self.victim = self.struck_at = self.next_run_at = None
        self.run = 0  # the newest before the strike

    def on_message(self, pool, name, message):
        if self.victim is not None:
            if message.kind == "Run" and message.run() > self.run and self.next_run_at is None:
                self.next_run_at = time.monotonic()
            return
        if message.kind == "Prepare":
            self.run = max(self.run, message.run())
        if not self.step.reached(message):
            return
        self.victim, self.struck_at = name, time.monotonic()
        pool.workers[name].signal(self.number)
        if self.then is not None:
            self.then.run = self.run
            pool.trap = self.then
        if self.step.swallow:
            raise OSError("lost on its way")


class Pool:
    def __init__(self, seed, folder):
        self.random = random.Random(seed)
        self.folder = folder
        self.model = folder / "model"
        made = run("make-model", "--arch", "llama", "--out", self.model, "--layers", LAYERS, "--hidden", 128, "--heads",
                   8, "--kv-heads", 4, "--vocab", 256, "--dtype", "f32", "--context", 1 << 20)
        assert made.returncode == 0, made.stderr
        self.prompt = self.write_prompt("prompt", TOKENS)
        self.cancel_prompt = self.write_prompt("long", CANCEL_TOKENS)
        self.next_prompt = self.write_prompt("next", NEXT_TOKENS)
        (folder / "pool.yaml").write_text(
            f"model:\n  path: {self.model}\nlisten: 127.0.0.1:0\nmetrics_listen: ''\n"
            "pool:\n  control_listen: 127.0.0.1:0\n")
        (folder / "worker.yaml").write_text(
            f"model:\n  path: {self.model}\n"
            "pool:\n  worker:\n    threads: 1\n    peak_flops: 1e11\n    memory_bytes: 1GiB\n")
        (folder / "embedded.yaml").write_text(
            f"model:\n  path: {self.model}\n"
            "pool:\n  embedded:\n    threads: 2\n    peak_flops: 1e11\n")
        self.leader = Process("serve", "--config", folder / "pool.yaml")
        self.address = self.leader.wait_for(r"Z listening on (\S+:\d+)").group(1)
        self.control = self.leader.wait_for(r"workers join at (\S+:\d+)").group(1)
        self.mutex = threading.Lock()
        self.trap = None
        self.passed = []  # name, kind and time of messages, while no trap is set
        self.relays = {}
        self.workers = {}
        self.expected = ExpectedLogits(folder / "embedded.yaml", self.prompt, folder)
        for index in range(WORKERS):
            name = f"w{index}"
            self.relays[name] = ControlRelay(self.control, lambda message, name=name: self.on_message(name, message))
            self.start(name)
        for worker in self.workers.values():
            worker.wait_for("joined the pool")

    def write_prompt(self, name, tokens):
        path = self.folder / f"{name}.bytes"
        path.write_bytes(self.random.randbytes(tokens))
        return path

    def start(self, name):
        self.workers[name] = Process("worker", "--config", self.folder / "worker.yaml", "--join",
                                     self.relays[name].address, "--set", f"pool.worker.name={name}")

    def close(self):
        for process in [*self.workers.values(), self.leader]:
            process.end()
        for relay in self.relays.values():
            relay.close()

    def on_message(self, name, message):
        with self.mutex:
            if self.trap is not None:
                return self.trap.on_message(self, name, message)
        if message.kind not in ("Progress", "Heartbeat"):
            self.passed.append((name, message.kind, time.monotonic()))

    def client(self, prompt, *arguments):
        return subprocess.Popen(
            [MESHFILL, "prefill", "--server", self.address, "--tokens", str(prompt), "--format", "bytes", "--json",
             *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def losses(self, name):
        return sum(f'Z worker "{name}" is lost' in line for line in list(self.leader.lines))

    def heal(self, name):
        self.workers[name].end()
        self.start(name)
        self.workers[name].wait_for("joined the pool", seconds=30)


class Tally:
    """What befell the requests of one step."""

    def __init__(self):
        self.requests = self.wrong = self.lost = self.unreached = 0
        self.noticed, self.served = [], []

    def holds(self, number):
        return (self.wrong == 0 and self.lost == 0 and self.unreached == 0
                and max(self.noticed) <= NOTICE_SECONDS[number] and max(self.served) <= SERVE_SECONDS)


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def strike(pool, step, number, tally):
    logits = pool.folder / "logits"
    logits.unlink(missing_ok=True)
    before = {name: pool.losses(name) for name in pool.workers}
    trap = Trap(step, number)
    # Who is there first dies too, or only shows that the run is under way.
    in_the_middle = Trap(STEPS["in the middle"], signal.SIGKILL if step.first else 0, then=trap)
    pool.trap = in_the_middle if step.first or step.asks else trap
    tally.requests += 1
    client = pool.client(pool.prompt, "--logits-out", logits)
    if step.asks and wait_until(lambda: in_the_middle.victim is not None, 30):
        if step.asks == "cancel":
            client.send_signal(signal.SIGINT)
        else:
            pool.workers[in_the_middle.victim].signal(signal.SIGTERM)
    if not wait_until(lambda: trap.victim is not None or client.poll() is not None and step.asks is None, 30) \
            and trap.victim is None:
        tally.unreached += 1
    if trap.victim is not None:
        wait_until(lambda: pool.losses(trap.victim) > before[trap.victim], 10)
        tally.noticed.append(time.monotonic() - trap.struck_at)
    out, error = client.communicate(timeout=TIMEOUT_SECONDS)
    follower = pool.client(pool.next_prompt)  # of the steps in which the struck run is not begun again
    if follower.wait(TIMEOUT_SECONDS) != 0:
        tally.lost += 1
        print(follower.stderr.read().decode(), end="")
    follower.communicate()
    pool.trap = None
    if trap.next_run_at is not None:
        tally.served.append(trap.next_run_at - trap.struck_at)
    if step.asks == "cancel":
        tally.wrong += client.returncode == 0 or out != b""
    elif client.returncode != 0:
        tally.lost += 1
        print(error.decode(), end="")
    elif not pool.expected.is_right(json.loads(out)["plan"], logits):
        tally.wrong += 1
    for name in {trap.victim, in_the_middle.victim} - {None}:
        pool.heal(name)


def strike_all(pool, steps, repeats):
    holds = True
    print(f"{'struck':24} {'by':8} {'requests':>8} {'wrong':>6} {'lost':>5} {'noticed after':>18} "
          f"{'serving again after':>20}", flush=True)
    for name in steps:
        for number in NOTICE_SECONDS:
            tally = Tally()
            for _ in range(repeats):
                strike(pool, STEPS[name], number, tally)
            good = tally.noticed and tally.served and tally.holds(number)
            holds = holds and good
            seconds = ["never" if not each else f"{statistics.median(each):.3f}, ≤ {max(each):.3f} s"
                       for each in (tally.noticed, tally.served)]
            print(f"{name:24} {signal.Signals(number).name:8} {tally.requests:8} {tally.wrong:6} {tally.lost:5} "
                  f"{seconds[0]:>18} {seconds[1]:>20}{'' if good else '  DOES NOT HOLD'}", flush=True)
    return holds


def cancel(pool, repeats):
    """Clients leave in the middle; when do the ranks stand still, and the next request begin?"""
    done = run("prefill", "--server", pool.address, "--tokens", pool.cancel_prompt, "--format", "bytes", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    plan = result["plan"]
    block = result["seconds"]["attention"] / (LAYERS * plan["a"] * plan["b"])
    idle, began = [], []
    for _ in range(repeats):
        pool.passed.clear()
        client = pool.client(pool.cancel_prompt)
        wait_until(lambda: sum(kind == "Run" for _, kind, _ in pool.passed) == plan["ranks"], 30)
        time.sleep(pool.random.uniform(0.2, 0.8) * result["seconds"]["prefill"])
        start = time.monotonic()
        client.send_signal(signal.SIGINT)
        wait_until(lambda: sum(kind == "Stopped" for _, kind, _ in pool.passed) == plan["ranks"], 30)
        idle.append(max(at for _, kind, at in pool.passed if kind == "Stopped") - start)
        client.communicate()
        pool.passed.clear()
        start = time.monotonic()
        follower = pool.client(pool.next_prompt)
        assert follower.wait(TIMEOUT_SECONDS) == 0, follower.stderr.read()
        follower.communicate()
        began.append(min(at for _, kind, at in pool.passed if kind == "Run") - start)
    print(f"{repeats} cancels of {CANCEL_TOKENS:,} tokens on {plan['heads']}·{plan['a']}x{plan['b']}: all ranks stand "
          f"still after {statistics.median(idle):.3f} s, at most {max(idle):.3f} s (a block takes {block:.3f} s); "
          f"the next request runs {max(began):.3f} s after it was sent, at most")
    return max(idle) <= block


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3, help="of each step with each signal")
    parser.add_argument("--step", action="append", choices=sorted(STEPS), help="one of them; default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(arguments.seed, pathlib.Path(folder))
        try:
            holds = strike_all(pool, arguments.step or STEPS, arguments.repeats)
            holds = cancel(pool, max(3, arguments.repeats)) and holds
        finally:
            pool.close()
    print("holds" if holds else "DOES NOT HOLD")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
