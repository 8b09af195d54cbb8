#!/usr/bin/env python3
"""Shows that a change keeps every bit: two binaries, the same prompts under the same plans, the same bytes.

Usage: tests/processes/same_bits.py OLD NEW [--cases N] [--seed S] [--families NAME …] [--scenarios]

Each case draws a model (family, heads, layers, window), a dtype, ranks, head groups, tile, layout, stripe and length, and
compares the files of --logits-out and --kv-out. Half of the cases run without some of the processor's instruction sets, which
hide_instructions.c hides (needs a C compiler, and a processor whose CPUID can trap). On other processors those cases run on the
processors that qemu-x86_64 plays (Debian's qemu-user), with shorter prompts. Both binaries plan with the speeds that OLD measured.
--scenarios compares the simulator's tables as well.
Prints what differs; exits with 1 if anything does.
"""
import argparse
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

SCENARIOS = pathlib.Path(__file__).resolve().parent.parent.parent / "configs" / "scenarios"
FAMILIES = {
    "llama": [],
    "mistral": ["--sliding-window", "96"],
    "qwen2": [],
    "qwen3": [],
}
HIDDEN = ["amx_bf16", "avx512_bf16", "avx512"]  # each with all that builds on it
PLAYED = ["Haswell", "EPYC-Milan"]  # with AVX2 and without AVX-512
PLAYED_TOKENS = 400  # the longest prompt there
NAME = re.compile(r"cpu/[^,]+, build [^;]+;")  # of kernels and executable, in a profile of speeds
SHAPES = [(4, 2, 64), (4, 4, 32), (6, 2, 64), (8, 1, 32), (6, 3, 128)]  # query heads, KV heads, head_dim


