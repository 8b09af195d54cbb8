#!/usr/bin/env python3
"""16 hosts, each behind a link of 100 Mbit/s or --mbit: Mesh 4x4, Ring 1x16, head x ring and more on one prompt, in turns.

Hosts are network namespaces on a bridge; a link is throttled in both directions by the kernel's token bucket. Each
host runs a worker of one rank, the front-end runs outside. It holds that

  - the interfaces carried the bytes of the formula, within 3 % for framing,
  - Mesh is at least 2.2 times as fast as Ring (their bytes say 2.5), and comm wait explains the difference,
  - the planner, given these links, picks the fastest of all (or one within 5 % of it),
  - with --strict, Mesh is at least 2.25 times as fast, the choice within 3 %, and each plan's prediction within 15 %,
  - a cable that is cut in the middle of a run is noticed within 2 s, and the request answered by the other hosts.

With --window W all layers of the model have a sliding window of W tokens, and the planner chooses the layout, too.
Then the planner's choice must be at least 3 times as fast as its best plan of stripes, which move more K and V.

With --measured the front-end is not given the links: a first run measures them, and the planner has to pick the
fastest with what it found. All plans are striped, as those are whose tile is named.

With --weights sharded the workers share the weights. It compares with the same pool whose workers have them all, and
holds that what sharing adds to a prefill is within 10 % of what the plan says. A prompt of few --tokens shows the
gathering alone: beside it are the seconds that its bytes take.

With --exchange 4 of the hosts are a head group whose all-to-all takes about as long as the work on tokens. It compares
exchanges in slices with one exchange, in turns, and holds that slices are at least 1.15 times as fast and give the same first
token.

Needs root, and ip and tc (Debian: iproute2). Usage: throttled_network.py PATH_OF_MESHFILL [--repeats N] [--mbit N] [--measured]
[--strict] [--window W] [--weights sharded [--tokens N]] [--exchange]

The hosts share this machine's cores. Where they compute about as long as messages take, what is compared is the cores: links
must be slow beside them, as --mbit 25 is for two cores without AVX-512.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from cli_harness import MESHFILL, run
from pool_process import Process

HOSTS = 16
BRIDGE, PREFIX, SUBNET = "mfthrottle-br", "mfthrottle", "10.198.0"
TOKENS = 8192
CHOICE, STRIPES = "the planner's choice", "the best stripes"
SPREADS = {  # what is compared
    "Mesh 4x4": ["--heads", 1, "--tile", "4x4"],
    "Ring 1x16": ["--heads", 1, "--tile", "1x16"],
    "head x ring 4·1x4": ["--heads", 4, "--tile", "1x4"],
    "head x mesh 4·2x2": ["--heads", 4, "--tile", "2x2"],
    CHOICE: [],
}
WINDOW_SPREADS = {STRIPES: ["--layout", "striped"], CHOICE: []}
FRAMING, CHOICE_OVER_STRIPES, NOTICE_SECONDS = 0.03, 3, 2
LOOSE = {"Mesh over Ring": 2.2, "choice": 0.05, "prediction": float("inf")}
STRICT = {"Mesh over Ring": 2.25, "choice": 0.03, "prediction": 0.15}
SLICES_OVER_ONE = 1.15
MEASURED = 0.2  # of the link, either way
ADDED_BY_WEIGHTS = 0.1  # of what the plan says, either way


def ip(*arguments):
    subprocess.run(["ip", *map(str, arguments)], check=True, capture_output=True)


class Network:
    """Namespaces that are behind a throttled link each, and a bridge with an address for the front-end."""

    def __init__(self, hosts, mbit):
        self.hosts, self.mbit = hosts, mbit
        self.bytes_per_second = mbit * 1e6 / 8

    def set_up(self):
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for host in range(self.hosts):
            name = self.namespace(host)
            ip("netns", "add", name)
            ip("link", "add", self.cable(host), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", self.cable(host), "master", BRIDGE, "up")
            for command in (f"addr add {SUBNET}.{host + 10}/24 dev eth0", "link set eth0 up", "link set lo up"):
                ip("-n", name, *command.split())
            self._throttle("-n", name, "qdisc", "add", "dev", "eth0")
            self._throttle("qdisc", "add", "dev", self.cable(host))

    @staticmethod
    def namespace(host):
        return f"{PREFIX}-{host}"

    @staticmethod
    def cable(host):
        return f"mfthr{host}"

    def _throttle(self, *where):
        subprocess.run(["tc", *where, "root", "tbf", "rate", f"{self.mbit}mbit", "burst", "128kb", "latency", "100ms"],
                       check=True, capture_output=True)

    def sent_bytes(self):
        """By each host, since the beginning."""
        counters = [pathlib.Path(f"/sys/class/net/{self.cable(host)}/statistics/rx_bytes") for host in range(self.hosts)]
        return [int(counter.read_text()) for counter in counters]

    def cut(self, host):
        ip("link", "set", self.cable(host), "down")

    def close(self):
        for host in range(self.hosts):
            subprocess.run(["ip", "link", "del", self.cable(host)], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", self.namespace(host)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


class WorkerOf(Process):
    """A worker in a host's namespace."""

    def __init__(self, host, *arguments):
        super().__init__("worker", *arguments, prefix=["ip", "netns", "exec", Network.namespace(host)])


