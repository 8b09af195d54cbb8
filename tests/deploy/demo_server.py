"""A real server with a tiny model, for the check scripts."""
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request

RANKS = 4
START_SECONDS = 120
CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def wait_for(what, condition):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    sys.exit(f"{what}: not within {START_SECONDS} s")


def stop(process):
    process.send_signal(signal.SIGTERM)
    process.wait(60)


class DemoServer:
    """`meshfill serve` on ports that the system chooses, `api` and `pages`: with an embedded pool, or with workers."""

    def __init__(self, meshfill, folder, workers=False, settings=()):
        self.meshfill = meshfill
        self.folder = folder
        self.processes = []
        model = folder / "demo-model"
        # With experts, so that their metrics have something to tell.
        subprocess.run([meshfill, "make-model", "--arch", "mixtral", "--out", model, "--layers", "2", "--hidden", "128",
                        "--vocab", "256"], check=True, stdout=subprocess.DEVNULL)
        self.model = f"model.path={model}"
        pool = ["pool.control_listen=127.0.0.1:0"] if workers else [f"pool.embedded.ranks={RANKS}"]
        text = self._start("serve", "pool.yaml" if workers else "local.yaml", "listen=127.0.0.1:0",
                           "metrics_listen=127.0.0.1:0", *pool, *settings, until=r" waits for workers" if workers else r" ready")
        self.api = re.search(r"Z listening on (\S+)$", text, re.M).group(1)
        self.pages = re.search(r"Z metrics listening on (\S+)$", text, re.M).group(1)
        if workers:
            control = re.search(r"workers join at (\S+)", text).group(1)
            for index in range(RANKS):
                self._start("worker", "worker.yaml", f"pool.worker.name=worker-{index}", "pool.worker.threads=1",
                            arguments=["--join", control], until=r"joined")

    def _start(self, command, config, *settings, until, arguments=()):
        """Its log, once `until` is in it."""
        log = self.folder / f"{command}-{len(self.processes)}.log"
        for each in (self.model, *settings):
            arguments = [*arguments, "--set", each]
        with log.open("w") as file:
            process = subprocess.Popen([self.meshfill, command, "--config", CONFIGS / config, *arguments], stderr=file)
        self.processes.insert(0, process)  # workers end before the front-end
        wait_for(f"the start of {command}", lambda: re.search(until, log.read_text()) or process.poll() is not None)
        if process.poll() is not None:
            sys.exit(f"{command} ended: {log.read_text()}")
        return log.read_text()

    def stop_workers(self):
        while len(self.processes) > 1:
            stop(self.processes.pop(0))

    def stop(self):
        self.stop_workers()
        stop(self.processes[0])

    def prefill(self, tokens, *options):
        """The exit status of a prefill of random bytes."""
        return self.start_prefill(tokens, *options).wait()

    def start_prefill(self, tokens, *options):
        client = subprocess.Popen([self.meshfill, "prefill", "--server", self.api, "--tokens", "-", "--format", "bytes",
                                   "--json", *options], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        client.stdin.write(random.randbytes(tokens))
        client.stdin.close()
        return client
