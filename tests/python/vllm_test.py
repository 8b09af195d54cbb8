#!/usr/bin/env python3
"""vLLM on the CPU continues from Meshfill's K and V. Long: installs vLLM (5 GB) and runs for about 15 minutes.

    tests/python/vllm_test.py build/release/server/meshfill [--venv build/vllm-venv] [--fake] [--quick] [--only PART]

What is checked, each prompt of random tokens by the same random model:
  equal     10 prompts of 1k to 32k tokens, 64 greedy tokens each: as vLLM alone, but for near-ties: tokens whose log
            probability is less than GAP below the best one's. After one, Meshfill gets vLLM's own tokens, and goes on
  speed     the time to the first token of a 32k prompt through Meshfill, as a part of vLLM's own, on the same cores; and
            with 90 % of the prompt cached by Meshfill
  killed    the server dies before, while and after it computes: every request is answered, with the same tokens
  serve     `vllm serve` with the flag of docs/vllm.md and its prefix cache: prompts that are long, partly cached, short
            beside a long one, aborted, or met by a server that dies. Each is answered as by vLLM alone, with one warning
            for each that Meshfill failed
  hashes    the manifest's block hashes are those of vLLM's own function, of random prompts, salts and large ids
--fake: the server is fake_server.py, which has the binary compute K and V; no speed, no cache, no serve, no hashes.
"""

import argparse
import atexit
import dataclasses
import http.client
import json
import os
import pathlib
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

from vllm_venv import ENVIRONMENT, VLLM, make_venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GAP = 0.05  # nats; logits of about 3 have steps of 0.0156 in bf16
LENGTHS = [1000, 2000, 3001, 5000, 8192, 12000, 16000, 20000, 26000, 32000]
DECODED = 64
SERVED_TOKENS = 16
PAGE_TOKENS = 128  # of vLLM on CPUs
RETRY_SECONDS = 10  # the default of the connector's retry_seconds
VOCAB = 512
MODEL = ["--arch", "llama", "--layers", "4", "--hidden", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "64"]


class Server:
    """A server process, real or fake."""

    def __init__(self, arguments, address: str, model: str = ""):
        """model: another one than that of the arguments."""
        if arguments.fake:
            command = [sys.executable, str(HERE / "fake_server.py"), "--listen", address, "--binary", arguments.binary]
            command += ["--config", str(ROOT / "configs/local.yaml"), "--model", arguments.model]
        else:
            command = [arguments.binary, "serve", "--config", str(ROOT / "configs/local.yaml")]
            for key in (f"model.path={model or arguments.model}", "model.dtype=bf16", f"listen={address}", "metrics_listen=127.0.0.1:0"):
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

    def answers(self) -> list:
        """(tokens of the prompt, status) of vLLM's prefills that have ended."""
        lines = re.findall(r' request id="vllm-.* tokens=(\d+) .*code=(\w+)', self.log.read_text())
        return [(int(tokens), code) for tokens, code in lines]


