"""What the tests of a pool of processes share: a leader, its workers, requests, and what the leader's metrics say."""
import json
import pathlib
import random
import re
import socket
import subprocess
import time
import urllib.request

from cli_harness import MESHFILL, TIMEOUT_SECONDS, CliTestCase, run
from control_relay import ControlRelay
from pool_process import Process

# Long enough that a busy machine's pauses are no faults. Who stops altogether is noticed by silence; a compute loop
# that stands still in a process that talks, by hang_timeout, which the tests of it set.
SILENCE_SECONDS = 4


def lasting_port():
    """A free port that the system gives to nobody who asks for any, so that a leader that starts again finds it free."""
    first_given = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(100):
        port = random.randrange(10_000, max(first_given, 12_000))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError(f"no free port below {first_given}")


class PoolTestCase(CliTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.pool_config = cls.tmp / "pool.yaml"
        cls.pool_config.write_text(
            f"model:\n  path: {cls.model}\nlisten: 127.0.0.1:0\nmetrics_listen: 127.0.0.1:0\n"
            f"pool:\n  control_listen: 127.0.0.1:0\n  empty_timeout: 5s\n  silence_timeout: {SILENCE_SECONDS}s\n"
            "  hang_timeout: 60s\nkv:\n  cache: false\n"  # a prompt that is sent again is computed again
        )
        cls.worker_config = cls.tmp / "worker.yaml"
        cls.worker_config.write_text(
            f"model:\n  path: {cls.model}\npool:\n  silence_timeout: {SILENCE_SECONDS}s\n"
            "  worker:\n    threads: 1\n    peak_flops: 1e11\n    memory_bytes: 2GiB\n"
            f"plan:\n  profile_path: {cls.tmp / 'speed.json'}\n"
        )
        # Workers of one rank find their speed measured: else a busy machine makes one seem slow by chance, and whether a
        # prompt leaves it out is chance, too.
        measured = run("plan", "--config", cls.config, "--tokens", 1, "--set", "pool.embedded.ranks=1", "--set",
                       "pool.embedded.threads=1", "--set", f"plan.profile_path={cls.tmp / 'speed.json'}")
        assert measured.returncode == 0, measured.stderr

    def setUp(self):
        self.leader_environment = {}
        self.start_leader()

    def start_leader(self, *settings):
        arguments = ["serve", "--config", self.pool_config]
        if not any(setting.startswith("pool.control_listen=") for setting in settings):
            settings += (f"pool.control_listen=127.0.0.1:{lasting_port()}",)
        for setting in settings:
            arguments += ["--set", setting]
        self.leader = self.start(*arguments, environment=self.leader_environment)
        self.address = self.leader.wait_for(r" listening on (\S+:\d+)").group(1)
        self.metrics_address = self.leader.wait_for(r"metrics listening on (\S+:\d+)").group(1)
        self.control = self.leader.wait_for(r"workers join at (\S+:\d+)").group(1)

    def start(self, *arguments, **settings):
        process = Process(*arguments, **settings)
        self.addCleanup(process.end)
        return process

    def worker(self, name, *settings, join=None, environment=None):
        arguments = ["worker", "--config", self.worker_config, "--join", join or self.control, "--set",
                     f"pool.worker.name={name}"]
        for setting in settings:
            arguments += ["--set", setting]
        return self.start(*arguments, environment=environment)

    def worker_behind(self, watch, name):
        """A worker whose control stream is shown to `watch` (control_relay.py)."""
        relay = ControlRelay(self.control, watch)
        self.addCleanup(relay.close)
        return self.worker(name, join=relay.address)

    def worker_struck(self, name, kind, strike, run=1):
        """A worker; `strike` is called once, while the first message of `kind` in its run-th run is on its way."""
        runs = []

        def watch(message):
            if message.kind == kind and message.run() not in (0, *runs):
                runs.append(message.run())
                if len(runs) == run:
                    strike()

        return self.worker_behind(watch, name)

    def workers(self, *names):
        processes = [self.worker(name) for name in names]
        for process in processes:
            process.wait_for("joined the pool")
        return processes

    def prefill(self, tokens, *arguments):
        return json.loads(self.succeed("prefill", "--server", self.address, "--json", "--tokens", tokens, *arguments))

    def prefill_later(self, tokens, *arguments):
        return subprocess.Popen(
            [MESHFILL, "prefill", "--server", self.address, "--json", "--tokens", str(tokens), *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def metric(self, name):
        text = urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(name + r"[ {]", line))

    def phases(self):
        """The prefills that the leader has, by id."""
        status = json.load(urllib.request.urlopen(f"http://{self.metrics_address}/status.json", timeout=5))
        return {request["id"]: request["phase"] for request in status["pool"]["requests"]}

    def wait_until(self, condition, seconds=TIMEOUT_SECONDS, pause=0.02):
        deadline = time.monotonic() + seconds
        while not condition():
            self.assertLess(time.monotonic(), deadline, "it does not come to pass:\n" + "".join(self.leader.lines))
            time.sleep(pause)

    def answer_of(self, running):
        """Of prefill_later: the object it printed."""
        out, error = running.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual(running.returncode, 0, error.decode() + "".join(self.leader.lines))
        return json.loads(out)

    def logged(self, text):
        return sum(text in line for line in list(self.leader.lines))
