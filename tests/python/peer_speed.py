#!/usr/bin/env python3
"""A model with experts, prefilled by Meshfill, by vLLM on the CPU and by llama.cpp: the same weights, tokens and cores, in turns.

    tests/python/peer_speed.py PATH_OF_MESHFILL [--venv build/vllm-venv] [--peers vllm llama.cpp] [--tokens 2048 8192 16384]
                               [--layers 4] [--rounds 2] [--limit 1800]

Installs vLLM (5 GB), and llama.cpp, which it compiles for this machine. The layers have the shape of Qwen3-30B-A3B's; 4 of them
take 5 GB of disk in bf16, and as much for llama.cpp. Each round starts each system anew, for none leaves the others memory: it
loads the model, prefills a short prompt, and then one random prompt of each length, which nobody has cached. Seconds are those
from the tokens to the first token, without the start. vLLM computes in bf16 and takes a prompt in pieces of `--vllm-batch` tokens;
llama.cpp in `--llama-type`, with flash attention, in pieces of `--llama-batch`.

Prints, for each peer and length, the median of what it takes to Meshfill's of the same round, and in how many prompts both chose
the same first token: random weights have near ties, and the systems round differently. Exits with 1 where a ratio is below 1, or
a system did not get through its prompts in `--limit` seconds.
"""
import argparse
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from vllm_venv import ENVIRONMENT, ROOT, make_venv

SHAPE = {"hidden": 2048, "heads": 32, "kv-heads": 4, "head-dim": 128, "experts": 128, "experts-used": 8, "expert-width": 768}
VOCAB = 4096
WARM_TOKENS = 256


def prompts(tokens, seed):
    """The short one first."""
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(count)] for count in (WARM_TOKENS, *tokens)]


def by_meshfill(options):
    os.environ["MESHFILL_BINARY"] = options.meshfill
    import meshfill
    from real_server import Process
    settings = {"model.path": options.model, "listen": "127.0.0.1:0", "metrics_listen": "", "kv.cache": "false",
                "pool.embedded.ranks": 1, "pool.embedded.device": "cpu"}
    with tempfile.NamedTemporaryFile(suffix=".yaml") as config:
        server = Process("serve", "--config", config.name,
                         *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")))
        try:
            server.wait_for(r"Z (ready): ")
            with meshfill.Client(server.wait_for(r"Z listening on (\S+:\d+)"), timeout=3600) as client:
                for prompt in prompts(options.tokens, options.seed):
                    begin = time.monotonic()
                    result = client.prefill(prompt)
                    yield len(prompt), time.monotonic() - begin, result.first_token
        finally:
            server.end()


def by_vllm(options):
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams
    longest = max(options.tokens)
    model = LLM(str(options.model), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=longest + 128,
                enable_prefix_caching=False, max_num_batched_tokens=min(options.vllm_batch, longest + 128), max_num_seqs=1)
    one = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    for prompt in prompts(options.tokens, options.seed):
        begin = time.monotonic()
        answer = model.generate({"prompt_token_ids": prompt}, one, use_tqdm=False)
        yield len(prompt), time.monotonic() - begin, answer[0].outputs[0].token_ids[0]


def write_gguf(model, path, kind):
    """The same weights for llama.cpp."""
    import gguf
    import torch
    from safetensors import safe_open
    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    files = [safe_open(file, "pt") for file in sorted(model.glob("*.safetensors"))]
    tensors = {name: file for file in files for name in file.keys()}

    def add(name, *sources):
        parts = [tensors[source].get_tensor(source) for source in sources]
        whole = torch.stack(parts) if len(parts) > 1 else parts[0]
        narrow = kind == "f16" and whole.dim() > 1 and "ffn_gate_inp" not in name
        writer.add_tensor(name, whole.to(torch.float16 if narrow else torch.float32).numpy())

    add("token_embd.weight", "model.embed_tokens.weight")
    add("output_norm.weight", "model.norm.weight")
    add("output.weight", "lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for a, b in (("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"), ("self_attn.q_proj", "attn_q"),
                     ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
                     ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"), ("mlp.gate", "ffn_gate_inp")):
            add(f"{theirs}{b}.weight", f"{ours}{a}.weight")
        for part in ("gate", "up", "down"):
            add(f"{theirs}ffn_{part}_exps.weight",
                *(f"{ours}mlp.experts.{expert}.{part}_proj.weight" for expert in range(config["num_experts"])))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_llama(options):
    import llama_cpp
    path = options.model / f"{options.llama_type}.gguf"
    if not path.exists():
        write_gguf(options.model, path, options.llama_type)
    model = llama_cpp.Llama(str(path), n_ctx=max(options.tokens) + 128, n_batch=options.llama_batch, n_ubatch=options.llama_batch,
                            n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), flash_attn=True, verbose=False)
    for prompt in prompts(options.tokens, options.seed):
        model.reset()
        begin = time.monotonic()
        model.eval(prompt)
        logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)[:VOCAB]
        yield len(prompt), time.monotonic() - begin, max(range(VOCAB), key=logits.__getitem__)