def splits(ranks, q_heads, kv_heads):
    """All (head groups, a, b) of so many ranks."""
    for heads in range(1, ranks + 1):
        if ranks % heads or q_heads % heads or kv_heads % heads:
            continue
        mesh = ranks // heads
        yield from ((heads, a, mesh // a) for a in range(1, mesh + 1) if mesh % a == 0)


class HiddenByTrap:
    """Runs a command without an instruction set, by a library that answers CPUID."""

    most_tokens = None

    def use_speeds_of(self, profile):
        """Nothing to do: OLD measures its own in a moment."""

    def __init__(self, library):
        self.library = library

    def command(self, command, number):
        return ["env", f"LD_PRELOAD={self.library}", f"HIDE_INSTRUCTIONS={HIDDEN[number % len(HIDDEN)]}", *command]


class PlayedProcessor:
    """Runs a command on a processor that has fewer instruction sets, played by QEMU."""

    most_tokens = PLAYED_TOKENS

    def __init__(self, binary, folder, model):
        own = folder / "played_speed.json"
        measure(binary, folder, model, own, self.command([], 0))
        self.name = NAME.search(own.read_text()).group(0)

    def use_speeds_of(self, profile):
        """Plans with those of the processor that plays: to measure its own would take a minute for each pool."""
        kept = json.loads(profile.read_text())
        own = [pool for pool in kept["pools"] if self.name not in pool["pool"]]
        played = [{**pool, "pool": NAME.sub(lambda _: self.name, pool["pool"])} for pool in own]
        profile.write_text(json.dumps({**kept, "pools": own + played}))

    def command(self, command, number):
        return ["qemu-x86_64", "-cpu", PLAYED[number % len(PLAYED)], *command]


def other_processor(binary, folder, model):
    """How commands run on other instruction sets than this processor's; None where that cannot be had here."""
    library = hide_instructions(folder)
    if library is not None:
        return HiddenByTrap(library)
    return PlayedProcessor(binary, folder, model) if shutil.which("qemu-x86_64") else None


def hide_instructions(folder):
    """The library that hides instruction sets; None where that cannot be had here."""
    source, library = pathlib.Path(__file__).with_name("hide_instructions.c"), folder / "hide_instructions.so"
    if shutil.which("cc") is None:
        return None
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", source, "-o", library], check=True)
    works = subprocess.run(["true"], env={"LD_PRELOAD": str(library), "HIDE_INSTRUCTIONS": "avx512"}, check=False)
    return library if works.returncode == 0 else None


def draw(rng, number, families, other):
    q_heads, kv_heads, head_dim = rng.choice(SHAPES)
    ranks = rng.choice([1, 2, 3, 4, 6, 8, 9, 12, 16])
    heads, a, b = rng.choice(list(splits(ranks, q_heads, kv_heads)))
    on_other = other is not None and number % 2 == 1
    return {
        "family": rng.choice(families),
        "shape": (q_heads, kv_heads, head_dim),
        "layers": rng.choice([1, 2, 3]),
        "dtype": rng.choice(["bf16", "f32"]),
        "ranks": ranks,
        "heads": heads,
        "tile": f"{a}x{b}",
        "layout": rng.choice(["striped", "striped", "zigzag", "contiguous"]),
        "stripe": rng.choice([1, 16, 64, 128]),
        "tokens": rng.randint(ranks, other.most_tokens or 2000 if on_other else 2000),
        "other": number // 2 if on_other else None,
    }


def make_model(binary, folder, case):
    q_heads, kv_heads, head_dim = case["shape"]
    name = f"{case['family']}-{q_heads}-{kv_heads}-{head_dim}-{case['layers']}"
    path = folder / name
    if not path.exists():
        arguments = ["--arch", case["family"], "--layers", case["layers"], "--heads", q_heads, "--kv-heads", kv_heads]
        arguments += ["--head-dim", head_dim, "--hidden", 192, "--vocab", 300, "--out", path, *FAMILIES[case["family"]]]
        subprocess.run([binary, "make-model", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return path


def measure(binary, folder, model, profile, on=()):
    """Writes the profile of speeds of a pool of one rank."""
    ids = folder / "one_id"
    ids.write_text("1")
    overrides = ["--set", f"plan.profile_path={profile}"]
    command = [*on, binary, "prefill", "--config", folder / "config.yaml", *overrides, "--model", model, "--tokens", ids]
    subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=600)


def executable(binary, folder, model):
    """The name that the binary gives itself in a profile of speeds."""
    profile = folder / "own_speed.json"
    profile.unlink(missing_ok=True)
    measure(binary, folder, model, profile)
    (key,) = (pool["pool"] for pool in json.loads(profile.read_text())["pools"])
    return re.search(r", ([^,;]+); \d+ layers", key).group(1)


def share_speeds(profile, old, new):
    """Gives NEW the speeds that OLD measured: schedules follow from speeds, and the lowest bits from schedules."""
    kept = json.loads(profile.read_text())
    own = [pool for pool in kept["pools"] if f", {old};" in pool["pool"]]
    shared = [{**pool, "pool": pool["pool"].replace(f", {old};", f", {new};")} for pool in own]
    profile.write_text(json.dumps({**kept, "pools": own + shared}))


def prefill(binary, folder, case, model, ids, other):
    """The bytes of logits and KV, or what the binary said instead."""
    outputs = [folder / "logits.safetensors", folder / "kv.safetensors"]
    for output in outputs:
        output.unlink(missing_ok=True)
    command = [binary, "prefill", "--config", folder / "config.yaml", "--model", model, "--tokens", ids]
    command += ["--dtype", case["dtype"], "--ranks", case["ranks"], "--heads", case["heads"], "--tile", case["tile"]]
    command += ["--layout", case["layout"], "--json", "--logits-out", outputs[0], "--kv-out", outputs[1]]
    if case["layout"] == "striped":
        command += ["--stripe", case["stripe"]]
    if case["other"] is not None:
        command = other.command(command, case["other"])
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    if result.returncode != 0:
        return result.stderr
    return [output.read_bytes() for output in outputs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--scenarios", action="store_true")
    options = parser.parse_args()
    differing = refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.yaml").write_text(
            f"pool: {{embedded: {{peak_flops: 1e11}}}}\nplan: {{profile_path: {folder / 'speed.json'}}}\n"
        )
        smallest = {"shape": SHAPES[1], "family": options.families[0], "layers": 1}
        other = other_processor(options.old, folder, make_model(options.old, folder, smallest))
        if other is None:
            print("did not run: other instruction sets than this processor's (CPUID does not trap, and no qemu-x86_64)")
        for number in range(options.cases):
            rng = random.Random(f"{options.seed}/{number}")
            case = draw(rng, number, options.families, other)
            model = make_model(options.old, folder, case)
            ids = folder / "ids"
            ids.write_text(" ".join(str(rng.randrange(300)) for _ in range(case["tokens"])))
            if number == 0:
                names = [executable(binary, folder, model) for binary in (options.old, options.new)]
            if case["other"] is not None:
                prefill(options.old, folder, {**case, "other": None}, model, ids, None)
                other.use_speeds_of(folder / "speed.json")
            old = prefill(options.old, folder, case, model, ids, other)
            if (folder / "speed.json").exists():
                share_speeds(folder / "speed.json", *names)
            new = prefill(options.new, folder, case, model, ids, other)
            if isinstance(old, str):
                refused += 1
            if old != new:
                differing += 1
                print(f"DIFFERS: {case}", *(text for text in (old, new) if isinstance(text, str)), sep="\n  ")
        on_other = options.cases // 2 if other else 0
        print(f"{options.cases} prefills ({on_other} on other instruction sets, {refused} refused by OLD): {differing} differ")
        if options.scenarios:
            for scenario in sorted(SCENARIOS.glob("*.yaml")):
                command = ["simulate", "--scenario", str(scenario)]
                old, new = (subprocess.run([b, *command], capture_output=True, check=False) for b in (options.old, options.new))
                same = old.returncode == new.returncode and old.stdout == new.stdout
                differing += not same
                print(f"{scenario.name}: {'the same' if same else 'DIFFERS'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
