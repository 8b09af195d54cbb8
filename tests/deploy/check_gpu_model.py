"""The second call of tests/deploy/check-gpu.sh: an 8B-shaped model on one GPU, and layers of experts."""
import contextlib
import functools
import json
import pathlib
import shutil
import subprocess
import tempfile
import time

from check_gpu_run import Failed, NotRun, end_group
from check_gpu_steps import PREFLIGHT, preflight

MODEL_BYTES = 34e9  # of all three
WEIGHTS_BYTES = 16.1e9
LOAD_SECONDS = 30  # of the weights from the page cache, with a margin
MODEL = "the model is written"
EXPERTS = "the experts are written"
NARROW = "the model in FP8 is written"


def work_folder():
    """Where the model fits, and is written and read at memory's speed if it can be."""
    for folder in ("/dev/shm", None):
        if folder is None or (pathlib.Path(folder).is_dir() and shutil.disk_usage(folder).free > 1.2 * MODEL_BYTES):
            return pathlib.Path(tempfile.mkdtemp(prefix="meshfill-gpu-", dir=folder))


class Model:
    """Written by the CPU while the GPU does other things."""

    def __init__(self, run, shape):
        self.run, self.shape = run, dict(shape)
        self.name = f"{self.shape['--arch']}-{self.shape['--dtype']}"
        self.work = work_folder()
        self.path = self.work / "model"
        self.writing = None
        if run.device:
            arguments = [str(word) for pair in shape for word in pair]
            with (run.logs / f"make-{self.name}.log").open("wb") as output:  # beside the steps'
                self.writing = run.start([run.folder / "bin/meshfill", "make-model", *arguments, "--out", self.path],
                                         output=output)

    def wait(self, limit):
        begin = time.monotonic()
        if self.writing.wait(timeout=limit) != 0:
            raise Failed(f"make-model failed, see make-{self.name}.log: is the disk full?")
        return f"waited {time.monotonic() - begin:.0f} s for it", True

    def close(self):
        if self.writing is not None:
            end_group(self.writing)
        shutil.rmtree(self.work, ignore_errors=True)


def prefill(run, model, tokens, *arguments, limit):
    return run.bench("prefill", "--model", model.path, "--tokens", tokens, "--repeats", 1, *arguments, limit=limit)


def prefill_name(tokens, model="8B"):
    return f"{model} prefill, {tokens // 1024}k"


