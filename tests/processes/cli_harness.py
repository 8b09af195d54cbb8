"""What the tests of the real binary share: running it, reading what it leaves, and what every run must keep."""
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

MESHFILL = sys.argv.pop(1)  # the path of the binary
TIMEOUT_SECONDS = 120 * int(os.environ.get("MESHFILL_TIMEOUT_SCALE", "1"))
VOCAB = 256

PREFILL_KEYS = ["request_id", "tokens", "first_token", "top", "plan", "seconds", "comm_bytes", "mfu"]
PLAN_SUMMARY_KEYS = ["ranks", "heads", "a", "b", "layout", "stripe"]
SECONDS_KEYS = ["queue", "prefill", "attention", "comm_wait", "ttft"]
COMM_BYTES_KEYS = ["q", "kv", "o", "all_to_all"]
PREDICTION_KEYS = ["seconds", "compute_seconds", "comm_wait_seconds", "comm_bytes", "peak_bytes"]


def crowding():
    """What limits of time are multiplied by: 1, and more where over four processes want each core."""
    return max(1, os.getloadavg()[0] / os.cpu_count() / 4)


def run(*arguments, stdin=b""):
    return subprocess.run([MESHFILL, *map(str, arguments)], input=stdin, capture_output=True, timeout=TIMEOUT_SECONDS)


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    data = pathlib.Path(path).read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    body = data[8 + size :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def floats(data):
    return struct.unpack(f"<{len(data) // 4}f", data)


def watches_interrupts(pid):
    """A command blocks SIGINT, and reads it from a descriptor (cancel_watch.cc)."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^SigBlk:\s*(\w+)", status, re.M)[1], 16) >> (signal.SIGINT - 1) & 1 == 1


class Server:
    """`meshfill serve` on ports that the system chooses.

    `prepare` is called in its process before it begins. `client`: what its clients say besides the address.
    """

    def __init__(self, *arguments, prepare=None, client=()):
        self.client = client
        self.process = subprocess.Popen(
            [MESHFILL, "serve", *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            preexec_fn=prepare)
        self.lines = []
        self.address = None
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self._answers() and time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError("the server ended: " + "".join(self.lines))
            time.sleep(0.05)

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            match = re.search(r"listening on (\S+:\d+)", line)
            if match and self.address is None:
                self.address = match.group(1)

    def _answers(self):
        return self.address is not None and self.prefill_tokens("1 2 3").returncode == 0

    def prefill_tokens(self, text, *arguments):
        return run("prefill", "--server", self.address, "--tokens", "-", "--json", *self.client, *arguments, stdin=text.encode())

    def wait_for_line(self, text):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, f"no line with {text!r} in\n" + "".join(self.lines)
            time.sleep(0.01)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self):
        """Its exit status."""
        status = self.process.wait(TIMEOUT_SECONDS)
        self.reader.join(TIMEOUT_SECONDS)
        self.process.stderr.close()
        return status


class CliTestCase(unittest.TestCase):
    """Gives each class a folder of its own with a tiny model, a config of 4 ranks, a short and a long prompt."""

    @classmethod
    def setUpClass(cls):
        cls.seed = random.randrange(2**32)
        cls.random = random.Random(cls.seed)
        print(f"seed {cls.seed}", file=sys.stderr)
        cls.folder = tempfile.TemporaryDirectory()
        cls.tmp = pathlib.Path(cls.folder.name)
        os.environ["XDG_CACHE_HOME"] = str(cls.tmp / "cache")  # not the user's
        cls.model = cls.tmp / "model"
        made = run("make-model", "--arch", "llama", "--out", cls.model, "--layers", 2, "--hidden", 64, "--heads", 4,
                   "--kv-heads", 2, "--vocab", VOCAB, "--dtype", "f32", "--context", 1 << 20)
        assert made.returncode == 0, made.stderr
        cls.config = cls.tmp / "config.yaml"
        cls.config.write_text(
            f"model:\n  path: {cls.model}\nlisten: 127.0.0.1:0\nmetrics_listen: ''\n"
            "pool:\n  embedded:\n    ranks: 4\n    peak_flops: 1e11\n"
        )
        cls.ids = [cls.random.randrange(VOCAB) for _ in range(777)]
        cls.prompt = cls.tmp / "prompt.ids"
        cls.prompt.write_text(" ".join(map(str, cls.ids)))
        cls.long_prompt = cls.tmp / "long.bytes"
        cls.long_prompt.write_bytes(cls.random.randbytes(400_000))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def succeed(self, *arguments, stdin=b""):
        result = run(*arguments, stdin=stdin)
        self.assertEqual(result.returncode, 0, result.stderr.decode())
        self.assertEqual(result.stderr, b"")
        return result.stdout.decode()

    def embedded(self, *arguments, stdin=b""):
        out = self.succeed("prefill", "--config", self.config, "--json", *arguments, stdin=stdin)
        self.assertEqual(out.count("\n"), 1)
        return json.loads(out)

    def refuse(self, *arguments, status, message, stdin=b""):
        """One line on standard error that begins with the command and matches `message`; nothing on standard output."""
        result = run(*arguments, stdin=stdin)
        error = result.stderr.decode()
        self.assertEqual(result.returncode, status, f"{arguments}: {error}")
        self.assertEqual(result.stdout, b"", arguments)
        self.assertRegex(error, r"\Ameshfill[^\n]*: [^\n]+\n\Z", arguments)
        self.assertRegex(error, message, arguments)
        if arguments and not str(arguments[0]).startswith("-") and arguments[0] in ("prefill", "plan", "make-model"):
            self.assertTrue(error.startswith(f"meshfill {arguments[0]}: "), error)

    def check_prefill_object(self, result, tokens, ranks, top_k=1, attempts=1):
        self.assertEqual(list(result), PREFILL_KEYS + (["attempts"] if attempts > 1 else []))
        self.assertEqual(result.get("attempts", 1), attempts)
        self.assertEqual(result["tokens"], tokens)
        self.assertEqual(len(result["top"]), top_k)
        for best in result["top"]:
            self.assertEqual(list(best), ["token", "logit"])
        self.assertEqual(result["first_token"], result["top"][0]["token"])
        logits = [best["logit"] for best in result["top"]]
        self.assertEqual(logits, sorted(logits, reverse=True))
        plan = result["plan"]
        self.assertEqual(list(plan), PLAN_SUMMARY_KEYS)
        self.assertEqual(plan["ranks"], ranks)
        self.assertEqual(plan["heads"] * plan["a"] * plan["b"], ranks)
        self.assertEqual(list(result["seconds"]), SECONDS_KEYS)
        self.assertGreater(result["seconds"]["prefill"], 0)
        self.assertEqual(list(result["comm_bytes"]), COMM_BYTES_KEYS)
        self.assertGreater(result["mfu"], 0)

    def interrupt(self, *where):
        process = subprocess.Popen(
            [MESHFILL, "prefill", *map(str, where), "--tokens", self.long_prompt, "--format", "bytes", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not watches_interrupts(process.pid) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.7)
        self.assertIsNone(process.poll(), "the prompt is too short for this machine: make it longer")
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual((process.returncode, out, error), (128 + signal.SIGINT, b"", b"meshfill prefill: cancelled\n"))
        self.assertLess(time.monotonic() - start, 5 * crowding())
