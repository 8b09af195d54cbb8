#!/usr/bin/env python3
"""What check_gpu.py compares with: PyTorch's and transformers' speed, in one process.

Usage: check_gpu_torch.py SHAPES     JSON: {"attention": {NAME: [tokens, head_dim, q_heads, kv_heads]}, "product": [tokens,
                                     in, out], "prefill": {NAME: tokens}}

Imports at once, touches the GPU once a line has come on standard input, and prints a JSON object for each figure as it is
measured. What one shape does not allow costs that figure alone.
"""
import json
import statistics
import sys
import traceback

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

try:
    from fa3_fwd_interface import flash_attn_func as flash_attention_3  # PyPI's fa3-fwd: FlashAttention-3, forward
except ImportError:
    flash_attention_3 = None


def median_seconds(body, repeats):
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


def first_that_runs(*makers):
    """Seconds of what the first of `makers` makes that this build of PyTorch has a kernel for; None: of none."""
    for make in makers:
        try:
            return median_seconds(make(), 20)
        except RuntimeError:
            traceback.print_exc()
    return None


def attention(tokens, head_dim, q_heads, kv_heads):
    q = torch.randn(1, q_heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, kv_heads, tokens, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 4 * head_dim * q_heads * tokens * (tokens + 1) / 2
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def each_head_its_own():
        keys, values = (x.repeat_interleave(q_heads // kv_heads, dim=1) for x in (k, v))
        return lambda: sdpa(q, keys, values, is_causal=True)

    speeds = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        with sdpa_kernel(backend):
            seconds = first_that_runs(lambda: lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True), each_head_its_own)
        if seconds:
            speeds[name] = flops / seconds / 1e12
    if flash_attention_3:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        seconds = first_that_runs(lambda: lambda: flash_attention_3(*rows, causal=True))
        if seconds:
            speeds["flash3"] = flops / seconds / 1e12
    return speeds


def product(tokens, in_features, out_features):
    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    seconds = median_seconds(lambda: torch.nn.functional.linear(x, w), 20)
    return {"PyTorch": 2 * tokens * in_features * out_features / seconds / 1e12}


def eight_b():
    config = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=1048576)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def prefill(model, tokens):
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device="cuda")
    with torch.no_grad():
        return {"seconds": median_seconds(lambda: model(ids, logits_to_keep=1, use_cache=True), 1)}


def measure(name, body):
    try:
        figure = body()
        if figure:
            print(json.dumps({"name": name, **figure}), flush=True)
    except Exception:
        traceback.print_exc()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    shapes = json.loads(sys.argv[1])
    if not sys.stdin.readline():
        sys.exit("nobody wants them")
    for name, shape in shapes["attention"].items():
        measure(name, lambda: attention(*shape))
    measure("product", lambda: product(*shapes["product"]))
    model = eight_b()
    for name, tokens in shapes["prefill"].items():
        measure(name, lambda: prefill(model, tokens))
