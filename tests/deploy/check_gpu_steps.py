"""The steps of tests/deploy/check-gpu.sh: what is run, how long it may take, and what it has to show.

A body gets its limit in seconds and returns what the table says and whether that is good enough.
"""
import functools
import json
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time

import check_gpu_pool

MODEL_8B = {"--layers": 32, "--hidden": 4096, "--intermediate": 14336, "--heads": 32, "--kv-heads": 8, "--vocab": 128256,
            "--context": 4194304, "--dtype": "bf16"}
WEIGHTS_8B_BYTES = 16.1e9
LOAD_8B_SECONDS = 30  # of such a model from the page cache, with a margin
SHORT, LONG, LONGEST = 8192, 32768, 131072  # tokens


class Failed(Exception):
    pass


class NotRun(Exception):
    pass


# ---- Correctness.


def sanitizer(run, tool, name, filter_):
    def body(limit):
        if shutil.which("compute-sanitizer") is None:
            raise NotRun("compute-sanitizer is not on this machine")
        wrapper = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        return run.test(name, limit, wrapper=wrapper, arguments=[f"--gtest_filter={filter_}"])

    return body


def refusal(run):
    def body(limit):
        error = run.program("meshfill", "bench", "gemm", "--device", "cuda", limit=limit, statuses=(2,),
                            environment={"CUDA_VISIBLE_DEVICES": ""})
        line = error.strip().splitlines()[-1] if error.strip() else ""
        return line, "GPU" in line or "device" in line

    return body


def check_kernels(run):
    run.step("attention kernels", "all pass", 120, lambda limit: run.test("cuda_attention_test", limit))
    run.step("stream, each operation", "all pass", 60, lambda limit: run.test("cuda_stream_test", limit))
    run.step("parity with transformers", "all pass", 120,
             lambda limit: run.test("parity_test", limit, arguments=["--gtest_filter=*HalfWeight*"]))
    run.step("independence, 1 to 8 ranks", "all pass", 120, lambda limit: run.test("independence_test", limit))


def check_nccl(run):
    for ranks in (2, 4):
        run.step(f"NCCL, {ranks} processes", "all pass", 60,
                 lambda limit, ranks=ranks: run.test("nccl_test", limit, arguments=[f"--gtest_filter=*{ranks}Processes*"]))


def check_rest(run):
    run.step("no visible GPU is refused", "status 2", 20, refusal(run))
    run.step("memcheck, stream", "clean", 120, sanitizer(run, "memcheck", "cuda_stream_test", "-*RefusesMoreMemory*"))
    run.step("memcheck, attention", "clean", 120, sanitizer(run, "memcheck", "cuda_attention_test", "-*Bench*:*Long*"))
    run.step("racecheck, attention", "clean", 120, sanitizer(run, "racecheck", "cuda_attention_test", "-*Bench*:*Long*"))


# ---- Speed.


class Models:
    """The models that are measured with. Writing the 8B one takes the CPU a while: meanwhile the GPU does other things."""

    def __init__(self, run, scale=None):
        self.run = run
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="meshfill-gpu-"))
        self.shape = {**MODEL_8B, **(scale or {})}
        self.path = self.work / "8b"
        self.writing = self.write(self.path, {}) if run.device else None

    def write(self, path, differences):
        arguments = [str(word) for pair in {**self.shape, **differences}.items() for word in pair]
        return subprocess.Popen([self.run.folder / "bin/meshfill", "make-model", "--arch", "llama", *arguments, "--out", path],
                                env=self.run.environment(), stdout=subprocess.DEVNULL)

    def whole(self, limit):
        """The 8B-shaped model, once it is there."""
        if self.writing.wait(timeout=limit) != 0:
            raise Failed("make-model failed: is the disk full?")
        return self.path

    def of_layers(self, layers, limit):
        """A few layers of it, and next to no vocabulary."""
        path = self.work / f"{layers}-layers"
        if not path.exists() and self.write(path, {"--layers": layers, "--vocab": 1024}).wait(timeout=limit) != 0:
            raise Failed("make-model failed: is the disk full?")
        return path

    def remove(self):
        if self.writing is not None and self.writing.poll() is None:
            self.writing.kill()
            self.writing.wait()
        shutil.rmtree(self.work, ignore_errors=True)


