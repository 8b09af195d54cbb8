#!/usr/bin/env python3
"""Compiles the CUDA kernels and reads what the compiler made of them, so that a regression shows without a device.

Usage: check_cuda_code.py [KERNEL …]      e.g. attention_sm90_dim128; default: all

Registers, spills and warnings: from ptxas. The order of the main loop, and divisions: from the machine code, where cuobjdump
is found (on PATH, in CUDA's folder, or as $CUOBJDUMP; PyPI's nvidia-cuda-cuobjdump has it, and so has Triton's wheel). Needs
nvcc and a minute. Status: 0 all as it should be, 1 something is not, 77 no nvcc.
"""
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CUDA = pathlib.Path("/usr/local/cuda/bin")


@dataclasses.dataclass(frozen=True)
class Kernel:
    architecture: str        # as kernels/CMakeLists.txt has it
    registers: int           # at launch, at most
    exponentials: int = 0    # of a key tile and thread: two rows' scores
    late_exponentials: int = 0  # how many of them the compiler may move behind P V, in one of the loops
    products: tuple = ()     # wgmma instructions of Q Kᵀ and of P V, a key tile
    moved_registers: int = 0  # for their descriptors, from vector to uniform registers (R2UR), at most
    spilled_bytes: int = 0   # stored, at most
    divisions: int = 0       # of integers, by what only a launch knows: of a function, at most


# sm90: 64 rows of kKeys scores are kKeys / 2 a thread; products are head_dim / 16, and kKeys / 16 for each 128 columns.
KERNELS = {
    "attention_sm90_dim64": Kernel("90a", 128, 64, products=(4, 8)),
    "attention_sm90_dim96": Kernel("90a", 128, 48, products=(6, 6)),
    # Its loop of masked tiles: the compiler moves a few exponentials over the wait.
    "attention_sm90_dim128": Kernel("90a", 168, 64, late_exponentials=4, products=(8, 8)),
    "attention_sm90_dim256": Kernel("90a", 168, 40, products=(16, 10), moved_registers=6),
    "attention_sm80_dim64": Kernel("80", 255),
    "attention_sm80_dim96": Kernel("80", 255),
    "attention_sm80_dim128": Kernel("80", 255, spilled_bytes=64),  # two CTAs on a multiprocessor: 255 registers
    "attention_sm80_dim256": Kernel("80", 255),
    "layer_ops": Kernel("80", 64, divisions=2),  # the compiler's: how often it unrolls a loop over single elements
    # Two CTAs of the product on a multiprocessor of 9.0. Products divide once a CTA, routing for its entries.
    "expert_ops": Kernel("80", 128, spilled_bytes=4, divisions=8),
}


LOOPS = 2  # of key tiles: masked ones, and whole ones


def tool(name):
    beside = CUDA / name
    return os.environ.get(name.upper()) or shutil.which(name) or (str(beside) if beside.exists() else None)


def compile_kernel(nvcc, name, kernel, binary):
    """What ptxas says."""
    code = f"arch=compute_{kernel.architecture},code=sm_{kernel.architecture}"
    done = subprocess.run([nvcc, "-O3", "-DNDEBUG", "-std=c++20", "--expt-relaxed-constexpr", f"-I{ROOT}", f"-gencode={code}",
                           "-Xptxas", "-v", "-c", ROOT / f"kernels/cuda/{name}.cu", "-o", binary],
                          capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{name} does not compile:\n{done.stderr}")
    return done.stderr


def resource_faults(kernel, said):
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", said)]
    if not registers:
        yield "ptxas names no registers"
    if max(registers, default=0) > kernel.registers:
        yield f"{max(registers)} registers; at most {kernel.registers}"
    if max(spilled, default=0) > kernel.spilled_bytes:
        yield f"{max(spilled)} bytes spilled; at most {kernel.spilled_bytes}"
    # C7508: setmaxnreg is ignored. C7510 to C7519: wgmma is serialised.
    for warning in re.findall(r".*(?:C75\d\d|wgmma|setmaxnreg).*", said):
        yield warning.strip()


def functions(machine_code):
    """The instructions' names, function by function."""
    for text in machine_code.split("Function : ")[1:]:
        yield re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text)


