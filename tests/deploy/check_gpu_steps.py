"""The first call of tests/deploy/check-gpu.sh: is it right, and how fast are the kernels alone. And what all calls begin with.

A body gets its limit in seconds and returns what the table says and whether that is good enough.
"""
import dataclasses
import re
import sys

from check_gpu_run import Failed, NotRun

PREFLIGHT = "pre-flight"
STREAM = "stream, each operation"
ATTENTION = "attention, sm90 alone"
SMALL_SM90 = "*sm90*:*SmallBlocks*"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of what is measured."""
    product: tuple = (8192, 4096, 28672)  # tokens, features in, features out
    # tokens, head_dim, query heads, KV heads: causal, bf16
    attention: tuple = ((32768, 128, 32, 8), (2048, 128, 32, 8), (8192, 128, 32, 8), (131072, 128, 8, 2), (32768, 64, 32, 8),
                        (16384, 64, 32, 8), (32768, 96, 32, 8), (32768, 256, 16, 4))
    model: tuple = (("--arch", "llama"), ("--layers", 32), ("--hidden", 4096), ("--intermediate", 14336), ("--heads", 32), ("--kv-heads", 8),
                    ("--vocab", 128256), ("--context", 4194304), ("--dtype", "bf16"))
    # Four layers of Qwen3-30B-A3B.
    experts: tuple = (("--arch", "qwen3_moe"), ("--layers", 4), ("--hidden", 2048), ("--heads", 32), ("--kv-heads", 4),
                      ("--head-dim", 128), ("--experts", 128), ("--experts-used", 8), ("--expert-width", 768),
                      ("--vocab", 1024), ("--dtype", "bf16"))
    short: int = 8192
    long: int = 32768
    longest: int = 131072
    step: int = 16384  # of the longest prompt that fits


FULL = Sizes()
DRY = Sizes(product=(64, 64, 64), attention=((128, 16, 4, 2),),
            model=(("--arch", "llama"), ("--layers", 2), ("--hidden", 64), ("--intermediate", 96), ("--heads", 4),
                   ("--kv-heads", 2), ("--vocab", 100), ("--context", 512), ("--dtype", "bf16")),
            experts=(("--arch", "qwen3_moe"), ("--layers", 2), ("--hidden", 64), ("--heads", 4), ("--kv-heads", 2),
                     ("--experts", 5), ("--experts-used", 3), ("--expert-width", 24), ("--vocab", 100),
                     ("--dtype", "bf16")),
            short=64, long=128, longest=256, step=256)


# ---- What all calls begin with: 5 s that tell whether the rest has a chance.


def preflight(run, sizes):
    def body(limit):
        programs = sorted((run.folder / "bin").iterdir())
        missing = []
        for program in programs:
            _, output = run.execute(["ldd", program], limit)
            missing += [f"{program.name} misses {line.split()[0]}" for line in output.splitlines() if "not found" in line]
        if missing:
            raise Failed("; ".join(missing))
        status, output = run.execute([sys.executable, "-c", "import ctypes; ctypes.CDLL('libnccl.so.2')"], limit)
        nccl = "NCCL" if status == 0 else "no NCCL"
        tokens, in_features, out_features = sizes.product
        result = run.bench("gemm", "--tokens", min(tokens, 1024), "--in-features", in_features, "--out-features",
                           min(out_features, 4096), "--repeats", 1, limit=limit)
        return f"{len(programs)} programs, {nccl}, a product at {result['flops_per_second'] / 1e12:.0f} TFLOP/s", True

    run.step(PREFLIGHT, "all there", 30, body)


# ---- The kernels alone. Our figures come first and wait for nothing.


def attention_name(tokens, head_dim):
    return f"attention {tokens // 1024}k, head_dim {head_dim}"


def measure_attention(run, tokens, head_dim, q_heads, kv_heads, limit):
    result = run.bench("attention", "--tokens", tokens, "--head-dim", head_dim, "--q-heads", q_heads, "--kv-heads", kv_heads,
                       "--repeats", 20, limit=limit)
    figure = result["flops_per_second"] / 1e12
    run.figures[attention_name(tokens, head_dim)] = figure
    return figure


def measure_product(run, sizes, limit):
    tokens, in_features, out_features = sizes.product
    figure = run.bench("gemm", "--tokens", tokens, "--in-features", in_features, "--out-features", out_features,
                       limit=limit)["flops_per_second"] / 1e12
    run.figures["product"] = figure
    return figure


def speeds(run, sizes):
    run.step("product", "measured", 30, lambda limit: (f"{measure_product(run, sizes, limit):.0f} TFLOP/s", True),
             needs=[PREFLIGHT])
    for shape in sizes.attention:
        run.step(attention_name(*shape[:2]), "measured", 30,
                 lambda limit, shape=shape: (f"{measure_attention(run, *shape, limit):.0f} TFLOP/s", True),
                 needs=[PREFLIGHT, ATTENTION])


# ---- Checks.


def refusal(run):
    def body(limit):
        output = run.program("meshfill", "bench", "gemm", "--device", "cuda", limit=limit, statuses=(2,),
                             environment={"CUDA_VISIBLE_DEVICES": ""})
        line = output.strip().splitlines()[-1] if output.strip() else ""
        return line, re.search("GPU|device|driver", line) is not None

    return body


def tested(run, program, filter_="*"):
    return lambda limit: run.test(program, filter_, limit)


# The most telling first.
def check(run, sizes):
    preflight(run, sizes)
    # A kernel that hangs or is wrong ends here, and takes nothing with it but what needs it.
    run.step(ATTENTION, "all pass", 60, tested(run, "cuda_attention_test", "*sm90*:-*ManyTiles*:*ManyKeys*:*Bench*"),
             needs=[PREFLIGHT])
    run.step(STREAM, "all pass", 60, tested(run, "cuda_stream_test", "-*AttentionBlock*"), needs=[PREFLIGHT])
    speeds(run, sizes)
    run.step("attention, sm80 alone", "all pass", 60,
             tested(run, "cuda_attention_test", "*sm80*:-*ManyTiles*:*ManyKeys*:*Bench*"), needs=[PREFLIGHT])
    run.step("attention, many tiles and keys", "all pass", 120,
             tested(run, "cuda_attention_test", "*ManyTiles*:*ManyKeys*:*Bench*"), needs=[PREFLIGHT, ATTENTION])
    for name, program, filter_ in (("parity with transformers", "parity_test", "*HalfWeight*"),
                                   ("independence, 1 to 8 ranks", "independence_test", "*"),
                                   ("side by side on sub-meshes", "submeshes_test", "*")):
        run.step(name, "all pass", 120, tested(run, program, filter_), needs=[PREFLIGHT, ATTENTION, STREAM])
    run.step("no visible GPU is refused", "status 2", 20, refusal(run))
