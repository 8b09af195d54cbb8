#!/usr/bin/env python3
"""What befalls a pool of real processes: frozen threads, short memory, flipped bits, set clocks, strangers, poison.

The binary is the product's. Faults come from outside: signals, ptrace, limits, a relay in the control stream
(control_relay.py), and a library that stands between the binary and the system (faulty_system.cc).

Usage: pool_faults_test.py PATH_OF_MESHFILL PATH_OF_FAULTY_SYSTEM [unittest arguments]
"""
import contextlib
import os
import pathlib
import re
import resource
import signal
import socket
import struct
import sys
import threading
import time
import unittest

FAULTY_SYSTEM = sys.argv.pop(2)

from cli_harness import TIMEOUT_SECONDS, run
from frozen_thread import frozen, ticks_by_thread
from pool_harness import PoolTestCase

CERTIFICATES = pathlib.Path(__file__).parent.parent / "server" / "pool" / "certificates"
ADDRESS_MAGIC = struct.pack("<Q", 0x316F6F6C67666D02)  # of data addresses (engine/comm/gloo/gloo_rendezvous.cc)


class Faults:
    """The control panel of faulty_system.cc."""

    def __init__(self, path):
        self.path = path
        self.set()

    def set(self, clock_offset_seconds=0, flips=0):
        with open(self.path, "r+b" if self.path.exists() else "wb") as file:
            file.write(struct.pack("<qq", clock_offset_seconds, flips))

    def flips_left(self):
        return struct.unpack("<qq", self.path.read_bytes())[1]

    @property
    def environment(self):
        return {"LD_PRELOAD": FAULTY_SYSTEM, "MESHFILL_FAULTS": str(self.path)}


def listening_ports(process):
    """TCP ports on which a process listens."""
    sockets = set()
    for descriptor in pathlib.Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            if match := re.match(r"socket:\[(\d+)\]", os.readlink(descriptor)):
                sockets.add(match.group(1))
    rows = [line.split() for line in pathlib.Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in sockets}


