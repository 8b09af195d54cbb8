"""The real server, which the tests of this folder read through the Python client.

Its binary is in MESHFILL_BINARY; by default that of build/release.
"""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import threading
import time
import unittest

import numpy as np

import meshfill

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BINARY = os.environ.get("MESHFILL_BINARY", str(ROOT / "build" / "release" / "server" / "meshfill"))
SECONDS = 120 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))  # of each wait


def read_safetensors(path: pathlib.Path) -> dict:
    """{name: array}; bf16 as its bits, uint16."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    dtypes = {"F32": np.float32, "BF16": np.uint16}
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


class Process:
    """A `meshfill` that logs on standard error."""

    def __init__(self, *arguments):
        command = [BINARY, *map(str, arguments)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines = []
        self.reader = threading.Thread(target=lambda: [self.lines.append(line) for line in self.process.stderr], daemon=True)
        self.reader.start()

    def wait_for(self, pattern: str) -> str:
        """The first group of the first line that matches."""
        deadline = time.monotonic() + SECONDS
        while True:
            ended = self.process.poll() is not None
            for line in list(self.lines):
                match = re.search(pattern, line)
                if match:
                    return match.group(1)
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"no line matches {pattern!r} in:\n" + "".join(self.lines))
            time.sleep(0.01)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()


class RealServerTest(unittest.TestCase):
    """Gives each test a folder of its own, and ends what it started."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def make_model(self, name: str, **options) -> pathlib.Path:
        """Options as of `meshfill make-model`, with _ for -."""
        model = self.folder / name
        command = [BINARY, "make-model", "--arch", "llama", "--out", model]
        for option, value in options.items():
            command += ["--" + option.replace("_", "-"), value]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        return model

    def start(self, *arguments) -> Process:
        process = Process(*arguments)
        self.addCleanup(process.end)
        return process

    def connect(self, server: Process) -> meshfill.Client:
        client = meshfill.Client(server.wait_for(r"(?<!metrics) listening on (\S+:\d+)"), timeout=SECONDS)
        self.addCleanup(client.close)
        return client

    def settings(self, model: pathlib.Path, **settings) -> list:
        """Arguments: a configuration of this model alone, and keys with __ for the dot."""
        config = self.folder / "config.yaml"
        config.write_text(f"model: {{path: {model}}}\n")
        pairs = (f"{key.replace('__', '.')}={value}" for key, value in settings.items())
        return ["--config", config, *(text for pair in pairs for text in ("--set", pair))]

    def serve(self, model: pathlib.Path, ranks: int, **settings) -> meshfill.Client:
        """A client of an embedded pool of so many ranks."""
        own = {"listen": "127.0.0.1:0", "metrics_listen": "", "pool__embedded__ranks": ranks, "kv__memory_bytes": "64MiB"}
        own["pool__embedded__peak_flops"] = "1e11"
        server = self.start("serve", *self.settings(model, **own, **settings))
        server.wait_for(r" (ready): ")
        return self.connect(server)

    def serve_pool(self, model: pathlib.Path, ranks_of_workers, **settings) -> meshfill.Client:
        """A client of a front-end with a worker for each number of ranks."""
        # Nobody is lost where the machine stands still.
        patience = {"pool__silence_timeout": "20s", "pool__hang_timeout": "20s"}
        leader = {"listen": "127.0.0.1:0", "metrics_listen": "", "pool__control_listen": "127.0.0.1:0", **patience}
        server = self.start("serve", *self.settings(model, **leader, **settings))
        control = server.wait_for(r"workers join at (\S+:\d+)")
        for number, ranks in enumerate(ranks_of_workers):
            own = {"ranks": ranks, "name": f"w{number}", "threads": 1, "peak_flops": "1e11", "memory_bytes": "1GiB"}
            of_worker = {f"pool__worker__{key}": value for key, value in own.items()}
            worker = self.start("worker", "--join", control, *self.settings(model, kv__memory_bytes="64MiB", **of_worker))
            worker.wait_for(r"(joined) the pool")
        return self.connect(server)
