#!/usr/bin/env python3
"""The model of deploy/make_demo_model.py goes on as the prompt did before, whatever the plan; a search says how.

Usage: demo_model_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "deploy"))
import make_demo_model  # noqa: E402

WORD = 16  # bytes


class DemoModelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.model = cls.folder / "model"
        subprocess.run([sys.executable, ROOT / "deploy/make_demo_model.py", cls.model], check=True)
        seed = random.randrange(2**32)
        print(f"seed {seed}", file=sys.stderr)
        cls.random = random.Random(seed)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def first_token(self, prompt, *plan):
        command = [MESHFILL, "prefill", "--config", ROOT / "configs/local.yaml", "--model", self.model, "--tokens", "-",
                   "--format", "bytes", "--json", "--set", "pool.embedded.peak_flops=1e11", *plan]
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        done = subprocess.run(command, input=prompt, capture_output=True, check=False, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)["first_token"]

    def test_it_goes_on_as_the_prompt_did(self):
        words = [self.random.randbytes(WORD) for _ in range(20)]
        for plan in (["--tile", "2x2"], ["--tile", "1x4"], ["--ranks", "1"], ["--heads", "2", "--tile", "2x1"]):
            prompt = b"".join(words) + b"".join(self.random.choice(words) for _ in range(self.random.randrange(60)))
            last = self.random.choice(words)
            cut = self.random.randrange(make_demo_model.BYTES, WORD - 1)
            prompt += last[:cut]
            self.assertEqual(make_demo_model.continuation(prompt)[0], last[cut])
            self.assertEqual(self.first_token(prompt, *plan), last[cut], (plan, len(prompt), cut))

    def test_the_answer_comes_from_anywhere(self):
        """What is asked for stands once, at a place of random depth among random bytes of another alphabet."""
        for _ in range(2):
            needle = bytes(self.random.sample(range(128), WORD))
            hay = bytes(self.random.randrange(128, 256) for _ in range(self.random.randrange(500, 2500)))
            depth = self.random.randrange(len(hay))
            prompt = hay[:depth] + needle + hay[depth:] + needle[: WORD // 2]
            self.assertEqual(self.first_token(prompt, "--tile", "2x2"), needle[WORD // 2], (len(hay), depth))

    def test_continuation_counts(self):
        self.assertEqual(make_demo_model.continuation(b"abcdX.abcdY.abcdY.abcd"), (ord("Y"), 3))
        self.assertEqual(make_demo_model.continuation(b"abcdefgh"), (None, 0))
        self.assertEqual(make_demo_model.continuation(b"aaaaaa"), (ord("a"), 2))


if __name__ == "__main__":
    MESHFILL = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
