#!/usr/bin/env python3
"""What the door costs: one prompt by pools of workers in plain text, with TLS, and with an encrypted data plane too, in turns.

Usage: tests/processes/door_cost.py PATH_OF_MESHFILL [--tokens N] [--workers N] [--rounds N] [--tile AxB]

All pools stand at once; a round asks each of them once, in an order that turns. `tls` has TLS on the API and on the control
plane, and so a data plane whose secrets nobody has heard. `encrypted` is the same with pool.encrypt. Prints, over the pairs of
each round, the median and the range of the seconds to those in plain text: of the prefill, and of the whole call. Exits with
1 where TLS costs more than 1 % of the call, or where a pool's answer is another.
"""
import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from cli_harness import MESHFILL, run
from pool_process import Process

CERTIFICATES = pathlib.Path(__file__).parent.parent / "server" / "pool" / "certificates"
AUTHORITY = CERTIFICATES / "authority.pem"
LIMIT = 1.01


def tls(section, side):
    return [f"{section}.cert={CERTIFICATES / side}.pem", f"{section}.key={CERTIFICATES / side}.key",
            f"{section}.ca={AUTHORITY}"]


POOLS = {  # settings of the front-end, of the workers, and what the client says
    "plain": ([], [], []),
    "tls": (tls("pool.tls", "leader") + tls("api.tls", "leader"), tls("pool.tls", "worker") + tls("api.tls", "worker"),
            ["--ca", AUTHORITY]),
}
POOLS["encrypted"] = (POOLS["tls"][0] + ["pool.encrypt=true"], POOLS["tls"][1] + ["pool.encrypt=true"], POOLS["tls"][2])


class Pool:
    def __init__(self, name, folder, workers):
        of_leader, of_workers, self.client = POOLS[name]
        common = [f"model.path={folder / 'model'}", f"plan.profile_path={folder / 'speed.json'}"]
        self.processes = []
        self.config = folder / "empty.yaml"  # all keys come by --set
        self.config.touch()
        leader = self.start("serve", *common, "listen=127.0.0.1:0", "metrics_listen=", "pool.control_listen=127.0.0.1:0",
                            "kv.cache=false", *of_leader)
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

    def prefill(self, prompt, tile):
        """Seconds of the prefill, of the whole call, and the answer."""
        begin = time.monotonic()
        result = run("prefill", "--server", self.address, "--tokens", prompt, "--format", "bytes", "--tile", tile, "--json",
                     *self.client)
        seconds = time.monotonic() - begin
        assert result.returncode == 0, result.stderr.decode()
        answer = json.loads(result.stdout)
        return answer["seconds"]["prefill"], seconds, answer["top"]

    def end(self):
        for process in self.processes:
            process.end()


def measure(pools, prompt, options):
    """The ratios of each pool but the first, of prefills and of calls; and whether all answers are the same."""
    ratios = {name: ([], []) for name in pools if name != "plain"}
    answers = []
    for turn in range(-1, options.rounds):  # the first warms them up
        order = sorted(pools, key=lambda name: (list(pools).index(name) + turn) % len(pools))
        taken = {name: pools[name].prefill(prompt, options.tile) for name in order}
        answers += [answer for _, _, answer in taken.values()]
        for name, (prefills, calls) in ratios.items():
            if turn >= 0:
                prefills.append(taken[name][0] / taken["plain"][0])
                calls.append(taken[name][1] / taken["plain"][1])
    return ratios, all(answer == answers[0] for answer in answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tile", default="2x2")
    options = parser.parse_args()
    pools = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            model = ["--arch", "llama", "--layers", 2, "--hidden", 256, "--out", folder / "model"]
            subprocess.run([MESHFILL, "make-model", *map(str, model)], check=True, stdout=subprocess.DEVNULL)
            prompt = folder / "prompt"
            prompt.write_bytes(random.Random(1).randbytes(options.tokens))
            for pool in POOLS:
                pools[pool] = Pool(pool, folder, options.workers)
            ratios, same = measure(pools, prompt, options)
        finally:
            for pool in pools.values():
                pool.end()
    for pool, kinds in ratios.items():
        for what, values in zip(("prefill", "call"), kinds, strict=True):
            print(f"{pool:10} {what:8} {statistics.median(values):.3f}   "
                  f"({min(values):.3f} to {max(values):.3f} in {len(values)} pairs)")
    print("the same answers" if same else "ANOTHER ANSWER")
    return 0 if same and statistics.median(ratios["tls"][1]) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