# Layers that take their time, and a network that does.
SMALL_MODEL = ["--layers", 8, "--hidden", 512, "--intermediate", 64, "--heads", 4, "--kv-heads", 4]
WORKING_MODEL = ["--layers", 4, "--hidden", 1024, "--intermediate", 4096, "--heads", 8, "--kv-heads", 4]


class Pool:
    def __init__(self, folder, network, measured, window, weights="resident", model=SMALL_MODEL, tokens=TOKENS, exchange="auto"):
        self.folder, self.network, self.measured, self.window, self.weights = folder, network, measured, window, weights
        self.model, self.tokens, self.exchange = model, tokens, exchange
        self.leader, self.workers = None, []

    def set_up(self):
        folder, model = self.folder, self.folder / "model"
        family = ["--arch", "mistral", "--sliding-window", self.window] if self.window else ["--arch", "llama"]
        if not model.exists():
            made = run("make-model", *family, "--out", model, *self.model, "--head-dim", 128, "--dtype", "bf16")
            assert made.returncode == 0, made.stderr
        self.prompt = folder / "prompt.bytes"
        self.prompt.write_bytes(random.Random(1).randbytes(self.tokens))
        (folder / "pool.yaml").write_text(
            f"model:\n  path: {model}\n  dtype: bf16\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
            "kv:\n  cache: false\n"  # each run computes the whole prompt
            f"plan:\n  partial_dtype: model\n  layout: {'auto' if self.window else 'striped'}\n  exchange: {self.exchange}\n"
            f"pool:\n  control_listen: {SUBNET}.1:0\n  tls:\n    insecure: true\n"
            + ("  measure_links: true\n" if self.measured else f"  link_bytes_per_second: {self.network.bytes_per_second}\n  link_latency: 1ms\n")
            + "  hang_timeout: 20s\n")  # 16 processes share this machine's cores
        (folder / "worker.yaml").write_text(
            f"model:\n  path: {model}\n  dtype: bf16\napi:\n  tls:\n    insecure: true\npool:\n  tls:\n    insecure: true\n"
            "  worker:\n    data_listen: eth0\n    threads: 1\n    peak_flops: 1e11\n    memory_bytes: 512MiB\n")
        self.leader = Process("serve", "--config", folder / "pool.yaml")
        self.address = self.leader.wait_for(r" listening on (127\S+:\d+)").group(1)
        self.metrics_address = self.leader.wait_for(r"metrics listening on (\S+:\d+)").group(1)
        control = self.leader.wait_for(r"workers join at (\S+:\d+)").group(1)
        for host in range(self.network.hosts):
            self.workers.append(WorkerOf(host, "--config", folder / "worker.yaml", "--join", control, "--set",
                                         f"pool.worker.name=host{host}", "--set", f"pool.worker.host=host{host}",
                                         "--set", f"model.weights={self.weights}"))
        for worker in self.workers:
            worker.wait_for("joined the pool")

    def prefill(self, spread):
        """The answer, and the bytes that each host sent."""
        before = self.network.sent_bytes()
        done = run("prefill", "--server", self.address, "--tokens", self.prompt, "--format", "bytes", "--json", *spread)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout), [after - b for after, b in zip(self.network.sent_bytes(), before)]

    def planned(self, spread):
        """What the server's plan says, as JSON."""
        done = run("plan", "--server", self.address, "--tokens", self.tokens, "--json", *spread)
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def waited_for_weights(self):
        """Seconds since the beginning that a rank has stood still for weights, on average."""
        text = urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5).read().decode()
        waits = re.findall(r'^meshfill_comm_wait_seconds_total\{.*op="gather".*\} (\S+)$', text, re.MULTILINE)
        return sum(map(float, waits)) / self.network.hosts

    def close(self):
        for worker in self.workers:
            worker.end()
        if self.leader is not None:
            self.leader.end()


def shape_of(plan):
    return plan["heads"], f'{plan["a"]}x{plan["b"]}'