def wait_until(condition, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def expect(ask, wanted) -> None:
    """AssertionError: it does not become so soon. Logs and metrics may come after the answer."""
    deadline = time.monotonic() + 10
    while ask() != wanted:
        assert time.monotonic() < deadline, f"{ask()}, not {wanted}"
        time.sleep(0.05)


def wait_running(address: str, prompts: int = 1) -> None:
    """Until the server computes a prompt, and has so many. The fake one says the first alone."""
    import meshfill

    def running() -> bool:
        pool = client.pool()
        return bool(pool.running_request_id) and len(pool.requests) >= prompts

    with meshfill.Client(address) as client:
        wait_until(running)


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
    if not arguments.fake:
        answers.update({name: engine.generate(ids, SERVED_TOKENS) for name, ids in served_prompts().items()})
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

    n = arguments.lengths[len(arguments.lengths) // 2]

    def check(name: str) -> None:
        print(f"killed  {name}: {compare(f'killed {name}', alone[str(n)], engine.generate(prompt_of(n, n)))}", flush=True)

    def kill_running() -> None:
        wait_running(address)
        server.kill()

    killer = threading.Thread(target=kill_running, daemon=True)
    killer.start()
    check("while it computes")
    killer.join()
    assert server.process.poll() is not None, "the server was not killed while it computed"
    check("before")
    server = Server(arguments, address)
    time.sleep(6)  # The client connects anew at most every 5 s.
    before = len(loaded)
    on_loaded.append(server.kill)
    check("after it computed")
    assert len(loaded) == before + 1 and server.process.poll() is not None, "the server that came back was not used"
    assert not missed, "; ".join(missed)


def served_prompts() -> dict:
    """Of the stage serve, by name."""
    long = prompt_of(3000, 3000)
    return {
        "long": long,
        "partly cached": long[:2000] + prompt_of(1500, 1500),
        "short": prompt_of(20, 20),
        "killed": prompt_of(12000, 12),
        "killed too": prompt_of(4000, 4),
        "refused": prompt_of(1000, 1),
        "after": prompt_of(2000, 2),
    }


class Serve:
    """`vllm serve` with the connector, as docs/vllm.md starts it."""

    def __init__(self, arguments, server: str):
        transfer = {
            "kv_connector": "MeshfillConnector",
            "kv_connector_module_path": "meshfill.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"server": server, "min_tokens": 512},
        }
        self.address = free_address()
        self.model = arguments.model
        host, port = self.address.split(":")
        command = [str(pathlib.Path(sys.executable).with_name("vllm")), "serve", self.model, "--dtype", "bfloat16"]
        command += ["--skip-tokenizer-init", "--enforce-eager", "--enable-prefix-caching"]
        command += ["--max-model-len", str(max(LENGTHS) + 2 * DECODED), "--host", host, "--port", port]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        # The command asks for the version of a distribution `vllm`; that for CPUs has another name.
        metadata = pathlib.Path(arguments.work) / "metadata"
        described = metadata / f"vllm-{VLLM}.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
        path = os.pathsep.join([str(metadata)] + os.environ.get("PYTHONPATH", "").split(os.pathsep))
        environment = dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep), VLLM_ENABLE_V1_MULTIPROCESSING="1")
        self.log = pathlib.Path(arguments.work) / "vllm.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        atexit.register(self.stop)
        wait_until(self._is_ready, 600)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"vllm serve did not start: {self.log.read_text()}"
        try:
            return urllib.request.urlopen(f"http://{self.address}/health", timeout=5).status == 200
        except OSError:
            return False

    def stop(self) -> None:
        """Its own processes have its process group."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def send(self, ids: list, tokens: int) -> http.client.HTTPConnection:
        """The request is on its way; read() gives the answer, and closing the connection aborts it."""
        connection = http.client.HTTPConnection(self.address, timeout=300)
        body = {"model": self.model, "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body.update({"logprobs": 5, "return_tokens_as_token_ids": True})
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def read(self, connection: http.client.HTTPConnection) -> dict:
        """As Engine.generate's. AssertionError: the request failed."""
        response = connection.getresponse()
        body = response.read()
        assert response.status == 200, body
        found = json.loads(body)["choices"][0]["logprobs"]

        def number(token: str) -> str:
            return token.split(":")[1]

        best = [{number(token): gap for token, gap in step.items()} for step in found["top_logprobs"]]
        return {"tokens": [int(number(token)) for token in found["tokens"]], "best": best}

    def warnings(self) -> list:
        """vLLM's ids of the requests that the connector has warned of."""
        return re.findall(r" WARNING .*Meshfill: .*vLLM computes request (\S+) itself", self.log.read_text())

    def loaded_tokens(self) -> int:
        """Of all prompts, from Meshfill."""
        text = urllib.request.urlopen(f"http://{self.address}/metrics", timeout=30).read().decode()
        return int(sum(map(float, re.findall(r"^vllm:external_prefix_cache_hits_total\S* (\S+)", text, re.M))))


