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
    """`meshfill serve` with an embedded pool, on ports that the system chooses: `api` and `pages`."""

    def __init__(self, meshfill, folder):
        self.meshfill = meshfill
        model = folder / "demo-model"
        subprocess.run([meshfill, "make-model", "--arch", "llama", "--out", model, "--layers", "2", "--hidden", "128",
                        "--vocab", "256"], check=True, stdout=subprocess.DEVNULL)
        config = pathlib.Path(__file__).parent.parent / "configs" / "local.yaml"
        log = folder / "server.log"
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [meshfill, "serve", "--config", config, "--set", f"model.path={model}", "--set", "listen=127.0.0.1:0",
                 "--set", "metrics_listen=127.0.0.1:0", "--set", f"pool.embedded.ranks={RANKS}"], stderr=file)
        wait_for("the server's start", lambda: " ready" in log.read_text() or self.process.poll() is not None)
        text = log.read_text()
        if self.process.poll() is not None:
            sys.exit("the server ended: " + text)
        self.api = re.search(r"Z listening on (\S+)$", text, re.M).group(1)
        self.pages = re.search(r"Z metrics listening on (\S+)$", text, re.M).group(1)

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