def layer(run, sizes):
    def body(limit):
        shape = dict(sizes.model)
        result = run.bench("layer", "--tokens", sizes.longest, "--hidden", shape["--hidden"], "--intermediate",
                           shape["--intermediate"], "--q-heads", shape["--heads"], "--kv-heads", shape["--kv-heads"],
                           "--head-dim", shape["--hidden"] // shape["--heads"], limit=limit)
        return f"{result['seconds']:.3f} s, MFU {result['mfu']:.2f}", result["mfu"] >= 0.6

    return body


def prefill_step(run, model, name, tokens, least_mfu):
    def body(limit):
        result = prefill(run, model, tokens, limit=limit)["runs"][0]
        run.figures[name] = result["seconds"]
        return f"{result['seconds']:.2f} s, MFU {result['mfu']:.2f}", result["mfu"] >= least_mfu

    return body


def write_config(run, model, budget):
    config = model.work / "plan.yaml"
    config.write_text(f"model: {{path: {model.path}}}\n"
                      f"pool: {{embedded: {{device: cuda, memory_bytes: {budget >> 20}MiB}}}}\n")
    return config


def predicted_seconds(run, config, tokens, limit):
    plan = run.program("meshfill", "plan", "--config", config, "--tokens", tokens, "--json", limit=limit)
    return run.json_of(plan)["predicted"]["seconds"]


def budget_bytes(run):
    """As a pool has it after the load (engine/devices/cuda/cuda_platform.cc)."""
    status, output = run.execute(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"], 20)
    if status != 0:
        raise Failed("nvidia-smi does not say how much memory is free")
    free = int(output.split()[0]) << 20
    return max(1 << 30, int(0.85 * (free - WEIGHTS_BYTES)))


def prediction(run, model, tokens):
    def body(limit):
        real = run.figures.get(prefill_name(tokens))
        if real is None:
            raise NotRun("the prefill was not measured")
        predicted = predicted_seconds(run, write_config(run, model, budget_bytes(run)), tokens, limit)
        return f"predicted {predicted:.2f} s, took {real:.2f} s", abs(predicted - real) <= 0.05 * real

    return body


def streamed(run, model, tokens, least):
    """Weights that stream beside weights that stay (docs/tuning.md, Weights)."""
    def body(limit):
        result = run.json_of(run.program("meshfill", "bench", "weights", "--config", write_config(run, model, budget_bytes(run)),
                                         "--tokens", tokens, "--rounds", 1, "--json", limit=limit))
        ratio, layer = result["streamed_over_resident"], result["streamed"]["weight_seconds"]
        run.figures[f"streamed, {tokens // 1024}k"] = ratio
        return (f"{ratio:.3f} of resident, {result['streamed']['seconds']:.2f} s, of which the plan says {layer:.2f} for weights",
                ratio >= least)

    return body


def mesh(run, sizes, model, tile):
    def body(limit):
        ratio = prefill(run, model, sizes.longest, "--tile", tile, "--compare", "1x1", limit=limit)["tokens_per_second_ratio"]
        return f"{ratio:.3f} of one rank's tokens/s", ratio >= 0.95

    return body


def idle(run, sizes, model):
    """For what share of a prefill the device waits for the host: what a CUDA graph could gain (docs/tuning.md)."""
    def body(limit):
        shares = [prefill(run, model, tokens, "--idle", limit=limit)["runs"][0]["idle_share"] for tokens in (512, sizes.short)]
        return f"{100 * shares[0]:.1f} % at 512 tokens, {100 * shares[1]:.1f} % at 8k", shares[1] < 0.05

    return body


def longest_prompt(run, sizes, model):
    def body(limit):
        end = time.monotonic() + limit
        budget = budget_bytes(run)
        config = write_config(run, model, budget)

        @functools.lru_cache(maxsize=None)
        def predicted(tokens):
            """None where the plan does not admit it."""
            try:
                return predicted_seconds(run, config, tokens, max(1, end - time.monotonic()))
            except Failed:
                return None

        def most(admitted):
            low, high = 0, model.shape["--context"] // sizes.step
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if admitted(predicted(sizes.step * middle)) else (low, middle - 1)
            return sizes.step * low

        fits = most(lambda seconds: seconds is not None)
        if fits == 0:
            raise Failed(f"no prompt fits {budget >> 30} GiB of activations")
        left = end - time.monotonic() - LOAD_SECONDS
        runs = most(lambda seconds: seconds is not None and 1.3 * seconds <= left)
        text = f"{fits:,} tokens fit {budget >> 30} GiB, predicted {predicted(fits):.0f} s"
        if runs == 0:
            return f"{text}; no time to run one", fits > sizes.longest
        result = prefill(run, model, runs, limit=max(1, end - time.monotonic()))["runs"][0]
        what = "they" if runs == fits else f"{runs:,}, of the time there is,"
        return f"{text}; {what} took {result['seconds']:.1f} s, MFU {result['mfu']:.2f}", fits > sizes.longest

    return body


def model(run, sizes):
    with contextlib.ExitStack() as made:
        in_fp8 = tuple((key, "fp8" if key == "--dtype" else value) for key, value in sizes.model)
        model, experts, narrow = (made.enter_context(contextlib.closing(Model(run, shape)))
                                  for shape in (sizes.model, sizes.experts, in_fp8))
        preflight(run, sizes)
        run.step(f"one layer, {sizes.longest // 1024}k", "MFU 0.6", 60, layer(run, sizes), needs=[PREFLIGHT])
        run.step(MODEL, "there", 180, model.wait)
        needs = [PREFLIGHT, MODEL]
        for tokens, mfu in ((sizes.short, 0.0), (sizes.longest, 0.6), (sizes.long, 0.0)):
            name = prefill_name(tokens)
            run.step(name, f"MFU {mfu}" if mfu else "runs", 90, prefill_step(run, model, name, tokens, mfu), needs)
        run.step(EXPERTS, "there", 120, experts.wait)
        for tokens in (sizes.short, sizes.long):
            name = prefill_name(tokens, "experts")
            run.step(name, "runs", 60, prefill_step(run, experts, name, tokens, 0), [PREFLIGHT, EXPERTS])
        run.step(NARROW, "there", 120, narrow.wait)
        name = prefill_name(sizes.long, "8B in FP8")
        run.step(name, "runs", 60, prefill_step(run, narrow, name, sizes.long, 0), [PREFLIGHT, NARROW])
        for tokens, least in ((sizes.long, 0), (sizes.longest, 0.95)):
            run.step(f"8B streamed, {tokens // 1024}k", f"{least} of resident" if least else "runs", 90,
                     streamed(run, model, tokens, least), needs)
        run.step(f"prediction, {sizes.longest // 1024}k", "within 5 %", 30, prediction(run, model, sizes.longest), needs)
        for tile in ("2x2", "1x4"):
            run.step(f"8B {sizes.longest // 1024}k, 4 ranks as {tile}", "0.95 of one rank", 100, mesh(run, sizes, model, tile),
                     needs)
        run.step("idle for want of launches, 8B", "below 5 % at 8k", 60, idle(run, sizes, model), needs)
        run.step("longest prompt, 8B", f"above {sizes.longest // 1024}k", 300, longest_prompt(run, sizes, model), needs)