def run_serve(arguments) -> None:
    alone = json.loads(pathlib.Path(arguments.out).read_text())
    prompts = served_prompts()
    address = free_address()
    server = Server(arguments, address)
    vllm = Serve(arguments, address)

    def check(name: str, connection=None) -> None:
        answer = vllm.read(connection or vllm.send(prompts[name], SERVED_TOKENS))
        print(f"serve   {name}: {compare(name, alone[name], answer)}, {log_gap(name, alone[name], answer)}", flush=True)

    check("long")
    expect(server.answers, [(3000, "OK")])
    expect(vllm.loaded_tokens, 2999)  # all but the last
    check("partly cached")
    expect(vllm.loaded_tokens, 2999 + 3499 - 2000 // PAGE_TOKENS * PAGE_TOKENS)  # not the pages that vLLM had cached
    expect(server.answers, [(3000, "OK"), (3500, "OK")])

    aborted = vllm.send(prompt_of(24000, 24), SERVED_TOKENS)
    wait_running(address)
    check("short")
    assert not select.select([aborted.sock], [], [], 0)[0], "the long prompt was answered before the short one beside it"
    aborted.close()
    wait_until(lambda: (24000, "CANCELLED") in server.answers(), 30)
    print("serve   aborted: its prefill was cancelled", flush=True)
    assert vllm.warnings() == [], vllm.warnings()

    both = [(name, vllm.send(prompts[name], SERVED_TOKENS)) for name in ("killed", "killed too")]
    wait_running(address, prompts=2)
    server.kill()
    for name, connection in both:
        check(name, connection)
    time.sleep(RETRY_SECONDS + 0.5)
    check("refused")
    vllm.read(vllm.send(prompt_of(1000, 3), 1))  # at once: the connector does not ask again
    assert len(vllm.warnings()) == len(set(vllm.warnings())) == 3, vllm.warnings()
    server = Server(arguments, address)
    time.sleep(RETRY_SECONDS + 5.5)  # The client connects anew at most every 5 s.
    check("after")
    expect(server.answers, [(2000, "OK")])
    assert len(vllm.warnings()) == 3, vllm.warnings()
    vllm.stop()


def log_gap(name: str, alone: dict, other: dict) -> str:
    """AssertionError: log probabilities of the first token are other ones. Tokens of a random model may be all the same."""
    mine, theirs = alone["best"][0], other["best"][0]
    gaps = [abs(mine[token] - theirs[token]) for token in mine if token in theirs]
    assert len(gaps) >= 3 and max(gaps) < GAP, f"{name}: log probabilities {theirs}, not {mine}"
    return f"log probabilities within {max(gaps):.4f} nats"


def run_hashes(arguments) -> None:
    """The manifest's hashes are those that vLLM's own request has: of random prompts, salts, and ids up to 2^17."""
    import meshfill
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    vocab = 1 << 17
    model = os.path.join(arguments.work, "hashed")
    make = [arguments.binary, "make-model", "--arch", "llama", "--layers", "1", "--hidden", "64", "--heads", "1"]
    make += ["--kv-heads", "1", "--head-dim", "64", "--vocab", str(vocab), "--out", model]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    address = free_address()
    server = Server(arguments, address, model)
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(16, sha256_cbor)
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    blocks = 0
    with meshfill.Client(address) as client:
        for at in range(300):
            # CBOR writes numbers of 1, 2, 3 and 5 bytes; texts likewise.
            bound = draw.choice([24, 256, 65536, vocab])
            ids = [draw.choice([draw.randrange(bound), bound - 1]) for _ in range(draw.randint(1, 400))]
            letters = [" ", "a", "é", "中", "😀"]  # of 1 to 4 bytes
            salt = "".join(draw.choices(letters, k=draw.choice([0, 1, 23, 24, 90])))
            request = Request(str(at), ids, SamplingParams(), None, cache_salt=salt or None, block_hasher=hasher)
            manifest = client.prefill(ids, keep_kv=True, cache_salt=salt).kv
            client.release_kv(manifest)
            assert manifest.block_tokens == 16
            expected = [bytes(one) for one in request.block_hashes]
            assert list(manifest.block_hashes) == expected, f"block hashes are not vLLM's: seed {seed}, prompt {at}"
            blocks += len(expected)
    server.kill()
    print(f"hashes  of {blocks} blocks of 300 prompts equal vLLM's", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=os.path.abspath, help="meshfill")
    parser.add_argument("--venv", default=ROOT / "build" / "vllm-venv", type=lambda path: pathlib.Path(path).resolve())
    parser.add_argument("--fake", action="store_true", help="the server is fake_server.py")
    parser.add_argument("--quick", action="store_true", help="three short prompts")
    parser.add_argument("--only", choices=["through", "serve", "hashes"], help="this part alone")
    for name in ("--stage", "--model", "--out", "--work"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # of the processes that this one starts
    arguments = parser.parse_args()
    arguments.lengths = LENGTHS[:4:2] + [8192] if arguments.quick else LENGTHS
    if arguments.only == "serve":
        arguments.lengths = []
    if arguments.stage:
        {"alone": run_alone, "through": run_through, "serve": run_serve, "hashes": run_hashes}[arguments.stage](arguments)
        return
    python = make_venv(arguments.venv)
    with tempfile.TemporaryDirectory() as work:
        model = os.path.join(work, "model")
        make = [arguments.binary, "make-model", "--out", model, "--vocab", str(VOCAB), "--context", "65536"]
        subprocess.run(make + MODEL, check=True, stdout=subprocess.DEVNULL)
        same = ["--model", model, "--work", work, "--out", os.path.join(work, "alone.json")]
        same += ["--only", arguments.only] * bool(arguments.only)
        flags = [flag for flag in ("--fake", "--quick") if getattr(arguments, flag[2:])]
        stages = {"hashes": ["hashes"], "through": ["alone", "through"], "serve": ["alone", "serve"]}
        every = ["alone", "through"] if arguments.fake else ["hashes", "alone", "through", "serve"]
        for stage in stages.get(arguments.only, every):
            command = [str(python), os.path.abspath(__file__), arguments.binary, "--stage", stage]
            subprocess.run(command + same + flags, check=True, env={**os.environ, **ENVIRONMENT})
    print("passed")


if __name__ == "__main__":
    main()