def compare(pool, repeats, bounds):
    """Whether bytes and speeds are as they should be."""
    spreads = WINDOW_SPREADS if pool.window else SPREADS
    runs = {name: [] for name in spreads}
    for _ in range(repeats):
        for name, spread in spreads.items():
            runs[name].append(pool.prefill(spread))
    holds = True
    seconds, waits = {}, {}
    print(f"{TOKENS:,} tokens, {HOSTS} hosts, {repeats} runs each in turns; medians")
    print(f"{'':22} {'plan':>8} {'seconds':>9} {'predicted':>10} {'comm wait':>10} {'sent by a host':>15} "
          f"{'of the formula':>15}")
    for name, results in runs.items():
        answers = [answer for answer, _ in results]
        seconds[name] = statistics.median(answer["seconds"]["prefill"] for answer in answers)
        waits[name] = statistics.median(answer["seconds"]["comm_wait"] for answer in answers)
        formula = sum(answers[0]["comm_bytes"].values())
        sent = statistics.median(sum(each) / HOSTS for _, each in results)
        heads, tile = shape_of(answers[0]["plan"])
        predicted = pool.planned(spreads[name])["predicted"]["seconds"]  # corrected by what was measured
        holds = holds and abs(predicted / seconds[name] - 1) <= bounds["prediction"]
        print(f"{name:22} {f'{heads}·{tile}':>8} {seconds[name]:9.2f} {predicted:10.2f} {waits[name]:10.2f} "
              f"{sent / 2**20:11.2f} MiB {sent / formula:15.4f}")
        # The formula is that of the host that sends most: of contiguous chunks the last ones send less.
        holds = holds and (sent / formula <= 1 + FRAMING if pool.window else abs(sent / formula - 1) <= FRAMING)
    if pool.window:
        ratio = seconds[STRIPES] / seconds[CHOICE]
        print(f"a window of {pool.window:,}: the planner's choice over stripes: {ratio:.2f} (at least {CHOICE_OVER_STRIPES})")
        return holds and ratio >= CHOICE_OVER_STRIPES
    ratio = seconds["Ring 1x16"] / seconds["Mesh 4x4"]
    explained = (waits["Ring 1x16"] - waits["Mesh 4x4"]) / (seconds["Ring 1x16"] - seconds["Mesh 4x4"])
    print(f"Mesh over Ring: {ratio:.2f} (at least {bounds['Mesh over Ring']}); "
          f"comm wait explains {100 * explained:.0f} % of the difference")
    chosen = shape_of(runs[CHOICE][0][0]["plan"])
    fastest = min((name for name in SPREADS if SPREADS[name]), key=seconds.get)
    print(f"the planner picked {chosen[0]}·{chosen[1]}; the fastest of those measured by name was {fastest}")
    holds = holds and ratio >= bounds["Mesh over Ring"] and abs(explained - 1) <= 0.1
    return holds and seconds[CHOICE] <= (1 + bounds["choice"]) * seconds[fastest]


def compare_weights(folder, network, repeats, tokens):
    """Whether sharing the weights adds what the plan says."""
    spread = SPREADS["Mesh 4x4"]
    answers = {"resident": [], "sharded": []}
    waited = []
    with contextlib.ExitStack() as stack:
        pools = {}
        for weights in answers:
            (folder / weights).mkdir()
            pools[weights] = Pool(folder / weights, network, measured=False, window=0, weights=weights, tokens=tokens)
            stack.callback(pools[weights].close)
            pools[weights].set_up()
        uncorrected = pools["sharded"].planned(spread)["weights"]["seconds"]
        for pool in pools.values():
            pool.prefill(spread)  # packs the shares
        for _ in range(repeats):
            for weights, pool in pools.items():
                before = pool.waited_for_weights()
                answers[weights].append(pool.prefill(spread)[0])
                if weights == "sharded":
                    waited.append(pool.waited_for_weights() - before)
        planned = pools["sharded"].planned(spread)["weights"]["seconds"]
    taken = {weights: [answer["seconds"]["prefill"] for answer in of] for weights, of in answers.items()}
    added = [sharded - resident for resident, sharded in zip(taken["resident"], taken["sharded"], strict=True)]
    gathered = answers["sharded"][0]["comm_bytes"].get("gather", 0)
    print(f"{tokens:,} tokens, {HOSTS} hosts, Mesh 4x4, {repeats} runs each in turns; medians: resident "
          f"{statistics.median(taken['resident']):.2f} s, sharded {statistics.median(taken['sharded']):.2f} s; "
          f"{gathered / 2**20:.2f} MiB of weights from each host, {gathered / network.bytes_per_second:.2f} s of a link; they add "
          f"{statistics.median(added):.2f} s "
          f"({min(added):.2f} to {max(added):.2f}), {statistics.median(waited):.2f} s of them in waits for weights, the "
          f"others in waits for chunks beside them; the plan says {planned:.2f} s, and said {uncorrected:.2f} s before any prefill")
    return gathered > 0 and abs(statistics.median(added) / planned - 1) <= ADDED_BY_WEIGHTS