class PoolFaultsTest(PoolTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.middle_prompt = cls.tmp / "middle.bytes"
        cls.middle_prompt.write_bytes(cls.long_prompt.read_bytes()[:16_000])

    def expect_answer(self, result, prompt, *arguments):
        """The first token that an embedded pool of one rank gives."""
        alone = self.embedded("--tokens", prompt, *arguments, "--ranks", 1)
        self.assertEqual(result["first_token"], alone["first_token"])

    def test_a_thread_that_freezes_in_compute_is_noticed_though_its_process_talks(self):
        self.leader.end()
        self.start_leader("pool.hang_timeout=5s")
        workers = self.workers("a", "b", "c")
        prompt = self.tmp / "frozen.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:18_000])  # with AMX half a second
        running = self.prefill_later(prompt, "--format", "bytes")
        self.wait_until(lambda: self.metric('meshfill_ranks{state="running"}') == 3)
        before = ticks_by_thread(workers[1].process.pid)

        def busiest_thread():
            """And for how many ticks it has computed since."""
            gained = {thread: ticks - before.get(thread, 0)
                      for thread, ticks in ticks_by_thread(workers[1].process.pid).items()}
            return max(gained.items(), key=lambda entry: entry[1])

        self.wait_until(lambda: busiest_thread()[1] >= 10)
        busiest, _ = busiest_thread()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(frozen(busiest))
            except PermissionError as error:
                self.skipTest(str(error))
            self.leader.wait_for("is lost|no rank makes progress")
            result = self.answer_of(running)
            self.assertLess(result["plan"]["ranks"], 3, "".join(self.leader.lines))
        self.expect_answer(result, prompt, "--format", "bytes")
        self.assertRegex("".join(self.leader.lines), r'"b" is lost: "(its compute loop stood still|it did not stop)')
        self.leader.wait_for('worker "b" joined', count=2)  # thawed, it comes back by itself

    @unittest.skipUnless("avx512f" in pathlib.Path("/proc/cpuinfo").read_text(), "needs AVX-512")
    def test_weights_that_do_not_fit_are_streamed_or_shared_whichever_is_faster(self):
        model = self.tmp / "large"
        self.succeed("make-model", "--arch", "llama", "--out", model, "--layers", 6, "--hidden", 256, "--heads", 4,
                     "--kv-heads", 2, "--dtype", "f32", "--context", 4096)
        prompt = self.tmp / "large.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:1000])
        meminfo = self.tmp / "meminfo"
        meminfo.write_text("MemTotal: 65536 kB\nMemAvailable: 61440 kB\n")
        small_machine = {"LD_PRELOAD": FAULTY_SYSTEM, "MESHFILL_MEMINFO": str(meminfo)}
        for bytes_per_second, shares in ((1e12, True), (1e4, False)):
            self.leader.end()
            self.start_leader(f"model.path={model}", "pool.link_latency=1us",
                              f"pool.link_bytes_per_second={bytes_per_second}")
            for ranks in (1, 2, 3):
                worker = self.worker(f"{shares}{ranks}", f"model.path={model}", "pool.worker.memory_bytes=50MiB",
                                     environment=small_machine)
                worker.wait_for("joined the pool")
                files = [self.tmp / "pool.logits", self.tmp / "resident.logits"]
                options = ["--format", "bytes", "--tile", f"1x{ranks}", "--logits-out"]
                pool = self.prefill(prompt, *options, files[0])
                self.embedded("--set", f"model.path={model}", "--set", "model.weights=resident", "--ranks", ranks,
                              "--tokens", prompt, *options, files[1])
                self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
                self.assertEqual(pool["comm_bytes"].get("gather", 0) > 0, shares and ranks > 1)
        whole = self.worker("whole", f"model.path={model}", "model.weights=resident")
        whole.wait_for("joined the pool")
        self.assertEqual(self.prefill(prompt, "--format", "bytes")["comm_bytes"].get("gather", 0), 0)

    def test_a_slow_worker_is_waited_for(self):
        self.workers("a")
        slow = self.workers("b")[0]
        done = threading.Event()

        def hold_up():
            while not done.is_set():
                slow.signal(signal.SIGSTOP)
                done.wait(0.4)
                slow.signal(signal.SIGCONT)
                done.wait(0.1)

        thread = threading.Thread(target=hold_up)
        thread.start()
        try:
            result = self.answer_of(self.prefill_later(self.middle_prompt, "--format", "bytes", "--tile", "1x2"))
        finally:
            done.set()
            thread.join()
        self.assertEqual(result["plan"]["ranks"], 2)
        self.expect_answer(result, self.middle_prompt, "--format", "bytes")
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 0)

    def test_memory_is_reserved_before_the_first_step_of_any_rank(self):
        begun = []
        self.worker_behind(lambda message: begun.append(message.kind), "a").wait_for("joined the pool")
        short = self.worker("b", environment={"MALLOC_ARENA_MAX": "1"})  # more take address space
        short.wait_for("joined the pool")
        used = int(pathlib.Path(f"/proc/{short.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(short.process.pid, resource.RLIMIT_AS, (used + (128 << 20), used + (128 << 20)))
        refused = run("prefill", "--server", self.address, "--tokens", self.long_prompt, "--format", "bytes")
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr.decode(), "worker b: .*bytes were refused.*use a shorter prompt or more memory")
        self.assertNotIn("Run", begun, "a rank began though another has no memory")
        self.assertEqual(self.prefill(self.prompt, "--tile", "1x2")["plan"]["ranks"], 2)
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)

    def test_a_flipped_bit_between_ranks_costs_a_run_and_no_answer(self):
        faults = Faults(self.tmp / "flips")
        self.workers("a")
        self.worker("b", environment=faults.environment).wait_for("joined the pool")
        arguments = ["--tile", "2x1", "--top-k", 5]
        expected = self.prefill(self.prompt, *arguments)
        faults.set(flips=1)
        result = self.prefill(self.prompt, *arguments)
        self.assertEqual(faults.flips_left(), 0)
        self.assertEqual(result["top"], expected["top"])
        self.leader.wait_for("ended in run.*is not what was sent .checksum.")
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 1)
        faults.set(flips=1_000_000)  # a machine that is broken for good
        refused = run("prefill", "--server", self.address, "--tokens", self.prompt, *map(str, arguments))
        self.assertEqual(refused.returncode, 1)
        self.assertRegex(refused.stderr.decode(), "poisonous.*checksum")
        faults.set()
        self.assertEqual(self.prefill(self.prompt, *arguments)["top"], expected["top"])

    def test_a_flipped_bit_of_an_encrypted_message_costs_a_run_and_no_answer(self):
        self.leader.end()
        self.start_leader("pool.encrypt=true")
        faults = Faults(self.tmp / "encrypted_flips")
        self.worker("a", "pool.encrypt=true").wait_for("joined the pool")
        self.worker("b", "pool.encrypt=true", environment=faults.environment).wait_for("joined the pool")
        arguments = ["--tile", "2x1", "--top-k", 5]
        expected = self.prefill(self.prompt, *arguments)
        faults.set(flips=1)
        result = self.prefill(self.prompt, *arguments)
        self.assertEqual(faults.flips_left(), 0)
        self.assertEqual(result["top"], expected["top"])
        self.leader.wait_for("ended in run.*the connection with rank . is lost: TLS: ")
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 1)

    def test_a_worker_with_other_tokens_than_it_was_sent_takes_no_part(self):
        flips = [1]

        def flip_a_token(message):
            if message.kind != "Shard" or not flips:
                return None
            flips.clear()
            return message.data[:-1] + bytes([message.data[-1] ^ 1])

        self.workers("a")
        self.worker_behind(flip_a_token, "b").wait_for("joined the pool")
        prompt = self.tmp / "small.ids"  # ids of one byte each on the wire
        prompt.write_text(" ".join(str(self.random.randrange(128)) for _ in range(6000)))
        result = self.prefill(prompt)
        self.leader.wait_for('worker "b" is lost: "it prepared another run than the one it was sent')
        self.expect_answer(result, prompt)
        self.leader.wait_for('worker "b" refused: .*did not prepare a run as it should.*without it for 10s')

    def test_a_clock_that_is_set_disturbs_nobody(self):
        faults = Faults(self.tmp / "clock")
        self.leader.end()
        self.leader_environment = faults.environment
        self.start_leader()
        workers = [self.worker(name, environment=faults.environment) for name in "ab"]
        for worker in workers:
            worker.wait_for("joined the pool")
        prompt = self.tmp / "clock.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:10_000])
        for seconds in (3600, -3600, 86400, 0):
            running = self.prefill_later(prompt, "--format", "bytes", "--tile", "1x2")
            self.wait_until(lambda: self.metric('meshfill_ranks{state="running"}') == 2, pause=0.005)
            faults.set(clock_offset_seconds=seconds)
            self.assertEqual(self.answer_of(running)["plan"]["ranks"], 2)
            time.sleep(0.3)
        self.assertGreater(len({line[:10] for line in self.leader.lines}), 1, "the clock was not set")
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 0)
        for worker in workers:
            self.assertEqual(len([line for line in worker.lines if "joined the pool" in line]), 1)

    def test_a_worker_of_another_version_is_refused_and_one_of_a_later_epoch_is_not(self):
        self.workers("a")
        version = re.search(rb"[\d.]+", run("--version").stdout).group()

        def another_version(message):
            return message.data.replace(b"meshfill " + version, b"meshfill " + b"9" * len(version))

        skewed = self.worker_behind(lambda message: another_version(message) if message.kind == "Join" else None, "new")
        self.assertEqual(skewed.process.wait(TIMEOUT_SECONDS), 1)
        skewed.wait_for("refused this worker: the worker's build is meshfill 9+, this leader's .*same version")
        self.leader.wait_for('worker "new" refused: "the worker.{1,2}s build is')

        later = self.worker("later")
        later.wait_for("joined the pool")
        self.leader.end()
        faults = Faults(self.tmp / "past")
        faults.set(clock_offset_seconds=-86400)  # a leader that believes in an earlier epoch
        self.leader_environment = faults.environment
        self.start_leader(f"pool.control_listen={self.control}")
        later.wait_for("joined the pool", count=2)
        self.assertIsNone(later.process.poll())
        self.prefill(self.prompt)

    def test_workers_live_on_while_the_leader_is_killed_in_a_run(self):
        embedded = self.embedded("--tokens", self.prompt, "--tile", "2x1", "--ranks", 2)
        workers = [*self.workers("a"), self.worker_struck("b", "RankDone", lambda: self.leader.signal(signal.SIGKILL))]
        workers[1].wait_for("joined the pool")
        running = self.prefill_later(self.prompt, "--tile", "2x1")
        self.leader.wait()
        self.assertEqual(running.wait(TIMEOUT_SECONDS), 1)
        self.assertRegex(running.communicate()[1].decode(), r"\Ameshfill prefill: server [^\n]+\n\Z")
        self.start_leader(f"pool.control_listen={self.control}")
        for worker in workers:
            worker.wait_for("joined the pool", count=2)
            self.assertIsNone(worker.process.poll())
        self.assertEqual(self.prefill(self.prompt, "--tile", "2x1")["top"], embedded["top"])

    def test_a_worker_comes_back_under_its_name_with_another_address(self):
        self.workers("a")
        second = self.worker_struck("b", "Run", lambda: second.signal(signal.SIGKILL))
        second.wait_for("joined the pool")
        self.expect_answer(self.answer_of(self.prefill_later(self.prompt)), self.prompt)
        self.leader.wait_for('worker "b" is lost')
        again = self.worker("b", "pool.worker.data_listen=127.0.0.2", "pool.worker.host=elsewhere")
        again.wait_for("joined the pool")
        self.leader.wait_for('worker "b" joined from "elsewhere"')
        self.assertEqual(self.prefill(self.prompt, "--tile", "2x1")["plan"]["ranks"], 2)

    def test_a_request_that_kills_its_pool_twice_is_refused_by_its_id(self):
        self.workers("a")
        first = self.worker_struck("b", "Run", lambda: first.signal(signal.SIGKILL), run=1)
        second = self.worker_struck("c", "Run", lambda: second.signal(signal.SIGKILL), run=2)
        self.leader.wait_for("joined from", count=3)
        refused = run("prefill", "--server", self.address, "--tokens", self.prompt, "--request-id", "hemlock")
        self.assertEqual((refused.returncode, refused.stdout), (1, b""))
        self.assertRegex(refused.stderr.decode(), "request hemlock ended 2 epochs .* poisonous.*worker c is lost")
        self.assertEqual(self.metric('meshfill_requests_total{code="INTERNAL"}'), 1)
        self.expect_answer(self.prefill(self.prompt), self.prompt)

    def test_junk_on_the_control_port_leaves_the_pool_as_it_was(self):
        self.workers("a", "b")
        host, port = self.control.rsplit(":", 1)
        junk = [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(999)]
        held = [socket.create_connection((host, int(port)), timeout=5) for _ in junk]
        for connection, data in zip(held, junk):
            with contextlib.suppress(OSError):
                connection.sendall(data)
        # A worker of another language: its stream stands, its first word is none.
        babbler = self.worker_behind(
            lambda message: b"\x52" + message.data[1:] if message.kind == "Join" else None, "babbler")
        babbler.wait_for("refused this worker: it did not begin with Join")
        self.leader.wait_for('a stranger refused: "it did not begin with Join')
        self.assertEqual(self.prefill(self.prompt, "--tile", "1x2")["plan"]["ranks"], 2)
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        for connection in held:
            connection.close()

    def test_the_control_port_heals_where_descriptors_ran_out(self):
        resource.prlimit(self.leader.process.pid, resource.RLIMIT_NOFILE, (200, 200))
        host, port = self.control.rsplit(":", 1)
        idle = [socket.create_connection((host, int(port)), timeout=10) for _ in range(300)]
        self.leader.wait_for(f"refused a connection to {self.control}")
        for connection in idle:
            connection.close()
        self.workers("a")
        self.assertEqual(self.prefill(self.prompt)["plan"]["ranks"], 1)

    def test_junk_on_the_data_port_is_refused_and_logged_once(self):
        # The data ports are open from Prepare until all ranks have met: the second worker's Run is held back meanwhile.
        prepared, go_on = threading.Event(), threading.Event()

        def hold_back(message):
            if message.kind == "Prepared" and ADDRESS_MAGIC in message.data:
                prepared.set()
            if message.kind == "Run":
                go_on.wait(TIMEOUT_SECONDS)

        first = self.workers("a")[0]
        self.worker_behind(hold_back, "b").wait_for("joined the pool")
        kv_ports = listening_ports(first.process.pid)

        def data_ports():
            return listening_ports(first.process.pid) - kv_ports

        for _ in range(2):
            prepared.clear()
            go_on.clear()
            running = self.prefill_later(self.prompt, "--tile", "2x1")
            self.assertTrue(prepared.wait(TIMEOUT_SECONDS))
            self.wait_until(data_ports)
            (port,) = data_ports()
            strangers = []
            for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(data)
            go_on.set()
            self.assertEqual(self.answer_of(running)["plan"]["ranks"], 2)
            for stranger in strangers:
                stranger.close()
        first.wait_for("refused 3 connections to the data port of rank 0: they did not say the hello")
        self.assertEqual(sum("data port" in line for line in first.lines), 1)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 0)

    def test_a_join_without_a_certificate_is_refused(self):
        self.leader.end()

        def tls(name):
            return [f"pool.tls.cert={CERTIFICATES / name}.pem", f"pool.tls.key={CERTIFICATES / name}.key",
                    f"pool.tls.ca={CERTIFICATES / 'authority.pem'}"]

        self.start_leader(*tls("leader"))
        self.worker("good", *tls("worker")).wait_for("joined the pool")
        bare = self.worker("bare")
        stranger = self.worker("stranger", *tls("stranger"))
        for worker in (bare, stranger):
            worker.wait_for("cannot join yet.*the leader is not there, or takes none without a certificate")
        time.sleep(1)  # they try again
        for worker in (bare, stranger):
            troubles = [line.split(" ", 1)[1] for line in worker.lines if "cannot join yet" in line]
            self.assertEqual(len(troubles), len(set(troubles)), worker.lines)  # each is told once
        self.assertEqual(self.prefill(self.prompt)["plan"]["ranks"], 1)
        self.assertEqual(self.metric("meshfill_worker_joins_total"), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
