"""`python -m meshfill`: output, exit statuses, errors of one line; and the tokenizer."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import grpc

from fake_server import Faults
from fixtures import ServerTest
from meshfill.cli import main

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "truncation": None,
    "padding": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2, "three": 3, "größe": 4}, "unk_token": "[UNK]"},
}


class CliTest(ServerTest):
    def run_cli(self, *arguments, status=0, stdin="", **environment):
        """What it printed."""
        command = [sys.executable, "-m", "meshfill", *arguments]
        environment = {**os.environ, **environment}
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=60)
        return self.check_output(status, done.returncode, done.stdout, done.stderr)

    def call_cli(self, *arguments, status=0, stdin="", **environment):
        """The same in this process: another takes half a second to load its modules."""
        out, error, source = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin.encode()))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), mock.patch("sys.stdin", source):
            with mock.patch.dict(os.environ, environment):
                done = main(list(arguments))
        return self.check_output(status, done, out.getvalue(), error.getvalue())

    def check_output(self, wanted, status, out, error):
        self.assertEqual(status, wanted, error)
        if status:
            self.assertEqual(out, "")
            self.assertEqual(len(error.splitlines()), 1, error)
        return error if status else out

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.ids = os.path.join(self.folder, "ids.txt")
        with open(self.ids, "w") as file:
            file.write("1 2\n3\n")

    def test_a_prefill_of_ids(self):
        server = self.serve()
        out = self.run_cli("prefill", "--server", server.address, "--ids", self.ids, "--top-k", "2")
        self.assertIn("first token  6\n", out)
        self.assertIn("TTFT", out)
        value = json.loads(self.run_cli("prefill", "--server", server.address, "--ids", "-", "--json", stdin="4 5"))
        self.assertEqual((value["first_token"], value["tokens"]), (9, 2))

    def test_a_prefill_of_text(self):
        server = self.serve()
        with open(os.path.join(self.folder, "tokenizer.json"), "w") as file:
            json.dump(TOKENIZER, file)
        text = os.path.join(self.folder, "text")
        with open(text, "w") as file:
            file.write("hello world")
        common = ["prefill", "--server", server.address, "--text", text]
        out = self.run_cli(*common, "--tokenizer", self.folder)
        self.assertIn("first token  3  'three'", out)
        self.assertIn("prompt       2 tokens", out)
        self.assertIn("--tokenizer", self.call_cli(*common, status=2))
        self.assertIn("tokenizer.json", self.call_cli(*common, "--tokenizer", "/nowhere", status=2))

    def test_the_time_to_first_token_has_no_tokenizing(self):
        server = self.serve()
        with open(os.path.join(self.folder, "tokenizer.json"), "w") as file:
            json.dump(TOKENIZER, file)
        now = 0.0

        def encode(*_):
            nonlocal now
            now += 100
            return [1, 2]

        prefill = ["prefill", "--server", server.address, "--text", "-", "--tokenizer", self.folder, "--json"]
        with mock.patch("meshfill.cli.time") as time, mock.patch("meshfill.text.TextTokenizer.encode", encode):
            time.monotonic.side_effect = lambda: now
            value = json.loads(self.call_cli(*prefill, stdin="hello world"))
        self.assertEqual(value["tokens"], 2)
        self.assertEqual(value["seconds"]["ttft"], 0)

    def test_text_from_standard_input_is_utf_8_whatever_the_locale(self):
        server = self.serve()
        with open(os.path.join(self.folder, "tokenizer.json"), "w", encoding="utf-8") as file:
            json.dump(TOKENIZER, file)
        command = [sys.executable, "-m", "meshfill", "prefill", "--server", server.address]
        command += ["--text", "-", "--tokenizer", self.folder]
        environment = dict(os.environ, LC_ALL="C", PYTHONIOENCODING="latin-1", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")

        def run(stdin):
            return subprocess.run(command, input=stdin, env=environment, capture_output=True, timeout=60)

        done = run("größe world".encode("utf-8"))
        self.assertIn(b"first token  6", done.stdout, done.stderr)  # 4 and 2
        done = run(b"\xff")
        self.assertEqual(done.returncode, 2)
        self.assertIn(b"utf-8", done.stderr)

    def test_plan_pool_and_cancel(self):
        server = self.serve()
        self.assertIn("2 x 2", self.call_cli("plan", "--server", server.address, "--tokens", "1000"))
        plan = json.loads(self.call_cli("plan", "--server", server.address, "--tokens", "1000", "--json"))
        steps = [{"comm": "kv", "blocks": [[0, 1]]}, {"comm": "q", "blocks": [[1, 1]], "spans": 2}]
        self.assertEqual(plan["steps"], steps)
        self.assertEqual(json.loads(self.call_cli("pool", "--server", server.address, "--json"))["ranks"], 4)
        self.assertIn("request      long: of team, paused, 65536 tokens,", self.call_cli("pool", "--server", server.address))
        self.assertIn("not live", self.run_cli("cancel", "--server", server.address, "gone", status=2))

    def test_the_token_is_of_a_file_or_of_the_environment(self):
        server = self.serve(token="secret")
        pool = ["pool", "--server", server.address]
        file = os.path.join(self.folder, "token")
        with open(file, "w") as out:
            out.write("secret\n")
        self.call_cli(*pool, "--token-file", file, MESHFILL_TOKEN="other")
        self.run_cli(*pool, MESHFILL_TOKEN="secret")
        for token in ("", "other"):
            self.assertIn("no token, or a wrong one", self.call_cli(*pool, status=1, MESHFILL_TOKEN=token))

    def test_bad_usage_and_input_are_2_the_rest_1(self):
        server = self.serve()
        at = ["--server", server.address]
        self.run_cli(status=2)
        self.call_cli("prefill", *at, status=2)
        self.call_cli("prefill", *at, "--ids", self.ids, "--tile", "9", status=2)
        self.assertIn("/nowhere", self.call_cli("prefill", *at, "--ids", "/nowhere", status=2))
        self.assertIn("id 1 is 'x'", self.call_cli("prefill", *at, "--ids", "-", status=2, stdin="1 x"))
        self.assertIn("at least one", self.call_cli("prefill", *at, "--ids", "-", status=2))
        self.assertIn("meshfill serve", self.run_cli("prefill", "--server", "127.0.0.1:1", "--ids", self.ids, status=1))
        server.faults = Faults(refuse=(grpc.StatusCode.INVALID_ARGUMENT, "id 7\nis outside the vocabulary"))
        error = self.call_cli("prefill", *at, "--ids", self.ids, status=2)
        self.assertEqual(error, f"meshfill prefill: server {server.address}: id 7 is outside the vocabulary\n")
        server.faults = Faults(refuse=(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
        self.call_cli("prefill", *at, "--ids", self.ids, status=1)


if __name__ == "__main__":
    unittest.main()
