"""The third call of tests/deploy/check-gpu.sh: beside PyTorch, NCCL, and what only compute-sanitizer sees.

Our figures are measured first. One process then has all of PyTorch's; what it has printed by its limit counts.
"""
import concurrent.futures
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

from check_gpu_model import Model, prefill_name
from check_gpu_pool import Pool
from check_gpu_run import ROOT, Failed, NotRun, end_group, last_line
from check_gpu_steps import (ATTENTION, PREFLIGHT, SMALL_SM90, STREAM, attention_name, measure_attention, measure_product,
                             preflight, tested)

TORCH = "PyTorch's figures"


class Torch:
    """PyTorch is imported while our steps run; it begins to measure when it is told to."""

    def __init__(self, run, shapes):
        self.run, self.process = run, None
        self.path = run.logs / "torch.log"
        if run.device:
            with self.path.open("wb") as output:
                self.process = run.start([sys.executable, ROOT / "tests/deploy/check_gpu_torch.py", json.dumps(shapes)],
                                         stdin=subprocess.PIPE, output=output)

    def figures(self):
        """By name, as they are known so far."""
        found = {}
        for line in self.path.read_text(errors="replace").splitlines():
            if line.startswith('{"name"'):
                figure = json.loads(line)
                found[figure.pop("name")] = figure
        return found

    def measure(self, limit):
        timed_out = False
        try:
            self.process.communicate(b"go\n", timeout=limit)
        except BrokenPipeError:
            self.process.wait()
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            end_group(self.process)
        found = self.figures()
        if not found:
            raise NotRun("not in time" if timed_out else last_line(self.path.read_text(errors="replace")))
        return f"{len(found)} figures{', then out of time' if timed_out else ''}", True

    def end(self):
        if self.process is not None:
            end_group(self.process)


def beside(run, torch, name, target):
    """Ours over the best of theirs, of one figure."""
    def body(_):
        ours, theirs = run.figures.get(name), torch.figures().get(name)
        if ours is None:
            raise NotRun("ours was not measured")
        if not theirs:
            raise NotRun(f"{ours:.0f} TFLOP/s, and nothing to compare with")
        each = ", ".join(f"{library} {value:.0f}" for library, value in theirs.items())
        ratio = ours / max(theirs.values())
        return f"{ours:.0f} TFLOP/s ({each}): {ratio:.2f}", ratio >= target

    return body


def first_token(run, torch, tokens, ours):
    def body(_):
        theirs = torch.figures().get(prefill_name(tokens))
        if prefill_name(tokens) not in ours:
            raise NotRun("ours was not measured: run `model` right before, with the same logs")
        if not theirs:
            raise NotRun("transformers' was not measured")
        seconds = ours[prefill_name(tokens)]
        return f"{seconds:.2f} s (transformers {theirs['seconds']:.2f} s)", seconds <= theirs["seconds"]

    return body


def figures_of_the_model(run):
    path = run.logs / "model.json"
    return json.loads(path.read_text())["figures"] if path.exists() else {}


def compare_with_torch(run, sizes, torch):
    for shape in sizes.attention:
        run.step(attention_name(*shape[:2]), "measured", 30,
                 lambda limit, shape=shape: (f"{measure_attention(run, *shape, limit):.0f} TFLOP/s", True), needs=[PREFLIGHT])
    run.step("product", "measured", 30, lambda limit: (f"{measure_product(run, sizes, limit):.0f} TFLOP/s", True),
             needs=[PREFLIGHT])
    run.step(TORCH, "measured", 200, torch.measure, needs=[PREFLIGHT])
    for tokens, head_dim, *_ in sizes.attention:
        name, target = attention_name(tokens, head_dim), 1.0 if head_dim == 128 else 0.9
        run.step(f"{name}, beside", f"{target} of the best", 10, beside(run, torch, name, target), needs=[TORCH])
    run.step("product, beside", "0.95 of PyTorch", 10, beside(run, torch, "product", 0.95), needs=[TORCH])
    ours = figures_of_the_model(run)
    for tokens in (sizes.short, sizes.long, sizes.longest):
        run.step(f"TTFT {tokens // 1024}k", "transformers'", 10, first_token(run, torch, tokens, ours), needs=[TORCH])


# ---- NCCL.


def gpus():
    asked = subprocess.run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True,
                           timeout=20, check=True)
    return len(asked.stdout.split())


