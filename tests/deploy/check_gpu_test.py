#!/usr/bin/env python3
"""The dry run of tests/deploy/check-gpu.sh: its calls over devices that the host plays, whole and with planted failures.
Whatever happens, there are a table, a log and the figures.

Usage: check_gpu_test.py PATH_OF_MESHFILL_FAKE [unittest arguments]

The gpu tests are played by scripts that print what Google Test does; PyTorch is absent, or what a test writes. So is
meshfill where a test is of the steps around it. The tests run side by side.
"""
import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
TESTS = ("cuda_attention_test", "cuda_stream_test", "parity_test", "independence_test", "nccl_test", "submeshes_test")
PASSES = "#!/bin/sh\necho '[  PASSED  ] 3 tests.'\n"
MEASURES = """#!/bin/sh
[ "${CUDA_VISIBLE_DEVICES-0}" ] || { echo 'no GPU is visible'; exit 2; }
echo '{"flops_per_second": 1e12}'
"""


def runs(pid):
    """Whether it has not ended; its parent may not know yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class CheckGpuTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        self.logs = self.root / "logs"
        (self.root / "package/bin").mkdir(parents=True)
        (self.root / "path").mkdir()
        self.script("package/bin/meshfill", MEASURES)
        for test in TESTS:
            self.script(f"package/bin/{test}", PASSES)
        self.script("path/nvidia-smi", """#!/bin/sh
            case "$*" in
              *memory.free*) echo 60000 ;;
              *index*) echo 0 ;;
              *) echo 'Fake GPU, 580.1' ;;
            esac\n""")

    def script(self, path, text):
        path = self.root / path
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def take_meshfill(self):
        path = self.root / "package/bin/meshfill"
        path.unlink()
        path.symlink_to(MESHFILL)

    def start(self, part, limits=None, **variables):
        environment = {**os.environ, "PATH": f"{self.root}/path:{os.environ['PATH']}", "MESHFILL_GPU_DRY": "1",
                       "MESHFILL_GPU_LIMITS": json.dumps(limits or {}), "MESHFILL_FAKE_DEVICES": "1",
                       "TMPDIR": str(self.root), **variables}
        return subprocess.Popen([sys.executable, HERE / "check_gpu.py", part, self.root / "package", self.logs],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def rows(self, part, process, timeout=200):
        """By step: what the table says of it. The table stands on the screen and beside the log."""
        self.screen, self.errors = process.communicate(timeout=timeout)
        table = (self.logs / f"{part}.txt").read_text()
        self.assertIn(table, self.screen, self.errors)
        self.log = (self.logs / f"{part}.log").read_text()
        self.figures = json.loads((self.logs / f"{part}.json").read_text())["figures"]
        rows = {}
        for line in table.splitlines()[3:]:
            name, *rest = [cell.strip() for cell in line.split("  ") if cell.strip()]
            rows[name] = " | ".join(rest)
        return rows

    def check(self, limits=None):
        return self.rows("check", self.start("check", limits))

    def test_a_call_checks_and_measures(self):
        self.take_meshfill()
        rows = self.check()
        for step in ("pre-flight", "attention, sm90 alone", "stream, each operation", "product", "parity with transformers"):
            self.assertIn("met", rows[step], self.errors)
            self.assertNotIn("NOT MET", rows[step])
        self.assertGreater(self.figures["product"], 0)
        self.assertIn("[  PASSED  ] 3 tests.", self.log)
        # The host plays no attention of any speed.
        self.assertIn("attention has no speed", rows["attention 0k, head_dim 16"])

    def test_a_hang_ends_with_all_that_it_started(self):
        mark = self.root / "child"
        self.script("package/bin/cuda_attention_test",
                    f"#!/bin/sh\necho '[ RUN      ] sm90'\nsh -c 'echo $$ >{mark}; exec sleep 1000' &\nsleep 1000\n")
        rows = self.check({"attention, sm90 alone": 2, "attention, sm80 alone": 1})
        self.assertIn("not over after 2 s | all pass | NOT MET", rows["attention, sm90 alone"])
        deadline = time.monotonic() + 10
        while runs(int(mark.read_text())):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        self.assertIn("[ RUN      ] sm90", self.log)
        self.assertIn("[ RUN      ] sm90", self.errors)  # the last lines, on the screen
        self.assertIn("not run: attention, sm90 alone: failed", rows["parity with transformers"])
        self.assertIn("not run: attention, sm90 alone: failed", rows["attention 0k, head_dim 16"])
        self.assertNotIn("not run", rows["stream, each operation"])
        self.assertNotIn("not run", rows["product"])

    def test_a_crash_is_named(self):
        self.script("package/bin/cuda_stream_test", "#!/bin/sh\necho '[ RUN      ] CudaStreamTest.Gemm'\nkill -SEGV $$\n")
        rows = self.check()
        self.assertIn("cuda_stream_test died of SIGSEGV: [ RUN ] CudaStreamTest.Gemm", rows["stream, each operation"])
        self.assertIn("not run: stream, each operation: failed", rows["independence, 1 to 8 ranks"])
        self.assertNotIn("not run", rows["attention, sm80 alone"])

    def test_a_missing_library_stops_what_needs_the_device(self):
        self.script("path/ldd", "#!/bin/sh\necho '\tlibabsl_status.so.20220623 => not found'\n")
        rows = self.check()
        self.assertIn("misses libabsl_status.so.20220623", rows["pre-flight"])
        for step in ("attention, sm90 alone", "stream, each operation", "product", "parity with transformers"):
            self.assertIn("not run: pre-flight: failed", rows[step])

    def test_an_exception_costs_its_step_alone(self):
        self.script("package/bin/meshfill", """#!/bin/sh
            case "$*" in
              *'--repeats 1 '*) echo '{"flops_per_second": 1e12}' ;;
              *gemm*) echo '{"seconds": 1}' ;;
              *) exit 0 ;;
            esac\n""")
        rows = self.check()
        self.assertIn("KeyError: 'flops_per_second' | measured | NOT MET", rows["product"])
        self.assertIn("no JSON: it printed nothing | measured | NOT MET", rows["attention 0k, head_dim 16"])
        self.assertIn("met", rows["parity with transformers"])

    def test_told_to_end_it_leaves_its_table(self):
        self.script("package/bin/cuda_stream_test", "#!/bin/sh\necho '[ RUN      ] long'\nexec sleep 1000\n")
        process = self.start("check")
        log = self.logs / "check.log"
        deadline = time.monotonic() + 60
        while not log.exists() or "[ RUN      ] long" not in log.read_text():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        rows = self.rows("check", process)
        self.assertIn("met", rows["attention, sm90 alone"])

    def test_what_is_left_when_the_call_is_over_is_not_begun(self):
        for program in ("cuda_stream_test", "parity_test"):
            self.script(f"package/bin/{program}", "#!/bin/sh\nexec sleep 1000\n")
        rows = self.rows("check", self.start("check", MESHFILL_GPU_MINUTES="0.3"), timeout=100)
        self.assertIn("not run: out of time | status 2 | -", rows["no visible GPU is refused"])
        self.assertIn("not run: out of time", rows["independence, 1 to 8 ranks"])

    def test_the_model_is_written_run_and_removed(self):
        self.take_meshfill()
        rows = self.rows("model", self.start("model"))
        self.assertIn("met", rows["the model is written"], self.errors)
        self.assertGreater(self.figures["8B prefill, 0k"], 0, self.errors)
        self.assertGreater(self.figures["experts prefill, 0k"], 0, self.errors)
        self.assertGreater(self.figures["8B in FP8 prefill, 0k"], 0, self.errors)
        self.assertGreater(self.figures["streamed, 0k"], 0, self.errors)
        self.assertRegex(rows["longest prompt, 8B"], r"tokens fit \d+ GiB|no time|no prompt fits")
        self.assertEqual([*self.root.glob("meshfill-gpu-*"), *pathlib.Path("/dev/shm").glob("meshfill-gpu-*")], [])

    def test_our_figures_do_not_wait_for_pytorch(self):
        # In place of PyTorch: one figure, then nothing.
        for package in ("torch", "torch/nn", "torch/nn/attention", "transformers"):
            (self.root / "python" / package).mkdir(parents=True, exist_ok=True)
            (self.root / "python" / package / "__init__.py").write_text("")
        (self.root / "python/torch/nn/attention/__init__.py").write_text("SDPBackend = sdpa_kernel = None\n")
        (self.root / "python/transformers/__init__.py").write_text(
            "import sys\nassert sys.stdin.readline() == 'go\\n'\n"
            "print('{\"name\": \"product\", \"PyTorch\": 1e-9}', flush=True)\nimport time\ntime.sleep(1000)\n")
        rows = self.rows("compare", self.start("compare", {"PyTorch's figures": 4}, PYTHONPATH=str(self.root / "python")))
        self.assertIn("1 figures, then out of time", rows["PyTorch's figures"])
        self.assertRegex(rows["product, beside"], r"1 TFLOP/s \(PyTorch 0\): .* \| met")
        self.assertIn("met", rows["NCCL, 2 processes"])
        self.assertIn("one GPU", rows["NCCL's CTAs and margin, 2 ranks"])


class SideBySide:
    """A runner: most of a test is waiting."""

    def run(self, suite):
        def run_one(case):
            result = unittest.TestResult()
            begin = time.monotonic()
            case.run(result)
            for _, trace in result.failures + result.errors:
                print(trace, file=sys.stderr)
            print(f"{case.id()}: {'ok' if result.wasSuccessful() else 'FAILED'}, {time.monotonic() - begin:.1f} s",
                  file=sys.stderr, flush=True)
            return result

        cases = [case for of_class in suite for case in of_class]
        total = unittest.TestResult()
        with concurrent.futures.ThreadPoolExecutor(max(1, len(cases))) as pool:
            for result in pool.map(run_one, cases):
                total.failures += result.failures
                total.errors += result.errors
        total.testsRun = len(cases)
        return total


if __name__ == "__main__":
    MESHFILL = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main(testRunner=SideBySide)