def division_faults(kernel, instructions):
    """A division of integers goes by way of a reciprocal in floating point, and back."""
    back = sum(name.startswith("F2I") for name in instructions)
    if back > kernel.divisions:
        yield f"{back} divisions of integers, at most {kernel.divisions} (divisor.h)"


def loop_faults(kernel, instructions):
    """The main loops, of masked key tiles and of whole ones, issue Q Kᵀ and, behind it, P V; the exponentials run before they
    wait for P V."""
    order, moves = [], []  # with how many registers were moved before
    moved = 0
    for name in instructions:
        moved += name.startswith("R2UR")
        if name.split(".")[0] in ("HGMMA", "LDL", "STL") or name.startswith(("MUFU.EX2", "WARPGROUP")):
            order.append(name)
            moves.append(moved)
    batches, at = [], 0  # runs of products: index of the first, and how many
    while at < len(order):
        first = at
        while at < len(order) and order[at].startswith("HGMMA"):
            at += 1
        if at > first:
            batches.append((first, at - first))
        at += 1
    qk, pv = kernel.products
    # P V of 256 columns takes two instructions a step.
    pairs = [(one, two) for one, two in zip(batches, batches[1:])
             if one[1] == qk and two[1] in (pv, 2 * pv) and order[one[0] + one[1] : two[0]] == ["WARPGROUP.ARRIVE"]]
    if len(pairs) != LOOPS:
        yield f"{len(pairs)} loops that issue {qk} and then {pv} products, of which there are {LOOPS}; batches {batches}"
        return
    late_loops = 0
    for (begin, _), (first, count) in pairs:
        moved = moves[first + count - 1] - moves[begin]
        if moved > kernel.moved_registers:
            yield f"{moved} registers are moved to uniform ones among the products, at most {kernel.moved_registers}"
        rest = order[first + count :]
        waits = [i for i, name in enumerate(rest) if name.startswith("WARPGROUP.DEPBAR")]
        if len(waits) < 2:
            yield "a loop does not wait for Q Kᵀ and then for P V"
            continue
        between = rest[waits[0] + 1 : waits[1]]
        exponentials = sum(name.startswith("MUFU.EX2") for name in between)
        late_loops += kernel.exponentials - kernel.late_exponentials <= exponentials < kernel.exponentials
        if exponentials < kernel.exponentials - kernel.late_exponentials or late_loops > 1:
            yield f"{exponentials} of {kernel.exponentials} exponentials run under P V"
        if any(name.startswith(("LDL", "STL")) for name in between):
            yield "a loop uses local memory"


def main(names):
    nvcc, cuobjdump = tool("nvcc"), tool("cuobjdump")
    if nvcc is None:
        print("not run: no nvcc")
        return 77
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        print(f"check_cuda_code.py: {unknown[0]} is none of {', '.join(KERNELS)}", file=sys.stderr)
        return 2
    if cuobjdump is None:
        print("no cuobjdump: neither the loops' order nor divisions are checked")
    faulty = False
    with tempfile.TemporaryDirectory() as folder:
        for name in names or KERNELS:
            kernel, binary = KERNELS[name], pathlib.Path(folder) / f"{name}.o"
            faults = list(resource_faults(kernel, compile_kernel(nvcc, name, kernel, binary)))
            if cuobjdump is not None:
                done = subprocess.run([cuobjdump, "-sass", binary], capture_output=True, text=True, timeout=120, check=True)
                each = list(functions(done.stdout))
                faults += [] if each else ["no machine code"]
                for instructions in each:
                    faults += division_faults(kernel, instructions)
                    faults += loop_faults(kernel, instructions) if kernel.products else []
            faulty = faulty or bool(faults)
            print(f"{name}: {'; '.join(faults) or 'as it should be'}", flush=True)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