def nccl_ctas(run, sizes):
    """Prefills of two workers, each with a GPU, with 4 to 32 CTAs for NCCL and as large a margin of attention."""
    def body(limit):
        if gpus() < 2:
            raise NotRun("one GPU: two ranks would take turns on it")
        end = time.monotonic() + limit
        model = Model(run, [(key, 4 if key == "--layers" else 1024 if key == "--vocab" else value) for key, value in sizes.model])
        try:
            model.wait(limit / 2)
            seconds, took = {}, 0
            for ctas in (8, 4, 16, 32):  # the default first: time may run out
                if seconds and end - time.monotonic() < 1.5 * took:
                    break
                begin = time.monotonic()
                with Pool(run, model.path, model.work, 2, [f"pool.worker.nccl_ctas={ctas}"], end) as pool:
                    runs = [pool.prefill(sizes.longest // 2, "--tile", "1x2")["seconds"]["prefill"] for _ in range(4)]
                seconds[ctas] = statistics.median(runs[1:])
                took = time.monotonic() - begin
        finally:
            model.close()
        best = min(seconds, key=seconds.get)
        each = ", ".join(f"{ctas}: {seconds[ctas]:.3f}" for ctas in sorted(seconds))
        return f"{each} s; {best} is best", seconds[8] <= 1.05 * seconds[best]

    return body


def turns(run, sizes):
    """A short prompt while a long one runs on two workers, which share a GPU where there is one alone."""
    def body(limit):
        end = time.monotonic() + limit
        model = Model(run, [(key, 4 if key == "--layers" else 1024 if key == "--vocab" else value) for key, value in sizes.model])
        try:
            model.wait(limit / 2)
            with Pool(run, model.path, model.work, 2, ["pool.worker.memory_bytes=4GiB"], end, gpus=min(2, gpus())) as pool:
                def prefill(tokens):
                    begin = time.monotonic()
                    said = pool.prefill(tokens, "--tile", "1x2")
                    return said["top"], time.monotonic() - begin
                alone = {tokens: [prefill(tokens) for _ in range(2)][1] for tokens in (sizes.short, sizes.longest)}
                with concurrent.futures.ThreadPoolExecutor() as threads:
                    long = threads.submit(prefill, sizes.longest)
                    time.sleep(alone[sizes.longest][1] / 3)
                    took, first = [], None  # the first one that lives beside another connects
                    while not long.done():
                        tokens, seconds = prefill(sizes.short)
                        took.append(seconds)
                        first = first or tokens
                same = first == alone[sizes.short][0] and long.result()[0] == alone[sizes.longest][0]
        finally:
            model.close()
        lone, beside_long = alone[sizes.short][1], statistics.median(took[1:] or took)
        text = f"{len(took)} beside a long one, {beside_long:.3f} s, alone {lone:.3f} s{'' if same else '; OTHER ANSWERS'}"
        return text, same and beside_long <= max(3 * lone, 0.5)

    return body


# ---- compute-sanitizer.


def sanitizer_path():
    folders = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    beside_path = [f"{folder}/compute-sanitizer" for folder in folders if pathlib.Path(folder, "compute-sanitizer").exists()]
    return shutil.which("compute-sanitizer") or (beside_path or [None])[0]


def sanitizer(run, tool, program, filter_):
    def body(limit):
        path = sanitizer_path()
        if path is None:
            raise NotRun("compute-sanitizer is not on this machine")
        return run.test(program, filter_, limit, wrapper=[path, "--tool", tool, "--print-limit", 20, "--error-exitcode", 9])

    return body


def for_information(body):
    """Its findings may be the tool's own: racecheck does not know every order that mbarriers and TMA give."""
    def informed(limit):
        try:
            return body(limit)
        except (Failed, subprocess.TimeoutExpired) as error:
            raise NotRun(f"for information: {error}") from error

    return informed


def compare(run, sizes):
    shapes = {"attention": {attention_name(*shape[:2]): shape for shape in sizes.attention}, "product": sizes.product,
              "prefill": {prefill_name(tokens): tokens for tokens in (sizes.short, sizes.long, sizes.longest)}}
    torch = Torch(run, shapes)
    try:
        preflight(run, sizes)
        run.step(ATTENTION, "all pass", 30, tested(run, "cuda_attention_test", SMALL_SM90), needs=[PREFLIGHT])
        compare_with_torch(run, sizes, torch)
    finally:
        torch.end()
    for ranks in (2, 4):
        run.step(f"NCCL, {ranks} processes", "all pass", 60, tested(run, "nccl_test", f"*{ranks}Processes*"), needs=[PREFLIGHT])
    run.step("NCCL's CTAs and margin, 2 ranks", "8 within 5 % of best", 90, nccl_ctas(run, sizes), needs=[PREFLIGHT])
    run.step("turns, 2 ranks", "0.5 s or 3 times", 60, turns(run, sizes), needs=[PREFLIGHT])
    run.step("memcheck, attention", "clean", 60, sanitizer(run, "memcheck", "cuda_attention_test", "*SmallBlocks*"),
             needs=[PREFLIGHT])
    run.step("synccheck, attention", "clean", 60, sanitizer(run, "synccheck", "cuda_attention_test", "*SmallBlocks*"),
             needs=[PREFLIGHT])
    run.step(f"memcheck, {STREAM}", "clean", 90, sanitizer(run, "memcheck", "cuda_stream_test", "-*RefusesMoreMemory*"),
             needs=[PREFLIGHT])
    run.step("racecheck, attention", "for information", 60,
             for_information(sanitizer(run, "racecheck", "cuda_attention_test", "*SmallBlocks*")), needs=[PREFLIGHT])
