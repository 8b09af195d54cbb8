#!/usr/bin/env python3
"""`meshfill serve` as the leader of `meshfill worker` processes on loopback: joins, answers, deaths, refusals.

Usage: pool_test.py PATH_OF_MESHFILL [unittest arguments]
"""
import contextlib
import gzip
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request

from cli_harness import MESHFILL, TIMEOUT_SECONDS, crowding, run
from pool_harness import SILENCE_SECONDS, PoolTestCase


def floats(path):
    """The one f32 tensor of a safetensors file."""
    data = path.read_bytes()
    tensor = data[8 + int.from_bytes(data[:8], "little"):]
    return struct.unpack(f"<{len(tensor) // 4}f", tensor)


class PoolTest(PoolTestCase):
    def test_pool_and_embedded_agree_to_the_bit(self):
        refused = run("prefill", "--server", self.address, "--tokens", self.prompt)
        self.assertEqual(refused.returncode, 1)
        self.assertIn(b"no workers", refused.stderr)
        two_ranks = self.worker("a", "pool.worker.ranks=2")
        two_ranks.wait_for("joined the pool")
        self.workers("b", "c")
        files = [self.tmp / "pool.logits", self.tmp / "one.logits"]
        kept = [self.tmp / "pool.kv", self.tmp / "one.kv"]
        options = ["--tile", "2x2", "--top-k", 5, "--logits-out"]
        pool = self.prefill(self.prompt, *options, files[0], "--kv-out", kept[0])
        embedded = self.embedded("--tokens", self.prompt, *options, files[1], "--kv-out", kept[1])
        self.assertEqual(kept[0].read_bytes(), kept[1].read_bytes())
        self.assertEqual(self.metric("meshfill_kv_leases"), 0)  # it is released
        self.wait_until(lambda: self.metric("meshfill_kv_worker_bytes") == 0)  # told at the next tick
        self.check_prefill_object(pool, len(self.ids), ranks=4, top_k=5)
        for key in ("tokens", "first_token", "top", "plan", "comm_bytes"):
            self.assertEqual(pool[key], embedded[key], key)
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
        again = self.tmp / "again.logits"
        self.prefill(self.prompt, *options, again)
        self.assertEqual(files[0].read_bytes(), again.read_bytes())
        self.assertEqual(self.metric("meshfill_worker_joins_total"), 3)
        self.assertEqual(self.metric('meshfill_ranks{state="ready"}'), 4)
        status = self.succeed("status", "--server", self.address)
        self.assertRegex(status, r"\nworker +state +ranks +first rank +host +backend\n(\w+ +ready +[12] +- +\S+ +cpu[^\n]*\n){3}\Z")

    def test_an_idle_worker_gives_back_what_a_prompt_took(self):
        worker, = self.workers("a")
        status = pathlib.Path(f"/proc/{worker.process.pid}/status")

        def mapped():
            return int(re.search(r"VmSize:\s+(\d+) kB", status.read_text()).group(1)) << 10

        self.prefill(self.tokens_file(16_000))
        kept = mapped()  # the next prompt would use it again
        self.wait_until(lambda: mapped() <= kept - (4 << 20))

    def tokens_file(self, count):
        path = self.tmp / f"{count}.ids"
        path.write_text(" ".join(str(i * 31 % 100) for i in range(count)))
        return path

    def test_an_encrypted_pool_gives_the_same_bits(self):
        self.leader.end()
        self.start_leader("pool.encrypt=true")
        for name, ranks in (("a", 2), ("b", 1), ("c", 1)):
            self.worker(name, "pool.encrypt=true", f"pool.worker.ranks={ranks}").wait_for("joined the pool")
        bare = self.worker("bare")
        self.assertEqual(bare.process.wait(TIMEOUT_SECONDS), 1)
        bare.wait_for("does not encrypt its data plane, this pool does.*give both the same pool.encrypt")
        files = [self.tmp / "encrypted.logits", self.tmp / "embedded.logits"]
        options = ["--tile", "2x2", "--top-k", 5, "--logits-out"]
        pool = self.prefill(self.prompt, *options, files[0])
        embedded = self.embedded("--tokens", self.prompt, *options, files[1])
        self.assertEqual(files[0].read_bytes(), files[1].read_bytes())
        self.assertEqual(pool["comm_bytes"], embedded["comm_bytes"])

    @unittest.skipUnless("avx512f" in pathlib.Path("/proc/cpuinfo").read_text(), "needs AVX-512")
    def test_workers_share_the_weights_to_the_same_bits(self):
        def sharing(name, *settings):
            worker = self.worker(name, "model.weights=sharded", *settings)
            worker.wait_for("joined the pool")
            return worker

        def check(tile, ranks):
            options = ["--tile", tile, "--top-k", 5, "--logits-out"]
            files = [self.tmp / "shared.logits", self.tmp / "resident.logits"]
            pool = self.prefill(self.prompt, *options, files[0])
            self.embedded("--tokens", self.prompt, "--ranks", ranks, *options, files[1])
            self.assertGreater(pool["comm_bytes"]["gather"], 0)
            self.assertEqual(files[0].read_bytes(), files[1].read_bytes())

        sharing("a", "pool.worker.ranks=2")
        second, third = sharing("b"), sharing("c")
        self.worker("resident").wait_for("give all the same model.weights")
        for _ in range(2):  # the second finds the shares in memory
            check("2x2", 4)
        self.assertGreater(self.metric('meshfill_comm_bytes_total{op="gather"}'), 0)
        third.signal(signal.SIGKILL)
        self.wait_until(lambda: self.metric('meshfill_ranks{state="ready"}') == 3)
        check("1x3", 3)  # by new shares
        second.signal(signal.SIGKILL)
        self.wait_until(lambda: self.metric('meshfill_ranks{state="ready"}') == 2)
        alone = run("prefill", "--server", self.address, "--tokens", self.prompt)
        self.assertEqual(alone.returncode, 1)
        self.assertIn(b"nobody to share with", alone.stderr)
        fourth = sharing("d")
        check("3x1", 3)
        sharing("e")
        prompt = self.tmp / "shared.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:30_000])
        running = self.prefill_later(prompt, "--format", "bytes")
        self.wait_until(lambda: "running" in self.phases().values())
        fourth.signal(signal.SIGKILL)  # within a run: it begins anew by other shares
        alone = self.embedded("--tokens", prompt, "--format", "bytes")
        answer = self.answer_of(running)
        self.assertEqual((answer["first_token"], answer["attempts"]), (alone["first_token"], 2))
        check("1x3", 3)

    def test_a_worker_has_pages_of_its_own(self):
        worker = self.worker("paged", "pool.worker.metrics_listen=127.0.0.1:0")
        address = worker.wait_for(r"metrics listening on (\S+:\d+)").group(1)

        def health(page="readyz"):
            try:
                return urllib.request.urlopen(f"http://{address}/{page}", timeout=5).status
            except urllib.error.HTTPError as error:
                return error.code

        self.assertEqual(health("healthz"), 200)  # it may still load
        worker.wait_for("joined the pool")
        self.wait_until(lambda: health() == 200)
        asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept-Encoding": "gzip"})
        with urllib.request.urlopen(asked, timeout=5) as answer:
            self.assertEqual(answer.headers["Content-Encoding"], "gzip")
            lines = gzip.decompress(answer.read()).decode().splitlines()
        self.assertIn("meshfill_worker_member 1", lines)
        (started,) = (float(line.split()[1]) for line in lines if line.startswith("process_start_time_seconds "))
        self.assertLess(abs(time.time() - started), TIMEOUT_SECONDS)
        self.leader.end()
        self.wait_until(lambda: health() == 503)
        self.assertEqual(health("healthz"), 200)  # nothing is wrong with it
        self.refuse("worker", "--config", self.worker_config, "--join", self.control, "--set",
                    f"pool.worker.metrics_listen={address}", status=1, message=r"pool\.worker\.metrics_listen: .*port")
        worker.signal(signal.SIGTERM)
        self.assertEqual(worker.wait(), 0)

    def test_ranks_sit_where_the_links_are(self):
        """With slow links between two hosts, a KV ring of four stays on each, and the answer is what it is."""
        self.two_hosts("box 1x4x1 on a host", "plan.schedule=greedy")

    def test_rings_lead_from_host_to_host(self):
        """With several messages at once, KV goes round on each host while one chunk comes from the other."""
        self.two_hosts(r"KV rings\s+of 2 ranks")

    def two_hosts(self, expected, *settings):
        self.leader.end()
        # Slower than any attention, also a sanitizer's on a busy processor; nothing but the plan reads it.
        self.start_leader("pool.link_bytes_per_second=1e4", "pool.host_link_bytes_per_second=1e9", *settings)
        for host in ("left", "right"):
            self.worker(host, "pool.worker.ranks=4", f"pool.worker.host={host}").wait_for("joined the pool")
        files = [self.tmp / "placed.logits", self.tmp / "in_order.logits"]
        options = ["--tokens", self.prompt, "--tile", "2x4", "--logits-out"]
        text = self.succeed("prefill", "--server", self.address, *options, files[0])
        self.assertRegex(text, expected)
        self.embedded("--ranks", 8, *options, files[1])
        placed, in_order = map(floats, files)  # their schedules differ, as the links do
        scale = max(map(abs, in_order))
        self.assertLess(max(abs(x - y) for x, y in zip(placed, in_order, strict=True)), 1e-5 * scale)
        again = self.tmp / "again.logits"
        self.succeed("prefill", "--server", self.address, *options, again)
        self.assertEqual(files[0].read_bytes(), again.read_bytes())

    def test_links_that_are_not_given_are_measured_once(self):
        self.leader.end()
        self.start_leader("pool.measure_links=true")
        self.workers("a", "b")
        files = [self.tmp / f"measured{i}.logits" for i in range(3)]
        answers = [self.prefill(self.prompt, "--tile", "1x2", "--logits-out", file) for file in files[:2]]
        number, unit, latency = self.leader.wait_for(
            r"links measured: on a host (\S+) ([kMG])B/s, (\S+) [um]s; it took ").groups()
        bytes_per_second = float(number) * {"k": 1e3, "M": 1e6, "G": 1e9}[unit]
        self.assertTrue(1e6 < bytes_per_second < 1e12, bytes_per_second)
        self.assertTrue(0 < float(latency) < 1000, latency)
        self.assertEqual(self.logged("links measured"), 1)
        status = json.load(urllib.request.urlopen(f"http://{self.metrics_address}/status.json", timeout=5))
        (link,) = status["pool"]["links"]
        self.assertEqual((link["where"], link["source"]), ("on a host", "measured"))
        self.assertAlmostEqual(link["bytes_per_second"] / bytes_per_second, 1, places=2)

        self.leader.end()
        self.start_leader(f"pool.control_listen={self.control}", "pool.measure_links=true", "pool.host_link_bytes_per_second=1e9")
        self.leader.wait_for("joined from", count=2)
        answers.append(self.prefill(self.prompt, "--tile", "1x2", "--logits-out", files[2]))
        self.assertEqual(self.logged("links measured"), 0)
        for answer in answers:
            self.assertEqual(answer["comm_bytes"], answers[0]["comm_bytes"])
        for file in files:
            self.assertEqual(file.read_bytes(), files[0].read_bytes())

    def test_a_worker_dies_and_one_is_stopped_in_the_middle(self):
        prompt = self.tmp / "middle.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:16_000])
        self.workers("a", "d")
        for number, name, limit_seconds in ((signal.SIGKILL, "b", SILENCE_SECONDS / 2),
                                            (signal.SIGSTOP, "c", SILENCE_SECONDS + 2)):
            with self.subTest(name):
                struck_at = []

                def strike():
                    struck_at.append(time.monotonic())
                    victim.signal(number)

                victim = self.worker_struck(name, "Progress", strike)
                victim.wait_for("joined the pool")
                kept = [self.tmp / "struck.kv", self.tmp / "calm.kv"]
                running = self.prefill_later(prompt, "--format", "bytes", "--kv-out", kept[0])
                self.wait_until(lambda: struck_at)
                self.leader.wait_for(f'Z worker "{name}" is lost')
                # A kill by the end of its stream, a stop by silence; pool_churn.py holds them to the default times.
                self.assertLess(time.monotonic() - struck_at[0], limit_seconds * crowding())
                result = self.answer_of(running)
                self.check_prefill_object(result, 16_000, ranks=2, attempts=2)
                if number == signal.SIGSTOP:  # what the lost run took is told, too
                    self.assertGreater(result["seconds"]["prefill"], 0.8 * SILENCE_SECONDS)
                ran = "plan={a}x{b} heads={heads} ranks={ranks} ".format(**result["plan"])
                self.leader.wait_for(f'id="{result["request_id"]}" .*{ran}.* attempts=2')
                # What the run that was struck had kept is not mixed with what the next one keeps.
                calm = self.prefill(prompt, "--format", "bytes", "--kv-out", kept[1])
                self.assertEqual(calm["plan"], result["plan"])
                self.assertEqual(kept[0].read_bytes(), kept[1].read_bytes())
        self.assertGreaterEqual(self.metric("meshfill_requests_retried_total"), 2)
        # Before others take the cores, which may silence a worker for a while.
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 2)
        alone = self.embedded("--tokens", prompt, "--format", "bytes", "--ranks", 1)
        self.assertEqual(result["first_token"], alone["first_token"])
        victim.signal(signal.SIGCONT)  # it comes back by itself
        self.leader.wait_for('worker "c" joined', count=2)

    def test_a_leader_that_stands_still_loses_nobody(self):
        self.workers("a", "b")
        for _ in range(2):
            self.leader.signal(signal.SIGSTOP)
            time.sleep(1.3 * SILENCE_SECONDS)  # the workers wait for it twice as long as it for them
            self.leader.signal(signal.SIGCONT)
            result = self.prefill(self.prompt)
            self.check_prefill_object(result, len(self.ids), ranks=result["plan"]["ranks"])
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)

    @contextlib.contextmanager
    def standing_still(self, workers):
        """While a client starts: a busy machine would end the prompts that came before it meanwhile."""
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for worker in workers:
                worker.signal(signal.SIGCONT)

    def begun_one_after_the_other(self, workers, **tokens):
        """Prompts by id, each at most half as long as the one before; each comes once the one before computes."""
        running = {}
        for name, count in tokens.items():
            prompt = self.tmp / f"{name}.bytes"
            prompt.write_bytes(self.long_prompt.read_bytes()[:count])
            self.wait_until(lambda: not running or self.phases().get([*running][-1]) == "running", pause=0.005)
            with self.standing_still(workers):
                running[name] = self.prefill_later(prompt, "--format", "bytes", "--request-id", name, "--logits-out",
                                                   self.tmp / f"{name}.logits")
                self.wait_until(lambda: name in self.phases())  # noqa: B023
        return running

    def check_calm(self, name, result):
        """Alone, with the same workers, the prompt has the same plan and the same bits."""
        calm = self.tmp / "calm.logits"
        again = self.prefill(self.tmp / f"{name}.bytes", "--format", "bytes", "--logits-out", calm)
        self.assertEqual(again["plan"], result["plan"])
        self.assertEqual(again["top"], result["top"])
        self.assertEqual(calm.read_bytes(), (self.tmp / f"{name}.logits").read_bytes())

    def test_long_prompts_give_way_to_shorter_ones(self):
        workers = self.workers("a", "b")
        running = self.begun_one_after_the_other(workers, long=20_000, middle=10_000)
        self.wait_until(lambda: self.phases() == {"middle": "running", "long": "paused"}, pause=0.005)
        for name in ("first", "second", "third"):
            with self.standing_still(workers):
                client = self.prefill_later(self.prompt, "--request-id", name, "--logits-out",
                                            self.tmp / "short.logits")
                self.wait_until(lambda: name in self.phases())  # noqa: B023
            short = self.answer_of(client)
            self.assertIsNone(running["long"].poll())
        self.assertGreaterEqual(self.metric("meshfill_preemptions_total"), 4)
        results = {name: self.answer_of(each) for name, each in running.items()}
        self.assertLess(results["middle"]["seconds"]["queue"], results["long"]["seconds"]["queue"])
        self.assertGreater(self.metric("meshfill_paused_seconds_total"), 0)
        for name, result in results.items():
            self.assertNotIn("attempts", result)
            self.check_calm(name, result)
        alone = self.prefill(self.prompt, "--logits-out", self.tmp / "alone.logits")
        self.assertEqual(short["top"], alone["top"])
        self.assertEqual((self.tmp / "short.logits").read_bytes(), (self.tmp / "alone.logits").read_bytes())
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 0)

    def test_a_worker_dies_while_three_prefills_live(self):
        struck = []  # what the leader had then

        def watch(_):
            phases = {} if struck else self.phases()
            if phases.get("small") == "running":
                struck.append(phases)
                victim.signal(signal.SIGKILL)

        victim = self.worker_behind(watch, "b")
        victim.wait_for("joined the pool")
        workers = [victim, *self.workers("a", "c")]
        running = self.begun_one_after_the_other(workers, long=20_000, middle=10_000, small=5_000)
        results = {name: self.answer_of(each) for name, each in running.items()}
        self.assertEqual(struck[0], {"small": "running", "middle": "paused", "long": "paused"})
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 1)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 3)
        for name, result in results.items():
            self.assertEqual(result["attempts"], 2)
            self.assertLessEqual(result["plan"]["ranks"], 2)
            self.check_calm(name, result)
            self.assertEqual(self.logged(f"id=\"{name}\""), 1)
        self.assertEqual(self.logged("attempts=2"), 3)

    def test_cancelled_while_it_stands_still(self):
        running = self.begun_one_after_the_other(self.workers("a", "b"), long=20_000, middle=10_000)
        self.wait_until(lambda: self.phases() == {"middle": "running", "long": "paused"}, pause=0.005)
        running["long"].send_signal(signal.SIGINT)
        self.wait_until(lambda: "long" not in self.phases())
        out, error = running["long"].communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual((running["long"].returncode, out, error), (130, b"", b"meshfill prefill: cancelled\n"))
        self.check_calm("middle", self.answer_of(running["middle"]))
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)

    def test_bench_mix_measures_a_pool(self):
        bench = subprocess.Popen(
            [MESHFILL, "bench", "mix", "--config", self.pool_config, "--workers", "2", "--long", "8000", "--short", "100",
             "--count", "4", "--rounds", "1", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.addCleanup(bench.kill)
        address = re.fullmatch(r"2 workers join at (\S+:\d+)\n", bench.stderr.readline().decode()).group(1)
        for name in ("a", "b"):
            self.worker(name, join=address)
        out, error = bench.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual(bench.returncode, 0, error)
        mix = json.loads(out)
        self.assertEqual((mix["workers"], mix["long_tokens"], mix["short_tokens"], mix["count"]), (2, 8000, 100, 4))
        behind = mix["short_behind_seconds"]
        self.assertGreater(behind["median"], 0)
        self.assertLessEqual(behind["median"], behind["p95"])
        self.assertGreater(mix["long_mixed_seconds"], 0)

    def test_workers_that_do_not_fit_are_refused_with_the_reason(self):
        self.workers("a")
        other = self.tmp / "other"
        made = run("make-model", "--arch", "llama", "--out", other, "--layers", 1, "--hidden", 64, "--heads", 4,
                   "--kv-heads", 2, "--vocab", 256, "--dtype", "f32")
        self.assertEqual(made.returncode, 0, made.stderr)
        stranger = self.worker("stranger", f"model.path={other}")
        self.assertEqual(stranger.process.wait(TIMEOUT_SECONDS), 1)
        stranger.wait_for("another config.json")
        seeded = self.tmp / "seeded"
        made = run("make-model", "--arch", "llama", "--out", seeded, "--layers", 2, "--hidden", 64, "--heads", 4,
                   "--kv-heads", 2, "--vocab", 256, "--dtype", "f32", "--context", 1 << 20, "--seed", 99)
        self.assertEqual(made.returncode, 0, made.stderr)
        weights = self.worker("weights", f"model.path={seeded}")
        self.assertEqual(weights.process.wait(TIMEOUT_SECONDS), 1)
        weights.wait_for("weights")
        twin = self.worker("a")
        twin.wait_for("a worker named a is in the pool")
        time.sleep(1)
        self.assertEqual(sum('worker "a" refused' in line for line in self.leader.lines), 1, "logged once")
        host, port = self.control.rsplit(":", 1)
        for junk in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b""):
            with socket.create_connection((host, int(port)), timeout=5) as connection:
                connection.sendall(junk)
        self.assertEqual(self.prefill(self.prompt)["plan"]["ranks"], 1)

    def test_workers_come_back_to_a_new_leader_and_drain(self):
        self.workers("a", "b")
        first = self.prefill(self.prompt, "--tile", "1x2")
        self.leader.end()
        self.start_leader(f"pool.control_listen={self.control}")
        for name in ("a", "b"):
            self.leader.wait_for(f'worker "{name}" joined')
        self.assertEqual(self.prefill(self.prompt, "--tile", "1x2")["top"], first["top"])

        drained = self.worker_struck("c", "Progress", lambda: drained.signal(signal.SIGTERM))
        drained.wait_for("joined the pool")
        prompt = self.tmp / "drain.bytes"
        prompt.write_bytes(self.long_prompt.read_bytes()[:16_000])
        result = self.answer_of(self.prefill_later(prompt, "--format", "bytes"))
        self.assertEqual(result["plan"]["ranks"], 3)
        self.assertEqual(drained.process.wait(TIMEOUT_SECONDS), 0)
        self.assertEqual(self.metric("meshfill_worker_losses_total"), 0)
        self.assertEqual(self.metric("meshfill_requests_retried_total"), 0)
        self.assertLess(self.prefill(self.prompt)["plan"]["ranks"], 3)

    def test_cancel_stops_all_ranks_within_a_block_and_frees_the_pool(self):
        passed = []  # kinds and times of what the leader and the workers say
        for name in "ab":
            self.worker_behind(lambda message: passed.append((message.kind, time.monotonic())), name)
        self.leader.wait_for("joined from", count=2)

        def times(kind):
            return [at for each, at in list(passed) if each == kind]

        plan = json.loads(self.succeed("plan", "--config", self.config, "--tokens", self.long_prompt.stat().st_size,
                                       "--ranks", 2, "--json"))
        block_seconds = plan["predicted"]["compute_seconds"] / (plan["a"] * plan["b"]) / 2  # layers
        running = self.prefill_later(self.long_prompt, "--format", "bytes")
        self.wait_until(lambda: len(times("Run")) == 2)
        time.sleep(min(0.5, plan["predicted"]["seconds"] / 4))  # they are in the midst of it
        start = time.monotonic()
        running.send_signal(signal.SIGINT)
        self.wait_until(lambda: len(times("Stopped")) == 2)
        idle_seconds = max(times("Stopped")) - start
        out, error = running.communicate(timeout=TIMEOUT_SECONDS)
        self.assertEqual((running.returncode, out, error), (130, b"", b"meshfill prefill: cancelled\n"))
        start = time.monotonic()
        self.prefill(self.prompt)
        next_seconds = time.monotonic() - start
        print(f"both ranks stand still {idle_seconds:.3f} s after the client's cancel, in blocks of "
              f"{block_seconds:.1f} s; the next request is answered after {next_seconds:.3f} s", file=sys.stderr)
        self.assertLess(idle_seconds, block_seconds * crowding())
        self.assertLess(next_seconds, SILENCE_SECONDS * crowding())


if __name__ == "__main__":
    unittest.main(verbosity=2)