def attention(run, tokens, head_dim, target):
    def body(limit):
        ours, theirs, best = [], [], {}
        for _ in range(2):  # in turns, so that clocks that drift meet both
            result = run.bench("attention", "--tokens", tokens, "--head-dim", head_dim, "--q-heads", 32, "--kv-heads", 8,
                               "--repeats", 20, limit=limit / 4)
            ours.append(result["flops_per_second"] / 1e12)
            best = run.torch("attention", tokens, head_dim, limit=limit / 4)
            theirs.append(best.get("cudnn", 0) or best.get("flash", 0))
        if not all(theirs):
            raise NotRun(f"{statistics.median(ours):.0f} TFLOP/s, but PyTorch here has neither cuDNN nor flash attention")
        ratio = statistics.median(ours) / statistics.median(theirs)
        others = ", ".join(f"{name} {value:.0f}" for name, value in best.items())
        return f"{statistics.median(ours):.0f} TFLOP/s ({others}): {ratio:.2f}", ratio >= target

    return body


def product(run):
    def body(limit):
        shape = (8192, 4096, 28672)
        ours = run.bench("gemm", "--tokens", shape[0], "--in-features", shape[1], "--out-features", shape[2],
                         limit=limit / 2)["flops_per_second"] / 1e12
        theirs = run.torch("gemm", *shape, limit=limit / 2)["tflops"]
        return f"{ours:.0f} TFLOP/s (PyTorch {theirs:.0f}): {ours / theirs:.2f}", ours >= 0.95 * theirs

    return body


def layer(run, models):
    def body(limit):
        shape = models.shape
        result = run.bench("layer", "--tokens", LONGEST, "--hidden", shape["--hidden"], "--intermediate",
                           shape["--intermediate"], "--q-heads", shape["--heads"], "--kv-heads", shape["--kv-heads"],
                           "--head-dim", shape["--hidden"] // shape["--heads"], limit=limit)
        return f"{result['seconds']:.3f} s, MFU {result['mfu']:.2f}", result["mfu"] >= 0.5

    return body


def prefill(run, model, tokens, *arguments, limit):
    return run.bench("prefill", "--model", model, "--tokens", tokens, "--repeats", 1, *arguments, limit=limit)


def measure_kernels(run):
    for tokens, head_dim, target in ((16384, 128, 0.8), (32768, 128, 0.8), (16384, 64, 0.75), (32768, 64, 0.75)):
        run.step(f"attention {tokens // 1024}k, head_dim {head_dim}", f"{target} of cuDNN", 60,
                 attention(run, tokens, head_dim, target))
    run.step("product 8192x4096x28672", "0.95 of PyTorch", 60, product(run))


def measure_model(run, models):
    seconds = {}

    def model_step(tokens, least_mfu):
        def body(limit):
            model = models.whole(limit / 2)
            result = prefill(run, model, tokens, limit=limit)["runs"][0]
            seconds[tokens] = result["seconds"]
            return f"{result['seconds']:.2f} s, MFU {result['mfu']:.2f}", result["mfu"] >= least_mfu

        return body

    run.step(f"one layer, {LONGEST // 1024}k", "MFU 0.5", 60, layer(run, models))
    for tokens, mfu in ((SHORT, 0.0), (LONG, 0.0), (LONGEST, 0.5)):
        run.step(f"8B prefill, {tokens // 1024}k", f"MFU {mfu}" if mfu else "runs", 150, model_step(tokens, mfu))

    def mesh_step(limit):
        result = prefill(run, models.whole(limit / 2), LONGEST, "--tile", "2x2", "--compare", "1x1", limit=limit)
        ratio = result["tokens_per_second_ratio"]
        return f"{ratio:.3f} of one rank's tokens/s", ratio >= 0.95

    run.step(f"8B {LONGEST // 1024}k, 4 ranks as 2x2", "0.95 of one rank", 150, mesh_step)

    def torch_step(tokens):
        def body(limit):
            ours = seconds.get(tokens)
            if ours is None:
                raise NotRun("ours was not measured")
            theirs = run.torch("prefill", tokens, limit=limit)["seconds"]
            return f"{ours:.2f} s (transformers {theirs:.2f} s)", ours <= theirs

        return body

    for tokens in (SHORT, LONG, LONGEST):
        run.step(f"TTFT {tokens // 1024}k", "transformers'", 100, torch_step(tokens))


def idle(run, models):
    """For what share of a prefill the device waits for the host: what a CUDA graph could gain (docs/tuning.md)."""
    def body(limit):
        shares = []
        for tokens in (512, SHORT):
            result = prefill(run, models.whole(limit / 2), tokens, "--idle", limit=limit / 2)
            shares.append(result["runs"][0]["idle_share"])
        return f"{100 * shares[0]:.1f} % at 512 tokens, {100 * shares[1]:.1f} % at 8k", shares[1] < 0.05

    return body


# ---- The longest prompt that fits.


def free_bytes(run):
    if run.device_kind != "cuda":
        return 8 << 30
    asked = subprocess.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"], capture_output=True,
                           text=True, timeout=30, check=True)
    return int(asked.stdout.split()[0]) << 20


