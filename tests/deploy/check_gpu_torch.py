#!/usr/bin/env python3
"""What check_gpu.py compares with: PyTorch's and transformers' speed, each in a process of its own.

Usage: check_gpu_torch.py attention TOKENS HEAD_DIM | gemm TOKENS IN OUT | prefill TOKENS     prints one JSON object
"""
import json
import statistics
import sys


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


def attention(tokens, head_dim):
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


def gemm(tokens, in_features, out_features):
    import torch

    x = torch.randn(tokens, in_features, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
    seconds = median_seconds(lambda: torch.nn.functional.linear(x, w), 20)
    return {"tflops": 2 * tokens * in_features * out_features / seconds / 1e12}


def prefill(tokens):
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


if __name__ == "__main__":
    comparisons = {"attention": attention, "gemm": gemm, "prefill": prefill}
    print(json.dumps(comparisons[sys.argv[1]](*map(int, sys.argv[2:]))))
