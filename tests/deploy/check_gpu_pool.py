"""A pool of processes as check_gpu.py starts it: a front-end, and workers with a GPU each, or that share what there is."""
import pathlib
import random
import re
import struct
import time

from check_gpu_run import Failed, end_group, last_line


class Pool:
    """Of `ranks` workers with a rank each, on `gpus` GPUs (None: one for each); ends with the `with` block."""

    def __init__(self, run, model, work, ranks, settings, deadline, gpus=None):
        self.gpus = gpus or ranks
        self.run, self.model, self.work = run, model, pathlib.Path(work)
        self.ranks, self.settings, self.deadline = ranks, settings, deadline
        self.processes, self.prefills = [], 0

    def __enter__(self):
        try:
            front_end = self.start("front-end", ["serve", "--set", "pool.control_listen=127.0.0.1:0", "--set",
                                                 "listen=127.0.0.1:0", "--set", "metrics_listen="])
            self.address = self.said(front_end, r" listening on (\S+:\d+)")
            control = self.said(front_end, r"workers join at (\S+:\d+)")
            workers = [
                self.start(f"worker-{rank}", ["worker", "--join", control, *self.worker_settings(rank)],
                           {"CUDA_VISIBLE_DEVICES": str(rank % self.gpus), "NCCL_SOCKET_IFNAME": "lo",
                            # NCCL refuses two ranks of one host on one GPU.
                            **({"NCCL_HOSTID": f"rank{rank}"} if self.gpus < self.ranks else {})})
                for rank in range(self.ranks)
            ]
            for worker in workers:
                self.said(worker, "joined the pool")
        except BaseException:
            self.__exit__()
            raise
        return self

    def worker_settings(self, rank):
        settings = [f"pool.worker.name=worker-{rank}", "pool.worker.device=cuda",
                    "pool.worker.memory_bytes=8GiB", "pool.worker.peak_flops=1e15", *self.settings]
        return [word for setting in settings for word in ("--set", setting)]

    def start(self, name, arguments, environment=None):
        config = self.work / "pool.yaml"
        config.write_text(f"model: {{path: {self.model}}}\n")
        command, *rest = arguments
        log = self.work / f"{name}.log"
        with log.open("wb") as output:
            process = self.run.start([self.run.folder / "bin/meshfill", command, "--config", config, *rest], environment,
                                     output=output)
        self.processes.append(process)
        return process, log

    def said(self, started, pattern):
        process, log = started
        while time.monotonic() < self.deadline:
            if match := re.search(pattern, log.read_text()):
                return match.group(match.lastindex or 0)
            if process.poll() is not None:
                break
            time.sleep(0.05)
        lines = log.read_text().strip().splitlines()
        raise ValueError(f"{log.stem}: {lines[-1] if lines else 'says nothing'}")

    def prefill(self, tokens, *arguments):
        """What `meshfill prefill --json` says of a random prompt."""
        prompt = self.work / f"{tokens}.u32le"
        if not prompt.exists():
            draw = random.Random(1)
            prompt.write_bytes(struct.pack(f"<{tokens}I", *(draw.randrange(1000) for _ in range(tokens))))
        self.prefills += 1
        log = self.work / f"prefill-{self.prefills}.log"  # several may run at once
        with log.open("wb") as file:
            process = self.run.start([self.run.folder / "bin/meshfill", "prefill", "--server", self.address, "--tokens", prompt,
                                      "--format", "u32le", "--json", *arguments], output=file)
        try:
            status = process.wait(timeout=max(1, self.deadline - time.monotonic()))
        finally:
            end_group(process)
        if status != 0:
            raise Failed(f"meshfill prefill ended with {status}: {last_line(log.read_text())}")
        return self.run.json_of(log.read_text())

    def __exit__(self, *_):
        for process in self.processes:
            end_group(process)
        for log in sorted(self.work.glob("*.log")):
            self.run.log.write(f"---- {log.name}\n".encode() + log.read_bytes())
