#!/usr/bin/env python3
"""What the door costs: one prompt by pools of workers in plain text, with TLS, and with an encrypted data plane too, in turns.

Usage: tests/processes/door_cost.py PATH_OF_MESHFILL [--tokens N] [--workers N] [--rounds N] [--small-rounds N] [--tile AxB]

All pools stand at once; a round asks each of them once, in an order that turns. `tls` has TLS on the API and on the control
plane, and so a data plane whose secrets nobody has heard. `encrypted` is the same with pool.encrypt. Prints, over the pairs of
each round, the median and the range of what they take to those in plain text: seconds of the prefill and of the whole call, and
CPU seconds of all processes, the client's among them.

Such ratios scatter by more than 1 % wherever the machine does anything else. But what TLS adds does not depend on the model: the
same tokens, handshakes and messages go through it. So the prompt also goes to pools with a model that computes next to nothing,
where the difference of CPU seconds can be seen: its mean over the small rounds, and the standard error. Exits with 1 where that
and two standard errors are above 1 % of the CPU seconds of the prefill in plain text, or where a pool's answer is another.
"""
import argparse
import json
import pathlib
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from cli_harness import MESHFILL, run
from pool_process import Process

CERTIFICATES = pathlib.Path(__file__).parent.parent / "server" / "pool" / "certificates"
AUTHORITY = CERTIFICATES / "authority.pem"
LIMIT = 0.01  # of the CPU seconds in plain text
MODEL = ("--layers", "2", "--hidden", "256")
SMALL_MODEL = ("--layers", "2", "--hidden", "16", "--heads", "2", "--kv-heads", "1", "--head-dim", "8")


def tls(section, side):
    return [f"{section}.cert={CERTIFICATES / side}.pem", f"{section}.key={CERTIFICATES / side}.key",
            f"{section}.ca={AUTHORITY}"]


POOLS = {  # settings of the front-end, of the workers, and what the client says
    "plain": ([], [], []),
    "tls": (tls("pool.tls", "leader") + tls("api.tls", "leader"), tls("pool.tls", "worker") + tls("api.tls", "worker"),
            ["--ca", AUTHORITY]),
}
POOLS["encrypted"] = (POOLS["tls"][0] + ["pool.encrypt=true"], POOLS["tls"][1] + ["pool.encrypt=true"], POOLS["tls"][2])


def cpu_seconds(pid):
    """Of all threads of a process that lives, also of those that have ended."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of clock_getcpuclockid(3)


class Pool:
    def __init__(self, name, folder, workers):
        of_leader, of_workers, self.client = POOLS[name]
        common = [f"model.path={folder / 'model'}", f"plan.profile_path={folder / 'speed.json'}",
                  "pool.silence_timeout=60s"]  # no worker is lost where the machine is busy
        self.processes = []
        self.config = folder / "empty.yaml"  # all keys come by --set
        self.config.touch()
        leader = self.start("serve", *common, "listen=127.0.0.1:0", "metrics_listen=", "pool.control_listen=127.0.0.1:0",
                            "kv.cache=false", "pool.hang_timeout=60s", *of_leader)
        control = leader.wait_for(r"workers join at (\S+:\d+)").group(1)
        self.address = leader.wait_for(r" listening on (\S+:\d+)").group(1)
        for worker in range(workers):
            settings = [f"pool.worker.name={name}{worker}", "pool.worker.threads=1", "pool.worker.peak_flops=1e11",
                        "pool.worker.memory_bytes=1GiB", "kv.memory_bytes=0", *common, *of_workers]
            self.start("worker", *settings, join=control).wait_for("joined the pool")

    def start(self, command, *settings, join=None):
        words = [command, "--config", str(self.config), *(["--join", join] if join else [])]
        for setting in settings:
            words += ["--set", setting]
        self.processes.append(Process(*words))
        return self.processes[-1]

    def cpu_seconds(self):
        clients = resource.getrusage(resource.RUSAGE_CHILDREN)  # of those that have ended: clients alone
        return clients.ru_utime + clients.ru_stime + sum(cpu_seconds(each.process.pid) for each in self.processes)

    def prefill(self, prompt, tile):
        """Seconds of the prefill and of the whole call, CPU seconds, and the answer."""
        begin, cpu = time.monotonic(), self.cpu_seconds()
        result = run("prefill", "--server", self.address, "--tokens", prompt, "--format", "bytes", "--tile", tile, "--json",
                     *self.client)
        seconds, cpu = time.monotonic() - begin, self.cpu_seconds() - cpu
        assert result.returncode == 0, result.stderr.decode()
        answer = json.loads(result.stdout)
        return answer["seconds"]["prefill"], seconds, cpu, answer["top"]

    def end(self):
        for process in self.processes:
            process.end()


def in_turns(pools, prompt, tile, rounds):
    """For each round {pool: what its prefill took}; and whether all answers are the same."""
    taken = []
    for turn in range(-1, rounds):  # the first warms them up
        order = sorted(pools, key=lambda name: (list(pools).index(name) + turn) % len(pools))
        taken.append({name: pools[name].prefill(prompt, tile) for name in order})
    answers = [each[-1] for turn in taken for each in turn.values()]
    return taken[1:], all(answer == answers[0] for answer in answers)


def measure(names, model, rounds, options):
    """in_turns of pools of a model of their own."""
    pools = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            subprocess.run([MESHFILL, "make-model", "--arch", "llama", *model, "--out", folder / "model"], check=True,
                           stdout=subprocess.DEVNULL)
            prompt = folder / "prompt"
            prompt.write_bytes(random.Random(1).randbytes(options.tokens))
            for pool in names:
                pools[pool] = Pool(pool, folder, options.workers)
            return in_turns(pools, prompt, options.tile, rounds)
        finally:
            for pool in pools.values():
                pool.end()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small-rounds", type=int, default=40)
    parser.add_argument("--tile", default="2x2")
    options = parser.parse_args()
    rounds, same = measure(POOLS, MODEL, options.rounds, options)
    for pool in POOLS:
        for at, what in enumerate(("prefill", "call", "CPU")):
            ratios = [turn[pool][at] / turn["plain"][at] for turn in rounds]
            if pool != "plain":
                print(f"{pool:10} {what:8} {statistics.median(ratios):.3f}   "
                      f"({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} pairs)", flush=True)
    whole = statistics.median(turn["plain"][2] for turn in rounds)
    small_rounds, same_small = measure(("plain", "tls"), SMALL_MODEL, options.small_rounds, options)
    added = [turn["tls"][2] - turn["plain"][2] for turn in small_rounds]
    mean, error = statistics.mean(added), statistics.stdev(added) / len(added) ** 0.5
    print(f"tls adds {1e3 * mean:.1f} ms of CPU (standard error {1e3 * error:.1f}) to {whole:.1f} s in plain text: "
          f"{100 * mean / whole:.2f} %, at most {100 * (mean + 2 * error) / whole:.2f} %")
    print("the same answers" if same and same_small else "ANOTHER ANSWER")
    return 0 if same and same_small and mean + 2 * error <= LIMIT * whole else 1


if __name__ == "__main__":
    sys.exit(main())
