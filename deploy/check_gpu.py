#!/usr/bin/env python3
"""Runs one part of deploy/check-gpu.sh on a machine with a GPU and prints its table.

Usage: check_gpu.py check|measure FOLDER      FOLDER: what check-gpu.sh --build has packed
       check_gpu.py torch-attention|torch-gemm|torch-prefill ...   what the parts start as processes of their own
"""
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MOST_COLUMNS = 80  # of a result in the table
PART_SECONDS = 570  # of a part: what is left when it is over is not begun
MODEL_8B = ["--arch", "llama", "--layers", "32", "--hidden", "4096", "--intermediate", "14336", "--heads", "32",
            "--kv-heads", "8", "--vocab", "128256", "--context", "1048576", "--dtype", "bf16"]


class Failed(Exception):
    pass


class NotRun(Exception):
    pass


class Runner:
    """The steps of one part: each with a limit, all of them within the part's."""

    def __init__(self, folder, device):
        self.folder = pathlib.Path(folder)
        self.device = device
        self.end = time.monotonic() + PART_SECONDS
        self.rows = []
        # PyTorch's wheels have cuBLAS and NCCL, too, where CUDA's own folder has not.
        wheels = sorted(map(str, pathlib.Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/lib")))
        self.libraries = ":".join([f"{self.folder}/lib", os.environ.get("LD_LIBRARY_PATH", ""), *wheels])

    def step(self, name, target, limit, body):
        begin = time.monotonic()
        limit = min(limit, self.end - begin)
        if not self.device:
            result, verdict = "not run: no device", "-"
        elif limit < 5:
            result, verdict = "not run: out of time", "-"
        else:
            try:
                result, met = body(limit)
                verdict = "met" if met else "NOT MET"
            except NotRun as reason:
                result, verdict = f"not run: {reason}", "-"
            except (Failed, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
                result, verdict = " ".join(str(error).split()) or type(error).__name__, "NOT MET"
        result = result if len(result) <= MOST_COLUMNS else result[: MOST_COLUMNS - 1] + "…"
        seconds = time.monotonic() - begin
        self.rows.append((name, result, target, verdict, f"{seconds:.0f} s"))
        print(f"... {name}: {result} [{verdict}]", file=sys.stderr, flush=True)

    def program(self, name, *arguments, limit, environment=None, wrapper=(), statuses=(0,)):
        """Runs one of the packed programs; its standard output."""
        path = self.folder / "bin" / name
        if not path.exists():
            raise NotRun(f"{name} is not in the package")
        done = subprocess.run(
            [*map(str, wrapper), path, *map(str, arguments)],
            capture_output=True, text=True, timeout=limit,
            env={**os.environ, "LD_LIBRARY_PATH": self.libraries, "MESHFILL_PARITY_DIR": str(ROOT / "tests/parity"),
                 **(environment or {})},
        )
        if done.returncode == 77:
            raise NotRun(done.stdout.strip().splitlines()[-1].removeprefix("not run: ") if done.stdout.strip() else "no device")
        if done.returncode not in statuses:
            tail = (done.stderr.strip() or done.stdout.strip()).splitlines()
            failed = [line for line in done.stdout.splitlines() if "FAILED" in line]
            raise Failed(f"{name} ended with {done.returncode}: {(failed or tail or [''])[-1]}")
        return done.stdout if done.returncode == 0 else done.stderr

    def test(self, name, limit, wrapper=(), arguments=()):
        output = self.program(name, *arguments, limit=limit, wrapper=wrapper, environment={"MESHFILL_TEST_DEVICE": "cuda"})
        passed = [line for line in output.splitlines() if "[  PASSED  ]" in line]
        if not passed or " 0 test" in passed[-1]:
            raise Failed(f"{name}: no test passed")
        return passed[-1].split("]")[1].strip().rstrip("."), True

    def bench(self, *arguments, limit):
        return json.loads(self.program("meshfill", "bench", *arguments, "--json", limit=limit))

    def torch(self, *arguments, limit):
        done = subprocess.run([sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True, timeout=limit)
        if done.returncode != 0:
            raise NotRun(f"{arguments[0]}: {(done.stderr.strip().splitlines() or [''])[-1]}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def table(self):
        rows = [("step", "result", "target", "", "took"), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def status(self):
        verdicts = [row[3] for row in self.rows]
        if not self.device:
            return 77
        return 0 if all(verdict == "met" for verdict in verdicts) else 1


# ---- Part "check".


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


def check(run):
    run.step("attention kernels", "all pass", 120, lambda limit: run.test("cuda_attention_test", limit))
    run.step("backend, each operation", "all pass", 60, lambda limit: run.test("cuda_backend_test", limit))
    run.step("parity with transformers", "all pass", 120,
             lambda limit: run.test("parity_test", limit, arguments=["--gtest_filter=*HalfWeight*"]))
    run.step("independence, 1 to 8 ranks", "all pass", 120, lambda limit: run.test("independence_test", limit))
    run.step("memcheck, backend", "clean", 120, sanitizer(run, "memcheck", "cuda_backend_test", "-*RefusesMoreMemory*"))
    run.step("memcheck, attention", "clean", 120, sanitizer(run, "memcheck", "cuda_attention_test", "-*Bench*:*Long*"))
    run.step("racecheck, attention", "clean", 120, sanitizer(run, "racecheck", "cuda_attention_test", "-*Bench*:*Long*"))
    run.step("no visible GPU is refused", "status 2", 20, refusal(run))
    for ranks in (2, 4):
        run.step(f"NCCL, {ranks} processes", "all pass", 60,
                 lambda limit, ranks=ranks: run.test("nccl_test", limit, arguments=[f"--gtest_filter=*{ranks}Processes*"]))


# ---- Part "measure".


def attention(run, tokens, head_dim, target):
    def body(limit):
        ours, theirs, best = [], [], {}
        for _ in range(2):  # in turns, so that clocks that drift meet both
            result = run.bench("attention", "--device", "cuda", "--tokens", tokens, "--head-dim", head_dim, "--q-heads", 32,
                               "--kv-heads", 8, "--repeats", 20, limit=limit / 4)
            ours.append(result["flops_per_second"] / 1e12)
            best = run.torch("torch-attention", tokens, head_dim, limit=limit / 4)
            theirs.append(best.get("cudnn", 0) or best.get("flash", 0))
        ratio = statistics.median(ours) / statistics.median(theirs)
        others = ", ".join(f"{name} {value:.0f}" for name, value in best.items())
        return f"{statistics.median(ours):.0f} TFLOP/s ({others}): {ratio:.2f}", ratio >= target

    return body


def product(run):
    def body(limit):
        shape = (8192, 4096, 28672)
        ours = run.bench("gemm", "--device", "cuda", "--tokens", shape[0], "--in-features", shape[1], "--out-features", shape[2],
                         limit=limit / 2)["flops_per_second"] / 1e12
        theirs = run.torch("torch-gemm", *shape, limit=limit / 2)["tflops"]
        return f"{ours:.0f} TFLOP/s (PyTorch {theirs:.0f}): {ours / theirs:.2f}", ours >= 0.95 * theirs

    return body


def prefill(run, model, tokens, *arguments, limit):
    return run.bench("prefill", "--device", "cuda", "--model", model, "--tokens", tokens, "--repeats", 1, *arguments, limit=limit)


def measure(run):
    work = pathlib.Path(tempfile.mkdtemp(prefix="meshfill-gpu-"))
    model, layer = work / "8b", work / "layer"
    writing = None
    seconds = {}
    try:
        if run.device:  # weights of 16 GB take the CPU a while: meanwhile the GPU is measured on other things
            libraries = {**os.environ, "LD_LIBRARY_PATH": run.libraries}
            binary = run.folder / "bin/meshfill"
            writing = subprocess.Popen([binary, "make-model", *MODEL_8B, "--out", model], env=libraries, stdout=subprocess.DEVNULL)
            one_layer = [("1" if before == "--layers" else word) for before, word in zip([""] + MODEL_8B, MODEL_8B)]
            subprocess.run([binary, "make-model", *one_layer, "--out", layer], env=libraries, stdout=subprocess.DEVNULL, check=True)

        for tokens, head_dim, target in ((16384, 128, 0.8), (32768, 128, 0.8), (16384, 64, 0.75), (32768, 64, 0.75)):
            run.step(f"attention {tokens // 1024}k, head_dim {head_dim}", f"{target} of cuDNN", 60,
                     attention(run, tokens, head_dim, target))
        run.step("product 8192x4096x28672", "0.95 of PyTorch", 60, product(run))

        def one_layer_step(limit):
            result = prefill(run, layer, 131072, limit=limit)["runs"][0]
            return f"{result['seconds']:.3f} s, MFU {result['mfu']:.2f}", result["mfu"] >= 0.5

        run.step("one layer, 128k", "MFU 0.5", 60, one_layer_step)

        def model_step(tokens, least_mfu):
            def body(limit):
                if writing.wait(timeout=limit / 2) != 0:
                    raise Failed("make-model failed: is the disk full?")
                result = prefill(run, model, tokens, limit=limit)["runs"][0]
                seconds[tokens] = result["seconds"]
                return f"{result['seconds']:.2f} s, MFU {result['mfu']:.2f}", result["mfu"] >= least_mfu

            return body

        for tokens, mfu in ((8192, 0.0), (32768, 0.0), (131072, 0.5)):
            run.step(f"8B prefill, {tokens // 1024}k", f"MFU {mfu}" if mfu else "runs", 150, model_step(tokens, mfu))

        def mesh_step(limit):
            result = prefill(run, model, 131072, "--tile", "2x2", "--compare", "1x1", limit=limit)
            ratio = result["tokens_per_second_ratio"]
            return f"{ratio:.3f} of one rank's tokens/s", ratio >= 0.95

        run.step("8B 128k, 4 ranks as 2x2", "0.95 of one rank", 150, mesh_step)

        def torch_step(tokens):
            def body(limit):
                theirs = run.torch("torch-prefill", tokens, limit=limit)["seconds"]
                ours = seconds.get(tokens)
                if ours is None:
                    raise NotRun("ours was not measured")
                return f"{ours:.2f} s (transformers {theirs:.2f} s)", ours <= theirs

            return body

        for tokens in (8192, 32768, 131072):
            run.step(f"TTFT {tokens // 1024}k", "transformers'", 100, torch_step(tokens))

        def longest_step(limit):
            fits, low, high = 0, 131072, 1048576
            while high - low >= 16384:
                middle = (low + high) // 2 // 16384 * 16384
                config = work / "config.yaml"
                config.write_text(f"model: {{path: {model}}}\npool: {{embedded: {{device: cuda, memory_bytes: 48GiB}}}}\n")
                try:
                    run.program("meshfill", "plan", "--config", config, "--tokens", middle, "--json", limit=limit / 4)
                    fits, low = middle, middle + 1
                except Failed:
                    high = middle
            return f"{fits} tokens in 48 GiB of activations, by the plan", fits > 131072

        run.step("longest prompt, 8B", "above 128k", 60, longest_step)
    finally:
        if writing is not None and writing.poll() is None:
            writing.kill()
        shutil.rmtree(work, ignore_errors=True)


# ---- What is compared with: processes of their own, which print one JSON object.


def median_seconds(body, repeats):
    import torch

    body()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def torch_attention(tokens, head_dim):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 32, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, tokens, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 4 * head_dim * 32 * tokens * (tokens + 1) / 2
    speeds = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                seconds = median_seconds(
                    lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 20)
            speeds[name] = flops / seconds / 1e12
        except RuntimeError:  # this build of PyTorch has no such kernel for these shapes
            pass
    return speeds


def torch_gemm(tokens, in_features, out_features):
    import torch

    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    seconds = median_seconds(lambda: torch.nn.functional.linear(x, w), 20)
    return {"tflops": 2 * tokens * in_features * out_features / seconds / 1e12}


def torch_prefill(tokens):
    import torch
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=1048576)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
        ids = torch.randint(0, config.vocab_size, (1, tokens))
    with torch.no_grad():
        return {"seconds": median_seconds(lambda: model(ids, logits_to_keep=1, use_cache=True), 1)}


def device_name():
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30)
    except OSError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def main(arguments):
    comparisons = {"torch-attention": torch_attention, "torch-gemm": torch_gemm, "torch-prefill": torch_prefill}
    if arguments and arguments[0] in comparisons:
        print(json.dumps(comparisons[arguments[0]](*map(int, arguments[1:]))))
        return 0
    parts = {"check": check, "measure": measure}
    if len(arguments) != 2 or arguments[0] not in parts:
        print(__doc__, file=sys.stderr)
        return 2
    device = device_name()
    run = Runner(arguments[1], device)
    parts[arguments[0]](run)
    print(f"\n{device or 'no device'}: {arguments[0]}\n")
    print(run.table())
    return run.status()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