def compare_exchanges(folder, network, repeats):
    """Whether exchanges in slices are faster than one."""
    spread = ["--heads", network.hosts, "--tile", "1x1"]
    answers = {"whole": [], "auto": []}
    with contextlib.ExitStack() as stack:
        pools = {}
        for exchange in answers:
            (folder / exchange).mkdir()
            pools[exchange] = Pool(folder / exchange, network, measured=False, window=0, model=WORKING_MODEL,
                                   tokens=TOKENS // 2, exchange=exchange)
            stack.callback(pools[exchange].close)
            pools[exchange].set_up()
            pools[exchange].prefill(spread)  # connects, and touches the memory
        for _ in range(repeats):
            for exchange, pool in pools.items():
                answers[exchange].append(pool.prefill(spread)[0])
    median = {exchange: {key: statistics.median(answer["seconds"][key] for answer in of) for key in ("prefill", "comm_wait")}
              for exchange, of in answers.items()}
    ratio = median["whole"]["prefill"] / median["auto"]["prefill"]
    at_a_time = answers["auto"][0]["plan"].get("exchange_tokens", 0)
    for exchange, name in (("whole", "one exchange"), ("auto", f"by {at_a_time} tokens")):
        print(f"{name:16} {median[exchange]['prefill']:6.2f} s, of it {median[exchange]['comm_wait']:.2f} s comm wait")
    print(f"{TOKENS // 2:,} tokens, {network.hosts} hosts, {repeats} runs each: slices are {ratio:.2f} times as fast "
          f"(at least {SLICES_OVER_ONE})")
    same = {answer["first_token"] for of in answers.values() for answer in of}
    return at_a_time > 0 and len(same) == 1 and ratio >= SLICES_OVER_ONE


def measure(pool):
    answer, _ = pool.prefill([])
    found = pool.leader.wait_for(r"links measured: between hosts (\S+) MB/s, .*")
    heads, tile = shape_of(answer["plan"])
    print(f"{found.group(0)}; they are {pool.network.bytes_per_second / 1e6:.3g} MB/s. The first run, planned without knowing "
          f"them, was {heads}·{tile} in {answer['seconds']['prefill']:.2f} s")
    return abs(float(found.group(1)) * 1e6 / pool.network.bytes_per_second - 1) <= MEASURED


def cut_a_cable(pool, network):
    usual, _ = pool.prefill([])
    first = len(pool.leader.lines)
    answer = []
    client = threading.Thread(target=lambda: answer.append(pool.prefill([])))
    client.start()
    time.sleep(usual["seconds"]["prefill"] / 2)
    network.cut(3)
    start = time.monotonic()
    while not any("is lost" in line for line in list(pool.leader.lines)[first:]) and time.monotonic() - start < 30:
        time.sleep(0.01)
    noticed = time.monotonic() - start
    client.join()
    answered = time.monotonic() - start
    assert answer, "the request was not answered"
    ranks = answer[0][0]["plan"]["ranks"]
    print(f"a cut cable: noticed after {noticed:.2f} s (at most {NOTICE_SECONDS}), "
          f"answered by {ranks} ranks after {answered:.1f} s")
    return noticed <= NOTICE_SECONDS and ranks < HOSTS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--weights", choices=["resident", "sharded"], default="resident")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a prompt, with --weights sharded")
    parser.add_argument("--exchange", action="store_true")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("throttled_network.py: needs root, for network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            sys.exit(f"throttled_network.py: needs {tool} (Debian: iproute2)")
    with contextlib.ExitStack() as stack:
        network = Network(4 if arguments.exchange else HOSTS, arguments.mbit)
        stack.callback(network.close)
        network.set_up()
        if arguments.weights == "sharded" or arguments.exchange:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            if arguments.exchange:
                holds = compare_exchanges(folder, network, arguments.repeats)
            else:
                holds = compare_weights(folder, network, arguments.repeats, arguments.tokens)
            print("holds" if holds else "DOES NOT HOLD")
            sys.exit(0 if holds else 1)
        pool = Pool(pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())), network, arguments.measured,
                    arguments.window)
        stack.callback(pool.close)
        pool.set_up()
        holds = not arguments.measured or measure(pool)
        holds = compare(pool, arguments.repeats, STRICT if arguments.strict else LOOSE) and holds
        holds = cut_a_cable(pool, network) and holds
    print("holds" if holds else "DOES NOT HOLD")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