def longest_prompt(run, models):
    def body(limit):
        end = time.monotonic() + limit
        model = models.whole(limit / 2)
        # As a pool has it after the load (engine/devices/cuda/cuda_platform.cc).
        budget = int(0.85 * (free_bytes(run) - WEIGHTS_8B_BYTES)) if run.device_kind == "cuda" else free_bytes(run)
        config = models.work / "longest.yaml"
        config.write_text(f"model: {{path: {model}}}\n"
                          f"pool: {{embedded: {{device: {run.device_kind}, memory_bytes: {budget >> 20}MiB}}}}\n")

        @functools.lru_cache(maxsize=None)
        def predicted(tokens):
            """Seconds; None where the plan does not admit it."""
            try:
                plan = run.program("meshfill", "plan", "--config", config, "--tokens", tokens, "--json",
                                   limit=max(1, end - time.monotonic()))
            except Failed:
                return None
            return json.loads(plan)["predicted"]["seconds"]

        def most(admitted):
            """Tokens, in steps of 16k."""
            low, high = 0, models.shape["--context"] // 16384
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if admitted(predicted(16384 * middle)) else (low, middle - 1)
            return 16384 * low

        fits = most(lambda seconds: seconds is not None)
        if fits == 0:
            raise Failed(f"no prompt fits {budget >> 30} GiB of activations")
        left = end - time.monotonic() - LOAD_8B_SECONDS
        runs = most(lambda seconds: seconds is not None and 1.3 * seconds <= left)
        text = f"{fits:,} tokens fit {budget >> 30} GiB, predicted {predicted(fits):.0f} s"
        if runs == 0:
            return f"{text}; no time to run one", fits > LONGEST
        result = prefill(run, model, runs, limit=max(1, end - time.monotonic()))["runs"][0]
        what = "they" if runs == fits else f"{runs:,}, of the time there is,"
        return f"{text}; {what} took {result['seconds']:.1f} s, MFU {result['mfu']:.2f}", fits > LONGEST

    return body


# ---- A pool of processes over NCCL, and what of the GPU it leaves to attention.


def nccl_ctas(run, models, tokens=65536):
    """Prefills of two workers on one GPU with 4 to 32 CTAs for NCCL and as large a margin of attention."""
    def body(limit):
        end = time.monotonic() + limit
        model = models.of_layers(4, limit / 2)
        seconds, first = {}, 0
        for ctas in (8, 4, 16, 32):  # the default first: time may run out
            if seconds and end - time.monotonic() < 1.5 * took:
                break
            begin = time.monotonic()
            with check_gpu_pool.Pool(run, model, models.work, 2, [f"pool.worker.nccl_ctas={ctas}"], end) as pool:
                runs = [pool.prefill(tokens, "--tile", "1x2")["seconds"]["prefill"] for _ in range(4)]
            seconds[ctas] = statistics.median(runs[1:])
            first = first or runs[0] - seconds[ctas]
            took = time.monotonic() - begin
        best = min(seconds, key=seconds.get)
        each = ", ".join(f"{ctas}: {seconds[ctas]:.3f}" for ctas in sorted(seconds))
        return f"{each} s; {best} is best; the first run +{first:.1f} s", seconds[8] <= 1.05 * seconds[best]

    return body


# ---- The parts, each in the order of importance.


def measure_rest(run, models):
    run.step("NCCL's CTAs and margin, 2 ranks", "8 within 5 % of best", 90, nccl_ctas(run, models))
    run.step("idle for want of launches, 8B", "below 5 % at 8k", 90, idle(run, models))
    run.step("longest prompt, 8B", "above 128k", 150, longest_prompt(run, models))


def check(run):
    check_kernels(run)
    check_nccl(run)
    check_rest(run)


def measure(run):
    models = Models(run)
    try:
        measure_kernels(run)
        measure_model(run, models)
        measure_rest(run, models)
    finally:
        models.remove()


def run_all(run):
    models = Models(run)
    try:
        check_kernels(run)
        measure_kernels(run)
        check_nccl(run)
        measure_model(run, models)
        measure_rest(run, models)
        check_rest(run)
    finally:
        models.remove()


PARTS = {"all": run_all, "check": check, "measure": measure}
