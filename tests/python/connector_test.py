"""MeshfillConnector, called as vLLM's scheduler and workers call it, against the fake server. Without vLLM."""

import importlib.util
import threading
import time
import unittest
from unittest import mock

import grpc
import numpy as np

import stub_vllm
from fake_server import Faults, SyntheticKv
from fixtures import ServerTest, expected, wait_until

stub_vllm.install()

from meshfill.vllm import MeshfillConnector, connector  # noqa: E402
from meshfill.vllm.connector import KVConnectorRole  # noqa: E402
from meshfill.vllm.pages import worker_part  # noqa: E402
from meshfill.vllm.pauses import Pauses  # noqa: E402
from meshfill.vllm.prefills import Prefills  # noqa: E402
from meshfill.vllm.settings import Settings, check_version  # noqa: E402
from meshfill.vllm.transfer import KvLoader  # noqa: E402
from stub_vllm import PAGE, Namespace, Request, Scheduler  # noqa: E402

connector.TorchPages = stub_vllm.NumpyPages
LOG = "vllm.meshfill"


class ConnectorTest(ServerTest):
    def start(self, tp=1, kv_heads=4, extra=None, model=None, **server_options):
        self.server = self.serve(part_tokens=50, **server_options)
        options = dict({"server": self.server.address, "min_tokens": 100, "retry_seconds": 0.0}, **(extra or {}))
        scheduler = Scheduler(MeshfillConnector, KVConnectorRole, options, tp=tp, kv_heads=kv_heads, **(model or {}))
        self.addCleanup(scheduler.close)
        return scheduler

    def check_pages(self, scheduler, request, heads_of_rank):
        """Every token but the last lies in its slot, of each layer and rank."""
        last = len(request.prompt_token_ids) - 1
        for rank, layers in enumerate(scheduler.layers):
            for number, layer in enumerate(layers.values()):
                of = [expected(number, range(last), heads_of_rank(rank), 8, is_v) for is_v in (False, True)]
                for token in range(request.cached, last):
                    k, v = layer.slots[request.block_ids[token // PAGE] * PAGE + token % PAGE]
                    np.testing.assert_array_equal(k, of[0][token])
                    np.testing.assert_array_equal(v, of[1][token])
                self.assertEqual(len(layer.slots), last - request.cached)

    def assert_released(self):
        wait_until(lambda: not self.server.leases)

    def test_a_long_prompt_is_loaded(self):
        scheduler = self.start()
        request = scheduler.run(scheduler.add(Request("r", [1] * 333, cache_salt="pepper", priority=2)))
        self.assertEqual(request.computed_from, 332)
        self.check_pages(scheduler, request, lambda rank: range(4))
        self.assert_released()
        header = self.server.calls[0][1]
        self.assertEqual((header.cache_salt, header.priority, header.kv.keep), ("pepper", -2, True))
        self.assertEqual(scheduler.config.kv_transfer_config.kv_load_failure_policy, "recompute")
        scheduler.finish(request)

    def test_a_short_prompt_never_touches_the_server(self):
        scheduler = self.start()
        short = scheduler.add(Request("short", [1] * 99))
        cached = scheduler.add(Request("cached", [1] * 333))
        cached.cached = 240
        scheduler.step()
        self.assertEqual((short.computed_from, cached.computed_from), (0, 240))
        self.assertEqual(self.server.calls, [])

    def test_longrope_of_prompts_that_vllm_takes_for_long(self):
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 300}
        for config, longest, to_meshfill in (
            (Namespace(rope_parameters=rope), 4096, (301, 302)),
            (Namespace(rope_parameters=rope, original_max_position_embeddings=300), 301, (301, 302)),
            (Namespace(rope_scaling={"type": "longrope"}, original_max_position_embeddings=300), 4096, (301, 302)),
            (Namespace(rope_parameters=rope), 300, (299, 300, 301, 302)),  # vLLM knows short ones alone
            (Namespace(rope_parameters={"rope_type": "yarn"}), 4096, (299, 300, 301, 302)),
            (Namespace(rope_parameters=None), 4096, (299, 300, 301, 302)),
        ):
            scheduler = self.start(model={"hf_text_config": config, "max_model_len": longest})
            for tokens in (299, 300, 301, 302):
                request = scheduler.run(scheduler.add(Request(str(tokens), [1] * tokens)))
                self.assertEqual(request.computed_from, tokens - 1 if tokens in to_meshfill else 0, (config, longest))

    def test_prompts_that_are_not_plain_tokens_are_left_alone(self):
        scheduler = self.start()
        for other in ({"lora_request": 1}, {"mm_features": [1]}, {"pooling_params": 1}, {"skip_reading_prefix_cache": True}):
            self.assertEqual(scheduler.run(scheduler.add(Request(str(other), [1] * 333, **other))).computed_from, 0)
        self.assertEqual(self.server.calls, [])

    def test_what_vllm_has_cached_is_not_loaded(self):
        scheduler = self.start()
        request = Request("r", [1] * 333)
        request.cached = 160
        scheduler.run(scheduler.add(request))
        self.assertEqual(request.computed_from, 332)
        self.check_pages(scheduler, request, lambda rank: range(4))
        fetch = next(asked for name, asked in self.server.calls if name == "FetchKv")
        self.assertEqual((fetch.first_token, fetch.tokens), (160, 172))

    def test_tensor_parallel_ranks_fetch_their_heads(self):
        for tp, kv_heads in ((2, 4), (4, 4), (4, 2)):
            scheduler = self.start(tp=tp, kv_heads=kv_heads, source=SyntheticKv(kv_heads=kv_heads))
            request = scheduler.run(scheduler.add(Request("r", [1] * 200)))
            self.assertEqual(request.computed_from, 199)
            local = max(1, kv_heads // tp)
            self.check_pages(scheduler, request, lambda rank: range(rank * kv_heads // tp, rank * kv_heads // tp + local))
            self.assert_released()

    def test_the_scheduler_never_waits(self):
        for _ in range(5):  # the machine may stand still in any attempt
            scheduler = self.start(faults=Faults(accept_seconds=0.5, layer_seconds=0.2))
            scheduler.computing = True
            request = scheduler.add(Request("r", [1] * 200))
            longest, deadline = 0.0, time.monotonic() + 20
            while request.state != "computed" and time.monotonic() < deadline:
                begin = time.monotonic()
                scheduler.step()
                longest = max(longest, time.monotonic() - begin)
                time.sleep(0.005)
            self.assertEqual(request.computed_from, 199)
            if longest < 0.2:
                return
        self.fail(f"a step took {longest:.3f} s")

    def test_loading_begins_before_the_prefill_has_ended(self):
        scheduler = self.start(faults=Faults(layer_seconds=0.3))
        request = scheduler.add(Request("r", [1] * 200))
        first = next(iter(scheduler.layers[0].values()))
        last = list(scheduler.layers[0].values())[-1]
        wait_until(lambda: scheduler.step() or first.slots)
        self.assertEqual(last.slots, {})
        scheduler.run(request)
        self.check_pages(scheduler, request, lambda rank: range(4))

    def test_a_prompt_that_waits_takes_no_load_from_one_that_runs(self):
        scheduler = self.start(faults=Faults(layer_seconds=30), extra={"loads": 1})
        waiting = scheduler.add(Request("waiting", [1] * 400))
        wait_until(lambda: scheduler.step() or self.server.leases)
        self.server.faults = Faults()
        self.assertEqual(scheduler.run(scheduler.add(Request("runs", [1] * 200))).computed_from, 199)
        self.assertEqual((waiting.state, self.server.count("FetchKv")), ("waiting", 1))
        scheduler.finish(waiting)
        self.assert_released()

    def test_of_a_prompt_in_pieces_loading_begins_with_the_last(self):
        scheduler = self.start(faults=Faults(pieces=3, layer_seconds=0.1))
        request = scheduler.add(Request("r", [1] * 200))
        wait_until(lambda: scheduler.step() or request.state != "waiting")
        (lease,) = self.server.leases.values()
        self.assertGreaterEqual(lease.layers_done, 1)
        scheduler.run(request)
        self.check_pages(scheduler, request, lambda rank: range(4))

    def test_a_load_has_the_time_that_its_prefill_has_left(self):
        scheduler = self.start(faults=Faults(layer_seconds=0.5), extra={"timeout_seconds": 50})
        request, loads, start = scheduler.add(Request("r", [1] * 200)), [], KvLoader.start
        with mock.patch.object(KvLoader, "start", lambda loader, load: loads.append(load) or start(loader, load)):
            scheduler.run(request)
        (load,) = loads
        self.assertGreater(49.6, load.timeout_seconds)
        self.assertGreater(load.timeout_seconds, 20)

    def test_a_load_without_time_fails(self):
        scheduler = self.start()
        with mock.patch.object(Prefills, "loading", lambda self, _: (next(iter(self._prefills.values())).lease, 0.0)):
            with self.assertLogs(LOG, "WARNING") as logs:
                self.assertEqual(scheduler.run(scheduler.add(Request("r", [1] * 200))).computed_from, 0)
        self.assertIn("Deadline", logs.output[0])

    def test_a_refused_prompt_is_computed_with_one_warning(self):
        scheduler = self.start(faults=Faults(refuse=(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), retry_seconds=5.0))
        with self.assertLogs(LOG, "WARNING") as logs:
            request = scheduler.run(scheduler.add(Request("r", [1] * 333)))
            for tokens in (333, 334):  # within the 5 s
                again = scheduler.run(scheduler.add(Request(f"again {tokens}", [1] * tokens)))
                self.assertEqual(again.computed_from, 0)
        self.assertEqual(request.computed_from, 0)
        self.assertEqual(len(logs.records), 1)
        self.assertEqual(self.server.count("Prefill"), 1)
        self.server.faults = Faults()
        self.assertEqual(scheduler.run(scheduler.add(Request("shorter", [1] * 332))).computed_from, 331)

    def test_a_server_that_is_away(self):
        scheduler = self.start(extra={"retry_seconds": 60.0})
        self.server.stop()
        with self.assertLogs(LOG, "WARNING") as logs:
            for name in ("one", "two", "three"):
                self.assertEqual(scheduler.run(scheduler.add(Request(name, [1] * 333))).computed_from, 0)
        self.assertEqual(len(logs.records), 1)

    def test_no_more_prompts_are_on_their_way_than_the_setting(self):
        scheduler = self.start(faults=Faults(layer_seconds=30), extra={"prefills": 2})
        requests = [scheduler.add(Request(f"r{i}", [1] * 200)) for i in range(4)]
        wait_until(lambda: scheduler.step() or len(self.server.live) == 2)
        for _ in range(20):
            scheduler.step()
        self.assertEqual(self.server.count("Prefill"), 2)
        self.server.faults = Faults()
        scheduler.finish(requests[0])
        for request in requests[2:]:
            self.assertEqual(scheduler.run(request).computed_from, 199)
        scheduler.finish(requests[1])
        self.assert_released()

    def test_a_prompt_that_is_held_for_too_long(self):
        scheduler = self.start(faults=Faults(layer_seconds=30), extra={"prefills": 1, "accept_timeout_seconds": 2.0})
        scheduler.add(Request("first", [1] * 200))
        wait_until(lambda: scheduler.step() or self.server.live)
        with self.assertLogs(LOG, "WARNING") as logs:
            self.assertEqual(scheduler.run(scheduler.add(Request("held", [1] * 200))).computed_from, 0)
        self.assertEqual(len(logs.records), 1)
        self.assertIn("1 prompts (prefills) were on their way", logs.output[0])
        cancelled = scheduler.add(Request("cancelled", [1] * 200))
        scheduler.step()
        scheduler.finish(cancelled)
        self.assertEqual(self.server.count("Prefill"), 1)

    def test_a_prompt_that_is_held_is_not_sent_to_a_server_that_is_full(self):
        scheduler = self.start(faults=Faults(layer_seconds=30), extra={"prefills": 2})
        first = scheduler.add(Request("first", [1] * 300))
        wait_until(lambda: scheduler.step() or self.server.live)
        self.server.faults = Faults(
            refuse=(grpc.StatusCode.RESOURCE_EXHAUSTED, "full"), retry_seconds=60.0, refuse_after=threading.Event()
        )
        refused, held = (scheduler.add(Request(name, [1] * 300)) for name in ("refused", "held"))
        scheduler.step()
        with self.assertLogs(LOG, "WARNING") as logs:
            self.server.faults.refuse_after.set()
            self.assertEqual([scheduler.run(request).computed_from for request in (refused, held)], [0, 0])
        self.assertEqual((len(logs.records), self.server.count("Prefill")), (1, 2))
        scheduler.finish(first)

    def test_a_server_that_does_not_accept_in_time(self):
        scheduler = self.start(faults=Faults(accept_seconds=30), extra={"accept_timeout_seconds": 2.0})
        with self.assertLogs(LOG, "WARNING") as logs:
            self.assertEqual(scheduler.run(scheduler.add(Request("r", [1] * 333))).computed_from, 0)
        self.assertEqual(len(logs.records), 1)
        wait_until(lambda: self.server.cancelled)

    def test_a_server_without_kv(self):
        scheduler = self.start(faults=Faults(no_lease=True))
        with self.assertLogs(LOG, "WARNING") as logs:
            self.assertEqual(scheduler.run(scheduler.add(Request("r", [1] * 333))).computed_from, 0)
        self.assertIn("too old", logs.output[0])

    def test_a_prefill_that_dies_midway(self):
        scheduler = self.start(faults=Faults(die_after_layers=2, layer_seconds=0.1))
        with self.assertLogs(LOG, "WARNING") as logs:
            request = scheduler.run(scheduler.add(Request("r", [1] * 333)))
        self.assertEqual(request.computed_from, 0)
        self.assertEqual(len(logs.records), 1, logs.output)

    def start_cached(self, tp, **faults):
        """A scheduler, and a request of which vLLM has 64 tokens."""
        scheduler = self.start(tp=tp, faults=Faults(**faults))
        request = Request("r", [1] * 333)
        request.cached = 64
        return scheduler, scheduler.add(request)

    def check_one_warning(self, logs, scheduler, request):
        """Also after everything has ended."""
        self.assertEqual(request.computed_from, 64)
        scheduler.finish(request)
        scheduler.step()
        scheduler.close()  # Waits for the threads.
        self.assertEqual(len(logs.records), 1, logs.output)

    def test_a_server_that_is_killed_before(self):
        for tp in (1, 2):
            scheduler, request = self.start_cached(tp)
            self.server.stop()
            with self.assertLogs(LOG, "WARNING") as logs:
                scheduler.run(request)
                self.check_one_warning(logs, scheduler, request)

    def test_a_server_that_is_killed_midway(self):
        for tp in (1, 2):
            scheduler, request = self.start_cached(tp, layer_seconds=0.3)
            first = next(iter(scheduler.layers[tp - 1].values()))
            wait_until(lambda: scheduler.step() or first.slots)
            with self.assertLogs(LOG, "WARNING") as logs:
                self.server.stop()
                scheduler.run(request)
                self.check_one_warning(logs, scheduler, request)

    def test_a_server_that_is_killed_after_the_prefill(self):
        for tp in (1, 2):
            scheduler, request = self.start_cached(tp, part_seconds=0.1)
            first = next(iter(scheduler.layers[tp - 1].values()))
            wait_until(lambda: scheduler.step() or first.slots and not self.server.live)
            self.assertEqual(list(scheduler.layers[0].values())[-1].slots, {})
            with self.assertLogs(LOG, "WARNING") as logs:
                self.server.stop()
                scheduler.run(request)
                self.check_one_warning(logs, scheduler, request)

    def test_a_bad_checksum(self):
        for tp in (1, 2):
            for faults in ({}, {"layer_seconds": 1.5}):  # also while the prefill runs, which is then cancelled
                scheduler, request = self.start_cached(tp, always_corrupt=True, **faults)
                with self.assertLogs(LOG, "WARNING") as logs:
                    scheduler.run(request)
                    self.assert_released()
                    self.check_one_warning(logs, scheduler, request)
                self.assertIn("CRC32C", logs.output[0])
                wait_until(lambda: len(self.server.cancelled) == int(bool(faults)))

    def test_the_loads_of_other_ranks_end_with_the_one_that_failed(self):
        scheduler = self.start(tp=2, faults=Faults(part_seconds=0.1, break_after_parts=[0] + [-1, 0, 0, 0, 0, 0]))
        request = scheduler.add(Request("r", [1] * 1999))
        with self.assertLogs(LOG, "WARNING") as logs:
            scheduler.run(request, seconds=8)  # whole, it would take 16 s: 40 parts of each of 4 layers
        self.assertEqual((request.computed_from, len(logs.records)), (0, 1))
        self.assert_released()

    def test_a_broken_stream_is_resumed_without_a_warning(self):
        scheduler = self.start(faults=Faults(break_after_parts=[9, 0, 3], corrupt_part=[-1, -1, -1, 2]))
        with mock.patch.object(connector.logger, "warning") as warning:
            request = scheduler.run(scheduler.add(Request("r", [1] * 333)))
        warning.assert_not_called()
        self.assertEqual(request.computed_from, 332)
        self.check_pages(scheduler, request, lambda rank: range(4))

    def test_another_model_is_noticed(self):
        for source in (SyntheticKv(layers=5), SyntheticKv(kv_heads=8), SyntheticKv(head_dim=16), SyntheticKv(layers=3)):
            scheduler = self.start(source=source)
            with self.assertLogs(LOG, "WARNING"):
                self.assertEqual(scheduler.run(scheduler.add(Request("r", [1] * 333))).computed_from, 0)

    def test_a_cancelled_request_cancels_its_prefill(self):
        for steps, faults in ((1, Faults(accept_seconds=30)), (None, Faults(layer_seconds=2))):
            scheduler = self.start(faults=faults)
            request = scheduler.add(Request("r", [1] * 333))
            scheduler.step()
            if steps is None:
                wait_until(lambda: scheduler.step() or request.state == "loading")
            else:
                wait_until(lambda: self.server.live)
            scheduler.finish(request)
            wait_until(lambda: scheduler.step() or (self.server.cancelled and not scheduler.requests))
            self.assert_released()

    def test_a_prefill_that_was_loaded_ends_by_itself(self):
        # K and V are there before the result. A server caches what has ended, and nothing that was cancelled.
        scheduler = self.start(faults=Faults(result_seconds=0.5))
        request = scheduler.run(scheduler.add(Request("r", [1] * 333)))
        self.assertEqual(request.computed_from, 332)
        scheduler.finish(request)
        wait_until(lambda: not self.server.live)
        self.assertEqual(self.server.cancelled, [])
        self.assert_released()

    def test_many_requests_at_once(self):
        scheduler = self.start(faults=Faults(layer_seconds=0.02), extra={"loads": 3})
        requests = [scheduler.add(Request(f"r{i}", [1] * (150 + i))) for i in range(12)]
        for request in requests:
            self.assertEqual(scheduler.run(request).computed_from, len(request.prompt_token_ids) - 1)
        self.assert_released()
        for request in requests:
            scheduler.finish(request)

    def test_the_lease_is_renewed_while_loading_takes_long(self):
        scheduler = self.start(extra={"lease_seconds": 1}, lease_grace_seconds=9)
        request = scheduler.add(Request("r", [1] * 333))
        scheduler.connector.get_num_new_matched_tokens(request, 0)
        wait_until(lambda: self.server.leases)

        def renewed():
            """vLLM has no room for the pages for a while: it asks, and does not allocate."""
            scheduler.connector.get_num_new_matched_tokens(request, 0)
            return self.server.count("RenewKv") >= 7

        wait_until(renewed, seconds=6)  # those that come late for a lease of a second take longer
        self.assertEqual(scheduler.run(request).computed_from, 332)


class PausesTest(unittest.TestCase):
    def test_those_that_are_at_least_as_long_wait(self):
        pauses = Pauses()
        pauses.add(20, 1000, now=0)
        self.assertEqual([pauses.holds(tokens, 19) for tokens in (999, 1000, 5000)], [False, True, True])
        self.assertFalse(pauses.holds(5000, 20))

    def test_a_pause_takes_nothing_from_another(self):
        pauses = Pauses()
        pauses.add(20, 1000, now=0)
        pauses.add(5, 10, now=1)
        pauses.add(5, 2000, now=1)
        pauses.add(0, 0, now=1)
        self.assertEqual([pauses.holds(tokens, 2) for tokens in (9, 10, 1000)], [False, True, True])
        self.assertEqual([pauses.holds(tokens, 7) for tokens in (10, 999, 1000, 2000)], [False, False, True, True])
        pauses.add(60, 500, now=7)
        self.assertEqual([pauses.holds(tokens, 30) for tokens in (499, 500, 1000)], [False, True, True])

    def test_a_server_is_obeyed_up_to_a_bound(self):
        pauses = Pauses()
        pauses.add(1e9, 0, now=0)
        self.assertEqual((pauses.holds(1, 599), pauses.holds(1, 600)), (True, False))


class WorkerPartTest(unittest.TestCase):
    def part(self, heads_of_layers, model_kv_heads, tp_size, tp_rank=0):
        layers = {number: stub_vllm.Layer(heads) for number, heads in enumerate(heads_of_layers)}
        shape = {"model_layers": 8, "model_kv_heads": model_kv_heads, "head_dim": 8, "dtype": "bf16"}
        return worker_part(layers, tp_rank=tp_rank, tp_size=tp_size, **shape)

    def test_heads_are_shared_out_among_the_ranks(self):
        for heads, model_kv_heads, tp_size, firsts in ((4, 4, 1, [0]), (2, 4, 2, [0, 2]), (1, 2, 4, [0, 0, 1, 1])):
            parts = [self.part([heads] * 3, model_kv_heads, tp_size, rank) for rank in range(tp_size)]
            self.assertEqual([part.first_head for part in parts], firsts)
            self.assertEqual({part.heads for part in parts}, {heads})

    def test_layers_with_other_heads_are_refused(self):
        for heads, model_kv_heads, tp_size in (([1, 1], 4, 2), ([4, 4], 4, 2), ([2, 2, 1], 4, 2), ([2, 4], 4, 2), ([2], 1, 1)):
            with self.assertRaisesRegex(RuntimeError, "KV heads on each"):
                self.part(heads, model_kv_heads, tp_size)


class ConfigurationTest(unittest.TestCase):
    def make(self, extra=None, **model):
        extra = {"server": "127.0.0.1:1"} if extra is None else extra
        return MeshfillConnector(stub_vllm.config(extra, **model), KVConnectorRole.WORKER, None)

    def test_versions(self):
        check_version("0.32.0", False)
        check_version("0.32.0+cpu", False)
        check_version("0.33.0", True)
        with self.assertRaisesRegex(RuntimeError, "allow_untested_vllm"):
            check_version("0.33.0", False)
        with mock.patch.object(connector.vllm, "__version__", "0.31.1"):
            with self.assertRaisesRegex(RuntimeError, "0.31.1"):
                self.make()
            self.make({"server": "127.0.0.1:1", "allow_untested_vllm": True}).shutdown()

    def test_a_vllm_whose_interface_is_another_one(self):
        spec = importlib.util.spec_from_file_location("meshfill.vllm.another", connector.__file__)
        with mock.patch.object(stub_vllm.base(), "KVConnectorTransferResults"):
            del stub_vllm.base().KVConnectorTransferResults
            with self.assertRaisesRegex(ImportError, "tested with vLLM 0.32.0, this is .*KVConnectorTransferResults"):
                spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_settings(self):
        self.assertEqual(Settings.parse({"server": "h:1"}).min_tokens, 8192)
        self.assertEqual(Settings.parse({"server": "h:1", "timeout_seconds": 5}).timeout_seconds, 5)
        for bad in (
            {},
            {"server": "h"},
            {"server": "h:1", "min_token": 5},
            {"server": "h:1", "min_tokens": "8192"},
            {"server": "h:1", "min_tokens": True},
            {"server": "h:1", "min_tokens": -1},
            {"server": "h:1", "tls": 1},
            {"server": "h:1", "tenant": 3},
        ):
            with self.assertRaises(ValueError, msg=str(bad)):
                Settings.parse(bad)

    def test_models_that_cannot_be_served(self):
        for model, word in (({"dtype": "torch.float16"}, "bfloat16"), ({"use_mla": True}, "MLA")):
            with self.assertRaisesRegex(RuntimeError, word):
                self.make(**model)
        two_groups = stub_vllm.Namespace(kv_cache_groups=[1, 2])
        with self.assertRaisesRegex(RuntimeError, "--disable-hybrid-kv-cache-manager"):
            MeshfillConnector(stub_vllm.config({"server": "h:1"}), KVConnectorRole.WORKER, two_groups)


if __name__ == "__main__":
    unittest.main()
