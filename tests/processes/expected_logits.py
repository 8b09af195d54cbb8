"""What a pool of workers has to answer: the logits of an undisturbed embedded pool under the same plan.

Bits depend on the plan and on its schedule, whose order of blocks an answer does not tell. With rings (tiles of one row
or one column) there is only one: these must be the same to the bit. Of other tiles the bits may differ where the pools
have other speeds and so other schedules: these must be the same within f32's accuracy.
"""
import math
import pathlib

from cli_harness import floats, read_safetensors, run

MOST_RELATIVE_ERROR = 1e-4  # in the L2 norm


def relative_error(path, expected_path):
    ours, theirs = (floats(read_safetensors(each)["logits"][2]) for each in (path, expected_path))
    return math.dist(ours, theirs) / math.hypot(*theirs) if len(ours) == len(theirs) else math.inf


class ExpectedLogits:
    def __init__(self, config, prompt, folder):
        self.config = config
        self.prompt = prompt
        self.folder = pathlib.Path(folder)
        self.paths = {}  # by plan
        self.other_bits = 0  # answers of other tiles that were right, but not to the bit

    def is_right(self, plan, logits):
        key = tuple(plan[name] for name in ("ranks", "heads", "a", "b", "layout", "stripe"))
        if key not in self.paths:
            self.paths[key] = self._run(plan, self.folder / f"expected{len(self.paths)}.safetensors")
        expected = self.paths[key]
        if logits.read_bytes() == expected.read_bytes():
            return True
        if 1 in (plan["a"], plan["b"]) or not relative_error(logits, expected) <= MOST_RELATIVE_ERROR:
            return False
        self.other_bits += 1
        return True

    def _run(self, plan, path):
        done = run("prefill", "--config", self.config, "--ranks", plan["ranks"], "--heads", plan["heads"], "--tile",
                   f'{plan["a"]}x{plan["b"]}', "--layout", plan["layout"], "--stripe", max(1, plan["stripe"]), "--tokens",
                   self.prompt, "--format", "bytes", "--logits-out", path)
        assert done.returncode == 0, done.stderr
        return path

    def __str__(self):
        plans = ", ".join(map(str, sorted(self.paths)))
        return f"plans (ranks, heads, a, b, layout, stripe): {plans}; {self.other_bits} answers under another schedule"