SYSTEMS = {"meshfill": by_meshfill, "vllm": by_vllm, "llama.cpp": by_llama}


def run_system(name, options, seed):
    """{length: (seconds, first token)}, by a process of its own; without the lengths that it did not reach in --limit seconds."""
    command = [options.python, __file__, options.meshfill, "--run", name, "--model", options.model, "--seed", seed, "--llama-type",
               options.llama_type, "--llama-batch", options.llama_batch, "--vllm-batch", options.vllm_batch, "--tokens",
               *options.tokens]
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True, start_new_session=True)
    begin = time.monotonic()
    late = threading.Timer(options.limit, os.killpg, (process.pid, signal.SIGKILL))  # what it has started, too
    late.start()
    taken = {}
    try:
        for line in process.stdout:
            if not line.startswith('{"tokens"'):
                continue
            said = json.loads(line)
            tokens, seconds = said["tokens"], said["seconds"]
            if tokens in options.tokens:
                taken[tokens] = seconds, said["first_token"]
                print(f"{name:10} {tokens:6} tokens  {seconds:8.2f} s  {tokens / seconds:7.1f} tokens/s", flush=True)
        status = process.wait()
    finally:
        late.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
    if status == -signal.SIGKILL and time.monotonic() - begin >= options.limit:
        print(f"{name:10} ended after {options.limit:.0f} s; give it more by --limit", flush=True)
    elif status != 0:
        sys.exit(f"peer_speed.py: {name} ended with {status}; see above")
    return taken


def compare(options):
    missed = False
    rounds = []
    for turn in range(options.rounds):
        order = ["meshfill", *options.peers]
        rounds.append({name: run_system(name, options, options.seed + turn) for name in order[turn % len(order):] +
                       order[:turn % len(order)]})
    for peer in options.peers:
        for tokens in options.tokens:
            pairs = [(turn[peer][tokens], turn["meshfill"][tokens]) for turn in rounds
                     if tokens in turn[peer] and tokens in turn["meshfill"]]
            if not pairs:
                missed = True
                continue
            ratios = [theirs[0] / ours[0] for theirs, ours in pairs]
            same = sum(theirs[1] == ours[1] for theirs, ours in pairs)
            missed = missed or len(pairs) < len(rounds) or statistics.median(ratios) < 1
            print(f"{peer:10} {tokens:6} tokens: {statistics.median(ratios):.2f} times Meshfill's seconds "
                  f"({min(ratios):.2f} to {max(ratios):.2f}), the same first token in {same} of {len(pairs)}", flush=True)
    return 1 if missed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("meshfill", type=os.path.abspath)
    parser.add_argument("--venv", default=ROOT / "build" / "vllm-venv", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--peers", nargs="*", choices=("vllm", "llama.cpp"), default=["vllm", "llama.cpp"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192, 16384])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1800, help="seconds of each start of a system")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--llama-type", choices=("f16", "f32"), default="f16")
    parser.add_argument("--llama-batch", type=int, default=2048)
    parser.add_argument("--vllm-batch", type=int, default=4096)
    parser.add_argument("--model", type=pathlib.Path, help="a folder of a run before, kept (default: a new one)")
    parser.add_argument("--run", choices=SYSTEMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        for tokens, seconds, first in SYSTEMS[options.run](options):
            print(json.dumps({"tokens": tokens, "seconds": seconds, "first_token": int(first)}), flush=True)
        return 0
    options.python = make_venv(options.venv, "llama-cpp-python==0.3.36", "gguf==0.19.0")
    with tempfile.TemporaryDirectory() as name:
        options.model = options.model or pathlib.Path(name) / "model"
        if not options.model.exists():
            shape = [word for key, value in SHAPE.items() for word in (f"--{key}", str(value))]
            subprocess.run([options.meshfill, "make-model", "--arch", "qwen3_moe", "--layers", str(options.layers), "--vocab",
                            str(VOCAB), *shape, "--out", options.model], check=True, stdout=subprocess.DEVNULL)
        return compare(options)


if __name__ == "__main__":
    sys.exit(main())
