"""FetchKv: layouts, ranges, checksums, resumption, holders and leases."""

import asyncio
import gc
import random
import signal
import threading
import time
import unittest
from unittest import mock

import numpy as np

import fake_server
import meshfill
import meshfill.aio
from fake_server import FakeServer, Faults
from fixtures import ServerTest, bits, expected, wait_until, wait_until_async
from meshfill import kv as kv_module
from meshfill.channels import HOLDERS, Channels
from meshfill.cursor import FetchCursor
from meshfill.holders import holder_shares, rest_of, token_runs
from meshfill.kv import KvArrays, KvShape, make_range
from meshfill.leases import LeaseBook, Renewals
from meshfill.results import KvHolder, KvManifest
from meshfill.stubs import pb

TOKENS = 333
DIM = 8


class FetchTest(ServerTest):
    def setUp(self):
        self.server, self.client = self.pair(part_tokens=50)
        self.manifest = self.client.prefill([1] * TOKENS, keep_kv=True).kv

    def check_tokens(self, arrays, tokens=range(TOKENS), layers=range(4), heads=range(4)):
        for at, layer in enumerate(layers):
            for array, is_v in ((arrays.k, False), (arrays.v, True)):
                np.testing.assert_array_equal(bits(array[at]), expected(layer, tokens, heads, DIM, is_v))

    def test_the_manifest_tells_the_shape(self):
        shape = KvShape.of(self.manifest)
        self.assertEqual((shape.tokens, shape.layers, shape.kv_heads, shape.head_dim, shape.dtype), (TOKENS, 4, 4, DIM, "bf16"))
        self.assertEqual(self.manifest.block_hashes, (bytes(range(32)),) * (TOKENS // 16))

    def test_all_of_it(self):
        self.check_tokens(self.client.fetch_kv_arrays(self.manifest))

    def test_parts_come_in_order(self):
        at = [(part.layer, part.first_token) for part in self.client.fetch_kv(self.manifest)]
        self.assertEqual(at, sorted(at))
        self.assertEqual(len(at), 4 * 7)

    def test_random_ranges_in_all_layouts(self):
        draw = random.Random(5)
        for _ in range(60):
            first_token, first_layer, first_head = draw.randrange(TOKENS), draw.randrange(4), draw.randrange(4)
            tokens = draw.randint(1, TOKENS - first_token)
            layers, heads = draw.randint(1, 4 - first_layer), draw.randint(1, 4 - first_head)
            page = draw.choice([0, 1, 4, 16, 32])
            layout = draw.choice(["pages_hnd", "pages_nhd"]) if page else "tokens"
            if page:
                first_token -= first_token % page
                tokens = max(page, tokens - tokens % page) if first_token + page <= TOKENS else 0
                if draw.random() < 0.3 or first_token + tokens > TOKENS:
                    tokens = 0
            arrays = self.client.fetch_kv_arrays(
                self.manifest,
                first_token=first_token,
                tokens=tokens,
                first_layer=first_layer,
                layers=layers,
                first_head=first_head,
                heads=heads,
                layout=layout,
                page_tokens=page,
            )
            end = first_token + tokens if tokens else TOKENS
            with self.subTest(tokens=(first_token, end), layout=layout, page=page):
                if not page:
                    self.check_tokens(
                        arrays,
                        range(first_token, end),
                        range(first_layer, first_layer + layers),
                        range(first_head, first_head + heads),
                    )
                else:
                    self.check_pages(arrays.pages, layout, page, first_token, end, first_layer, first_head)

    def check_pages(self, pages, layout, page, first_token, end, first_layer, first_head):
        """Element by element from the definition: K beside V, the last page filled with zeros."""
        layers, count = pages.shape[:2]
        heads = pages.shape[2] if layout == "pages_hnd" else pages.shape[3]
        self.assertEqual(count, -(-(end - first_token) // page))
        self.assertEqual(pages.shape[4], 2 * DIM)
        draw = random.Random(end)
        for _ in range(40):
            l, p, t, h, d = (draw.randrange(size) for size in (layers, count, page, heads, 2 * DIM))
            got = bits(pages)[l, p, h, t, d] if layout == "pages_hnd" else bits(pages)[l, p, t, h, d]
            token = first_token + p * page + t
            want = 0
            if token < end:
                of = expected(first_layer + l, range(token, token + 1), range(first_head + h, first_head + h + 1), DIM, d >= DIM)
                want = of[0, 0, d % DIM]
            self.assertEqual(int(got), int(want))

    def test_ranges_outside_are_refused(self):
        for bad in (
            {"first_token": TOKENS},
            {"tokens": TOKENS + 1},
            {"first_layer": 4},
            {"layers": 5},
            {"first_head": 3, "heads": 2},
            {"first_token": -1},
            {"layout": "rows"},
            {"layout": "pages_hnd"},
            {"layout": "pages_nhd", "page_tokens": 16, "first_token": 8},
            {"layout": "pages_nhd", "page_tokens": 16, "tokens": 24},
            {"page_tokens": 16},
            {"tokens": 10.0},
            {"first_layer": "1"},
            {"layout": None},
            {"layout": "pages_hnd", "page_tokens": 16.0},
            {"timeout": "5"},
            {"timeout": -1},
        ):
            with self.assertRaises(ValueError, msg=str(bad)):
                self.client.fetch_kv(self.manifest, **bad)
        with self.assertRaises(ValueError):
            self.client.fetch_kv("a name without a shape")
        with self.assertRaises(ValueError):
            self.connect(self.server).fetch_kv(self.manifest.lease)  # another client's

    def test_a_name_is_enough_for_the_client_that_had_the_result(self):
        self.check_tokens(self.client.fetch_kv_arrays(self.manifest.lease))
        layers = {part.layer for part in self.client.fetch_kv(self.manifest.lease, layers=2)}
        self.assertEqual(layers, {0, 1})
        with self.client.lease(self.manifest.lease) as lease:
            self.check_tokens(self.client.fetch_kv_arrays(lease))

    def test_without_ml_dtypes_the_bits_are_uint16(self):
        with mock.patch.dict(kv_module.DTYPES, {"bf16": np.dtype(np.uint16)}):
            arrays = self.client.fetch_kv_arrays(self.manifest)
        self.assertEqual(arrays.k.dtype, np.uint16)
        self.check_tokens(arrays)

    def test_an_unknown_lease_is_not_found_and_not_asked_for_again(self):
        self.client.release_kv(self.manifest)
        self.client.release_kv(self.manifest)
        before = self.server.count("FetchKv")
        with self.assertRaises(meshfill.NotFoundError):
            self.client.fetch_kv_arrays(self.manifest)
        self.assertEqual(self.server.count("FetchKv"), before + 1)

    def test_a_broken_call_is_resumed_by_asking_for_the_rest(self):
        self.server.faults = Faults(break_after_parts=[9, 0, 3], corrupt_part=[-1, -1, -1, 2], end_after_parts=[-1] * 4 + [1])
        arrays = self.client.fetch_kv_arrays(self.manifest)
        self.check_tokens(arrays)
        asked = [request for name, request in self.server.calls if name == "FetchKv"]
        # Nine parts of 50 tokens are layer 0 (seven of them), and 100 tokens of layer 1.
        self.assertEqual((asked[1].first_layer, asked[1].first_token, asked[1].layers), (1, 100, 1))
        self.assertGreaterEqual(len(asked), 5)

    def test_a_fetch_that_stood_still_is_resumed(self):
        self.server.faults = Faults(cancel_after_parts=[9, 3])
        self.check_tokens(self.client.fetch_kv_arrays(self.manifest))
        asked = [request for name, request in self.server.calls if name == "FetchKv"]
        self.assertEqual((len(asked), asked[1].first_layer, asked[1].first_token), (4, 1, 100))

    def test_a_fetch_that_this_side_ends_is_not_asked_for_again(self):
        self.server.faults = Faults(part_seconds=0.05)
        for end in ("cancel", "close"):
            client = self.connect(self.server)
            before = self.server.count("FetchKv")
            fetch = client.fetch_kv(self.manifest)
            next(fetch)
            (fetch.cancel if end == "cancel" else client.close)()
            with self.subTest(end=end), self.assertRaises(meshfill.CancelledError):
                list(fetch)
            self.assertEqual(self.server.count("FetchKv"), before + 1)

    def test_a_fetch_whose_client_is_closed_between_two_calls_is_cancelled(self):
        self.server.faults = Faults(break_after_parts=[3])
        fetch = self.client.fetch_kv(self.manifest)
        with mock.patch.object(FetchCursor, "retry_delay", lambda *_: self.client.close() or 0.0):
            with self.assertRaisesRegex(meshfill.CancelledError, "this client is closed"):
                list(fetch)

    def test_pages_are_resumed_too(self):
        self.server.faults = Faults(break_after_parts=[2, 1], corrupt_part=[-1, -1, 0])
        arrays = self.client.fetch_kv_arrays(self.manifest, layout="pages_hnd", page_tokens=16)
        self.check_pages(arrays.pages, "pages_hnd", 16, 0, TOKENS, 0, 0)

    def test_a_bad_checksum_every_time_is_an_error(self):
        self.server.faults = Faults(always_corrupt=True)
        with self.assertRaises(meshfill.ChecksumError) as caught:
            self.client.fetch_kv_arrays(self.manifest, attempts=3)
        self.assertEqual(self.server.count("FetchKv"), 3)
        self.assertIn("CRC32C", str(caught.exception))

    def test_a_server_that_always_breaks_off_is_given_up(self):
        self.server.faults = Faults(break_after_parts=[0] * 10)
        with self.assertRaises(meshfill.UnavailableError):
            self.client.fetch_kv_arrays(self.manifest, attempts=3)
        self.assertEqual(self.server.count("FetchKv"), 3)

    def test_a_fetch_that_stands_still_to_the_end_says_why(self):
        self.server.faults = Faults(cancel_after_parts=[0] * 4)
        with self.assertRaisesRegex(meshfill.CancelledError, r"not read for longer than limits\.result_timeout"):
            self.client.fetch_kv_arrays(self.manifest)

    def test_a_dtype_of_a_newer_server_costs_no_result(self):
        self.server.manifest_dtype = "f8"
        result = self.client.prefill([1] * 50, keep_kv=True, lease_seconds=90)
        self.assertEqual((result.kv.dtype, result.first_token), ("f8", 50))
        for lease in (result.kv, result.kv.lease):
            with self.assertRaises(ValueError):
                self.client.fetch_kv(lease)
        with self.client.lease(result.kv.lease):
            wait_until(lambda: self.server.count("RenewKv"))

    def test_a_lease_of_another_shape_is_noticed(self):
        right = KvShape.of(self.manifest)
        for wrong in (
            KvShape(TOKENS, 3, 4, DIM, "bf16"),
            KvShape(TOKENS, 4, 3, DIM, "bf16"),
            KvShape(TOKENS, 4, 4, DIM * 2, "bf16"),
            KvShape(TOKENS, 4, 4, DIM, "f32"),
            KvShape(TOKENS - 50, 4, 4, DIM, "bf16"),
        ):
            with self.assertRaises(meshfill.MeshfillError, msg=f"{wrong} is not {right}"):
                self.client.fetch_kv_arrays(self.manifest.lease, shape=wrong, attempts=2)

    def test_layers_come_while_later_ones_are_computed(self):
        self.server.faults = Faults(layer_seconds=1)
        shape = KvShape(100, 4, 4, DIM, "bf16")
        seen = []

        def fetch(accepted):
            def run():
                for part in self.client.fetch_kv(accepted.kv_lease, shape=shape):
                    seen.append((part.layer, len(progress)))

            threads.append(threading.Thread(target=run))
            threads[0].start()

        threads, progress = [], []
        self.client.prefill([1] * 100, keep_kv=True, on_accepted=fetch, on_progress=progress.append)
        threads[0].join()
        self.assertLessEqual(next(done for layer, done in seen if layer == 0), 2)
        self.assertEqual({layer for layer, _ in seen}, {0, 1, 2, 3})

    def test_a_fetch_can_be_cancelled_from_another_thread(self):
        self.server.faults = Faults(layer_seconds=30)
        call = self.client.start_prefill([1] * 10, keep_kv=True)
        accepted = next(iter(call))
        fetch = self.client.fetch_kv(accepted.kv_lease, shape=KvShape(10, 4, 4, DIM, "bf16"))
        threading.Timer(0.2, fetch.cancel).start()
        with self.assertRaises(meshfill.CancelledError):
            list(fetch)
        call.cancel()

    def test_an_exception_ends_a_fetch_of_arrays_at_once(self):
        self.server.faults = Faults(part_seconds=1)
        begin_fetch, kept = self.client._fetch, []  # that it is kept does not keep it going

        def keep(*arguments):
            kept.append(begin_fetch(*arguments))
            return kept[0]

        with mock.patch.object(self.client, "_fetch", keep), mock.patch.object(KvArrays, "store", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                self.client.fetch_kv_arrays(self.manifest)
        wait_until(lambda: self.server.fetching == 0)

    def test_a_break_ends_a_fetch_at_once(self):
        self.server.faults = Faults(part_seconds=1)
        self.addCleanup(gc.enable)
        gc.disable()  # it may come late
        for _ in self.client.fetch_kv(self.manifest):
            break
        wait_until(lambda: self.server.fetching == 0)

    def test_the_timeout_is_for_all_of_a_fetch(self):
        self.server.faults = Faults(break_after_parts=[0] * 1000)
        begin = time.monotonic()
        with self.assertRaises(meshfill.MeshfillError):
            self.client.fetch_kv_arrays(self.manifest, attempts=1000, timeout=1)
        self.assertLess(time.monotonic() - begin, 5)


class LeaseTest(ServerTest):
    def test_a_lease_is_renewed_and_released(self):
        server, client = self.pair(lease_grace_seconds=9)
        result = client.prefill([1] * 20, keep_kv=True, lease_seconds=1)
        with client.lease(result.kv, seconds=1) as lease:
            wait_until(lambda: server.count("RenewKv") >= 7, seconds=6)  # those that come late for a lease of a second take longer
            self.assertIsNone(lease.lost)
            client.fetch_kv_arrays(lease)
        self.assertEqual(server.leases, {})

    def test_a_lease_is_never_renewed_for_less_than_its_prefill_gave(self):
        server, client = self.pair()
        for asked, renewed in ((0, 600), (20, 600), (700, 700)):
            for of in (lambda manifest: manifest, lambda manifest: manifest.lease):
                before = server.count("RenewKv")
                lease = of(client.prefill([1] * 20, keep_kv=True, lease_seconds=600).kv)
                with client.lease(lease, seconds=asked) as held:
                    wait_until(lambda: server.count("RenewKv") > before)
                    self.assertEqual(held.renew().expires_in_seconds, renewed)

    def test_a_lease_ends_while_the_server_does_not_answer(self):
        server, client = self.pair(faults=Faults(renew_seconds=60))
        manifest = client.prefill([1] * 20, keep_kv=True).kv
        begin = time.monotonic()
        with self.assertRaises(KeyError), client.lease(manifest) as lease:
            wait_until(lambda: server.count("RenewKv"))
            raise KeyError("mine")
        self.assertLess(time.monotonic() - begin, 5)
        self.assertIsNone(lease.lost)
        self.assertEqual(server.leases, {})

    def test_a_renewal_that_is_not_answered_is_tried_again(self):
        server, client = self.pair(faults=Faults(renew_seconds=60))
        manifest = client.prefill([1] * 20, keep_kv=True, lease_seconds=3).kv
        with client.lease(manifest) as lease:
            wait_until(lambda: server.count("RenewKv"))
            server.faults = Faults()
            wait_until(lambda: server.count("RenewKv") > 1, seconds=9)
            self.assertIsNone(lease.lost)

    def test_when_a_lease_is_renewed(self):
        renewals = Renewals(0)
        self.assertEqual((renewals.wait, renewals.timeout), (0, 10))
        for seconds, wait, timeout in ((600, 200, 10), (15, 5, 5), (0.5, 0.5 / 3, 1), (0.01, 0.05, 1)):
            renewals.renewed(seconds)
            self.assertEqual((renewals.wait, renewals.timeout), (wait, timeout))
        renewals.renewed(12)
        waits = [renewals.failed() or renewals.wait for _ in range(4)]
        self.assertEqual(waits, [1.0, 0.25, 0.0625, 0.05])

    def test_a_lapsed_lease_is_lost(self):
        server, client = self.pair()
        result = client.prefill([1] * 20, keep_kv=True)
        client.release_kv(result.kv)
        with client.lease(result.kv) as lease:
            wait_until(lambda: lease.lost is not None)
            self.assertIsInstance(lease.lost, meshfill.NotFoundError)
        with self.assertRaises(meshfill.NotFoundError):
            client.renew_kv(result.kv)

    def test_a_result_without_kv_is_no_lease(self):
        _, client = self.pair()
        with self.assertRaises(ValueError):
            client.lease(client.prefill([1]).kv)


class TenantTest(ServerTest):
    """The fake server knows a lease and a request under the tenant of the prefill alone, as the real one does."""

    def test_the_tenant_of_a_prefill_is_that_of_its_lease(self):
        server, client = self.pair(client={"tenant": "mine"}, lease_grace_seconds=9)
        theirs = client.prefill([1] * 50, tenant="theirs", keep_kv=True, lease_seconds=1).kv
        mine = client.prefill([1] * 60, keep_kv=True).kv
        nobodys = client.prefill([1] * 70, tenant="", keep_kv=True).kv
        for manifest, tokens in ((theirs, 50), (mine, 60), (nobodys, 70)):
            for lease in (manifest, manifest.lease):
                self.assertEqual(client.fetch_kv_arrays(lease).k.shape[1], tokens)
                self.assertEqual({part.layer for part in client.fetch_kv(lease)}, {0, 1, 2, 3})
                client.renew_kv(lease)
            with self.assertRaises(meshfill.NotFoundError):
                self.connect(server, tenant="other").fetch_kv_arrays(manifest)
            with client.lease(manifest):
                client.fetch_kv_arrays(manifest)
        self.assertEqual(server.leases, {})

    def test_it_is_known_from_the_first_event_on(self):
        server, client = self.pair(faults=Faults(layer_seconds=30))
        call = client.start_prefill([1] * 50, tenant="t", keep_kv=True)
        accepted = next(iter(call))
        client.renew_kv(accepted.kv_lease)
        client.cancel(accepted.request_id)
        wait_until(lambda: server.cancelled)
        named = client.start_prefill([1], tenant="t", request_id="named")
        wait_until(lambda: "named" in server.live)
        client.cancel("named")
        with self.assertRaises(meshfill.CancelledError):
            list(named)

    def test_holders_are_told_it_too(self):
        server, client = self.pair()
        holder = self.serve(leader=server, holder_runs=(0, 1000, 1000))
        server.holders.append(pb.KvHolder(address=holder.address, layers=4, heads=4, run_tokens=1000))
        client.fetch_kv_arrays(client.prefill([1] * 50, tenant="t", keep_kv=True).kv)
        self.assertEqual((server.count("FetchKv"), holder.count("FetchKv")), (0, 1))

    def test_no_more_is_remembered_than_the_bound(self):
        book = LeaseBook("mine", bound=3)
        for name in "abcd":
            book.begin(name, "t")
            book.tenant_of_request("a")
        self.assertEqual([book.tenant_of_request(name) for name in "abcd"], ["t", "mine", "t", "t"])


class HoldersTest(ServerTest):
    def make(self, tokens=1000, stripe=64, ranks=3, **faults_of_one):
        """A front-end and `ranks` holders, striped."""
        server, client = self.pair(part_tokens=100)
        holders = []
        for rank in range(ranks):
            faults = Faults(**faults_of_one) if rank == 1 else Faults()
            holder = self.serve(leader=server, holder_runs=(rank * stripe, stripe, ranks * stripe), faults=faults)
            holders.append(holder)
            server.holders.append(
                pb.KvHolder(
                    address=holder.address,
                    layers=4,
                    heads=4,
                    first_token=rank * stripe,
                    run_tokens=stripe,
                    step_tokens=ranks * stripe,
                )
            )
        return server, client, holders, client.prefill([1] * tokens, keep_kv=True).kv

    def check(self, arrays, first, end, heads=range(4)):
        for layer in range(4):
            np.testing.assert_array_equal(bits(arrays.k[layer]), expected(layer, range(first, end), heads, DIM, False))
            np.testing.assert_array_equal(bits(arrays.v[layer]), expected(layer, range(first, end), heads, DIM, True))

    def test_holders_are_read_directly(self):
        server, client, holders, manifest = self.make()
        self.check(client.fetch_kv_arrays(manifest, first_token=70, tokens=700, first_head=1, heads=2), 70, 770, range(1, 3))
        self.assertEqual(server.count("FetchKv"), 0)
        self.assertEqual([holder.count("FetchKv") for holder in holders], [1, 1, 1])
        self.check(client.fetch_kv_arrays(manifest, from_holders=False), 0, 1000)
        self.assertEqual(server.count("FetchKv"), 1)

    def test_pages_that_lie_whole_on_holders(self):
        server, client, _, manifest = self.make()
        direct = client.fetch_kv_arrays(manifest, layout="pages_hnd", page_tokens=32)
        self.assertEqual(server.count("FetchKv"), 0)
        through = client.fetch_kv_arrays(manifest, layout="pages_hnd", page_tokens=32, from_holders=False)
        np.testing.assert_array_equal(bits(direct.pages), bits(through.pages))
        client.fetch_kv_arrays(manifest, layout="pages_hnd", page_tokens=128)
        self.assertEqual(server.count("FetchKv"), 2)

    def test_a_holder_that_dies_is_replaced_by_the_front_end(self):
        server, client, holders, manifest = self.make(break_after_parts=[9] + [0] * 9)
        with self.assertLogs("meshfill", "WARNING"):
            self.check(client.fetch_kv_arrays(manifest), 0, 1000)
        self.assertEqual(server.count("FetchKv"), 1)

    def test_a_holder_that_is_away_is_replaced_by_the_front_end(self):
        server, client, holders, manifest = self.make()
        holders[2].stop()
        with self.assertLogs("meshfill", "WARNING"):
            self.check(client.fetch_kv_arrays(manifest), 0, 1000)

    def test_the_front_end_gives_everything_once_at_most(self):
        server, client, holders, manifest = self.make(ranks=6)
        for holder in holders:
            holder.stop()

        async def fetch():
            async with meshfill.aio.Client(server.address) as other:
                return await other.fetch_kv_arrays(manifest)

        for fetch_all in (lambda: client.fetch_kv_arrays(manifest), lambda: asyncio.run(fetch())):
            server.fetched_bytes = 0
            with self.assertLogs("meshfill", "WARNING") as logs:
                arrays = fetch_all()
            self.check(arrays, 0, 1000)
            self.assertEqual(server.fetched_bytes, arrays.k.nbytes + arrays.v.nbytes)
            self.assertEqual(len(logs.records), 1)

    def test_the_front_end_gives_no_layer_that_is_whole(self):
        # The second holder, which has five stripes, breaks off in layer 3. The others have ended before.
        server, client, holders, manifest = self.make()
        holders[1].faults = Faults(part_seconds=0.05, break_after_parts=[3 * 5 + 1, 0])
        part = holders[1]._part

        def part_after_the_others(*arguments):
            wait_until(lambda: all(holder.count("FetchKv") and not holder.fetching for holder in (holders[0], holders[2])))
            return part(*arguments)

        holders[1]._part = part_after_the_others
        with self.assertLogs("meshfill", "WARNING"):
            arrays = client.fetch_kv_arrays(manifest)
        self.check(arrays, 0, 1000)
        self.assertEqual(server.fetched_bytes, (arrays.k.nbytes + arrays.v.nbytes) // 4)

    def test_what_is_left_of_holders_of_layers(self):
        wanted = make_range(KvShape(100, 4, 4, DIM, "bf16"), first_token=10, first_layer=1)
        parts = [make_range(wanted.shape, first_token=10, first_layer=layer, layers=1) for layer in (1, 2, 3)]
        cursors = [FetchCursor("l", part) for part in parts]
        self.assertEqual(rest_of(wanted, cursors), wanted)
        cursors[0]._advance(90)
        cursors[2]._advance(90)
        self.assertEqual(rest_of(wanted, cursors), make_range(wanted.shape, first_token=10, first_layer=2))
        cursors[1]._advance(90)
        self.assertIsNone(rest_of(wanted, cursors))

    def test_a_share_that_fails_ends_the_others_at_once(self):
        server, client, holders, manifest = self.make()
        server.faults = Faults(refuse_fetches=True)
        holders[2].stop()
        for holder in holders[:2]:
            holder.faults = Faults(part_seconds=1)
        begin = time.monotonic()
        with self.assertLogs("meshfill", "WARNING") as logs, self.assertRaises(meshfill.NotFoundError):
            client.fetch_kv_arrays(manifest)
        self.assertLess(time.monotonic() - begin, 8)  # the others would take 20 s
        self.assertEqual(len(logs.records), 1)  # they do not turn to the front-end

    def test_an_interrupt_ends_all_shares_at_once(self):
        # Ignored where a shell has started the tests in the background.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        _, client, holders, manifest = self.make()
        for holder in holders:
            holder.faults = Faults(part_seconds=1)
        timer = threading.Timer(0.5, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        begin = time.monotonic()
        timer.start()
        with self.assertRaises(KeyboardInterrupt):
            client.fetch_kv_arrays(manifest)
        self.assertLess(time.monotonic() - begin, 8)

    def test_a_close_ends_all_shares_at_once(self):
        server, client, holders, manifest = self.make()
        for holder in holders:
            holder.faults = Faults(part_seconds=1)
        threading.Timer(0.5, client.close).start()
        begin = time.monotonic()
        with self.assertRaises(meshfill.CancelledError):
            client.fetch_kv_arrays(manifest)
        self.assertLess(time.monotonic() - begin, 8)
        self.assertEqual(server.count("FetchKv"), 0)

    def test_runs(self):
        holder = KvHolder("h", 0, 4, 0, 4, 64, 64, 192)
        self.assertEqual(token_runs(holder, 0, 500, 460), [(64, 128), (256, 320), (448, 460)])
        self.assertEqual(token_runs(holder, 100, 300, 460), [(100, 128), (256, 300)])
        self.assertEqual(token_runs(KvHolder("h", 0, 4, 0, 4, 10, 30, 0), 0, 500, 35), [(10, 35)])
        self.assertEqual(token_runs(KvHolder("h", 0, 4, 0, 4, 0, 64, 64), 5, 500, 460), [(5, 460)])

    def test_runs_never_go_back(self):
        with self.assertRaisesRegex(meshfill.InvalidArgumentError, "steps of -64 tokens"):
            token_runs(KvHolder("h", 0, 4, 0, 4, 0, 64, -64), 0, 500, 460)

    def test_ranks_of_one_process_are_one_share(self):
        entries = [(0, 64, 256), (64, 64, 256), (192, 64, 256)]  # ranks 0, 1 and 3 of 4
        holders = tuple(KvHolder("one", 0, 4, 0, 4, *entry) for entry in entries)
        holders += (KvHolder("other", 0, 4, 0, 4, 128, 64, 256),)
        manifest = KvManifest("l", 30, 600, 4, 4, DIM, "bf16", 0, 16, (), holders)
        wanted = make_range(KvShape.of(manifest), first_token=10, tokens=500)
        shares = holder_shares(manifest, wanted)
        self.assertEqual([share.address for share in shares], ["one", "other"])
        self.assertEqual(shares[0].runs, ((10, 128), (192, 384), (448, 510)))
        self.assertEqual(shares[1].runs, ((128, 192), (384, 448)))

    def test_random_holders_share_a_range_exactly(self):
        draw = random.Random(11)
        for _ in range(200):
            ranks, stripe, tokens = draw.randint(1, 6), draw.choice([16, 64, 100]), draw.randint(1, 2000)
            holders = tuple(KvHolder(f"h{i}", 0, 4, 0, 4, i * stripe, stripe, ranks * stripe) for i in range(ranks))
            manifest = KvManifest("l", 30, tokens, 4, 4, DIM, "bf16", 0, 16, (), holders)
            first = draw.randrange(tokens)
            wanted = make_range(KvShape.of(manifest), first_token=first, tokens=draw.randint(1, tokens - first))
            covered = [t for share in holder_shares(manifest, wanted) for low, high in share.runs for t in range(low, high)]
            self.assertEqual(sorted(covered), list(range(wanted.first_token, wanted.end_token)))

    def test_holders_that_lack_something_are_not_read(self):
        shape = {"tokens": 100, "layers": 4, "kv_heads": 4, "head_dim": DIM, "dtype": "bf16"}
        for holders in (
            (),
            (KvHolder("", 0, 4, 0, 4, 0, 100, 0),),
            (KvHolder("h", 0, 3, 0, 4, 0, 100, 0),),
            (KvHolder("h", 0, 4, 0, 4, 0, 50, 100),),
            # As many elements as are wanted, and yet not each once: 10 tokens are twice here, 10 nowhere.
            (KvHolder("g", 0, 4, 0, 4, 0, 60, 0), KvHolder("h", 0, 4, 0, 4, 50, 40, 0)),
            (KvHolder("g", 0, 4, 0, 4, 0, 50, 0), KvHolder("h", 0, 4, 0, 4, 0, 50, 0)),
            # The same of layers, and of heads.
            (KvHolder("g", 0, 3, 0, 4, 0, 100, 0), KvHolder("h", 2, 1, 0, 4, 0, 100, 0)),
            (KvHolder("g", 0, 4, 0, 2, 0, 100, 0), KvHolder("h", 0, 4, 1, 2, 0, 100, 0)),
            (KvHolder("g", 1, 3, 0, 4, 0, 100, 0), KvHolder("h", 3, 1, 0, 4, 0, 100, 0)),
        ):
            manifest = KvManifest("l", 30, bytes=0, block_tokens=16, block_hashes=(), holders=holders, **shape)
            self.assertEqual(holder_shares(manifest, make_range(KvShape(**shape))), [])


    def test_holders_of_layers_and_heads_are_read(self):
        shape = {"tokens": 100, "layers": 4, "kv_heads": 4, "head_dim": DIM, "dtype": "bf16"}
        parts = [(0, 1, 0, 4, 0, 100, 0), (1, 3, 0, 1, 0, 100, 0), (1, 3, 1, 3, 0, 30, 0), (1, 3, 1, 3, 30, 70, 0)]
        holders = tuple(KvHolder(f"h{i}", *part) for i, part in enumerate(parts))
        manifest = KvManifest("l", 30, bytes=0, block_tokens=16, block_hashes=(), holders=holders, **shape)
        for wanted, asked in (({}, 4), ({"layers": 1}, 1), ({"first_layer": 1, "first_head": 1}, 2), ({"tokens": 20}, 3)):
            shares = holder_shares(manifest, make_range(KvShape(**shape), **wanted))
            self.assertEqual(len(shares), asked, wanted)


class ChannelsTest(unittest.TestCase):
    """Connections to holders; channels are their addresses here."""

    def setUp(self):
        self.opened = []
        connection = mock.Mock()
        connection.open = lambda address, _: self.opened.append(address) or FakeChannel(address)
        self.channels = Channels(connection, "front-end", None)

    def names(self, channels):
        return [channel.address for channel in channels]

    def use(self, address):
        self.channels.hold(address)
        self.channels.streams(address)
        return self.names(self.channels.release(address))

    def test_those_used_last_stay(self):
        closed = [address for i in range(HOLDERS + 3) for address in self.use(f"h{i}") + self.use("h0")]
        self.assertEqual(closed, ["h1", "h2", "h3"])
        self.assertEqual(self.opened.count("h0"), 1)
        self.channels.streams("front-end")
        self.channels.calls()
        self.assertEqual(self.opened[:2] + self.opened[2:].count("front-end") * ["again"], ["front-end"] * 2)
        self.assertEqual(len(self.channels.close()), 2 + HOLDERS)

    def test_those_in_use_stay(self):
        addresses = [f"h{i}" for i in range(HOLDERS + 5)]
        for address in addresses:
            self.channels.hold(address)
            self.channels.streams(address)
        self.assertEqual(self.use("h0"), [])  # is held still
        self.assertEqual(self.names(self.channels.release("h7")), ["h7"])
        self.assertEqual(self.names(self.channels.release("h9")), ["h9"])

    def test_all_are_closed(self):
        self.use("h")
        self.assertEqual(self.names(self.channels.close()), ["front-end", "front-end", "h"])
        for call in (self.channels.calls, lambda: self.channels.streams("front-end"), lambda: self.channels.streams("h")):
            with self.assertRaises(meshfill.CancelledError):
                call()


class FakeChannel:
    def __init__(self, address):
        self.address = address

    def __getattr__(self, name):
        return lambda *_, **__: None


class CursorTest(unittest.TestCase):
    def test_how_long_it_waits_between_two_calls(self):
        def delay(retry_after, breaks=1):
            cursor = FetchCursor("l", make_range(KvShape(100, 2, 1, DIM, "bf16")), attempts=99)
            return [cursor.retry_delay(meshfill.UnavailableError("away", retry_after=retry_after)) for _ in range(breaks)][-1]

        for retry_after, breaks, least in ((None, 1, 0.1), (None, 3, 0.4), (None, 20, 2), (5, 1, 5), (5000, 1, 60), (0, 1, 0)):
            delays = {delay(retry_after, breaks) for _ in range(20)}
            self.assertTrue(all(least <= seconds <= least * 1.25 for seconds in delays), delays)
            self.assertEqual(len(delays) > 1, least > 0)  # they do not come together

    def test_parts_out_of_order_are_refused(self):
        fetched = make_range(KvShape(100, 2, 1, DIM, "bf16"))
        for layer, first, tokens in ((1, 0, 10), (0, 10, 10), (0, 0, 101), (0, 0, 0)):
            cursor = FetchCursor("l", fetched)
            cursor.next_request()
            with self.assertRaises(meshfill.DataLossError):
                cursor.accept(pb.KvPart(layer=layer, first_token=first, tokens=tokens))

    def test_nothing_is_asked_twice_at_a_layers_end(self):
        server = FakeServer(part_tokens=50)
        self.addCleanup(server.stop)
        server.faults = Faults(break_after_parts=[2])
        with meshfill.Client(server.address) as client:
            manifest = client.prefill([1] * 100, keep_kv=True).kv
            client.fetch_kv_arrays(manifest)
        asked = [request for name, request in server.calls if name == "FetchKv"]
        self.assertEqual([(request.first_layer, request.first_token) for request in asked], [(0, 0), (1, 0)])


class AsyncTest(unittest.TestCase):
    def test_the_asyncio_client_does_the_same(self):
        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                seen = []
                result = await client.prefill([1] * 200, keep_kv=True, lease_seconds=1, on_progress=seen.append)
                self.assertEqual((len(seen), result.first_token), (4, 200))
                server.faults = Faults(break_after_parts=[3, 0, 5], corrupt_part=[-1, -1, 0])
                async with client.lease(result.kv, seconds=1) as lease:
                    arrays = await client.fetch_kv_arrays(lease)
                    for layer in range(4):
                        np.testing.assert_array_equal(bits(arrays.k[layer]), expected(layer, range(200), range(4), DIM, False))
                    before = server.count("RenewKv")
                    # Those that come late for a lease of a second take longer.
                    await wait_until_async(lambda: server.count("RenewKv") >= before + 7, seconds=6)
                    parts = [part async for part in client.fetch_kv(lease, first_layer=2, layers=1)]
                    self.assertEqual({part.layer for part in parts}, {2})
                    server.faults = Faults(cancel_after_parts=[3, 0])
                    before = server.count("FetchKv")
                    self.assertEqual(len([part async for part in client.fetch_kv(lease)]), 4 * 4)
                    self.assertEqual(server.count("FetchKv"), before + 4)
                self.assertEqual(server.leases, {})
                with self.assertRaises(meshfill.NotFoundError):
                    await client.renew_kv(result.kv)
                self.assertEqual((await client.plan(1000)).plan.ranks, 4)
                self.assertEqual((await client.pool()).state, "ready")
                server.faults = Faults(layer_seconds=30)
                task = asyncio.ensure_future(client.prefill([1], request_id="long"))
                await wait_until_async(lambda: "long" in server.live)
                await client.cancel("long")
                with self.assertRaises(meshfill.CancelledError):
                    await task

        with FakeServer(part_tokens=60, lease_grace_seconds=9) as server:
            asyncio.run(run(server))

    def test_a_lease_ends_while_the_server_does_not_answer(self):
        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                manifest = (await client.prefill([1] * 50, keep_kv=True, lease_seconds=600)).kv
                begin = time.monotonic()
                async with client.lease(manifest) as lease:
                    await wait_until_async(lambda: server.count("RenewKv"))
                self.assertLess(time.monotonic() - begin, 5)
                self.assertIsNone(lease.lost)
                self.assertEqual(next(request.seconds for name, request in server.calls if name == "RenewKv"), 600)

        with FakeServer(faults=Faults(renew_seconds=60)) as server:
            asyncio.run(run(server))

    def test_the_tenant_of_a_prefill_is_that_of_its_lease(self):
        async def run(server):
            async with meshfill.aio.Client(server.address, tenant="mine") as client:
                manifest = (await client.prefill([1] * 50, tenant="theirs", keep_kv=True)).kv
                for lease in (manifest, manifest.lease):
                    self.assertEqual((await client.fetch_kv_arrays(lease)).k.shape[1], 50)
                    self.assertEqual({part.layer async for part in client.fetch_kv(lease)}, {0, 1, 2, 3})
                    await client.renew_kv(lease)
                async with client.lease(manifest.lease) as lease:
                    await client.fetch_kv_arrays(lease)
                self.assertEqual(server.leases, {})
                server.faults = Faults(layer_seconds=30)
                task = asyncio.ensure_future(client.prefill([1], tenant="theirs", request_id="long"))
                while "long" not in server.live:
                    await asyncio.sleep(0.01)
                await client.cancel("long")
                with self.assertRaises(meshfill.CancelledError):
                    await task

        with FakeServer() as server:
            asyncio.run(run(server))

    def test_a_fetch_whose_client_is_closed_between_two_calls_is_cancelled(self):
        async def run(server):
            client = meshfill.aio.Client(server.address)
            manifest = (await client.prefill([1] * 100, keep_kv=True)).kv
            server.faults = Faults(break_after_parts=[3])
            closing = []

            def delay(*_):
                closing.append(asyncio.ensure_future(client.close()))
                return 0.1

            with mock.patch.object(FetchCursor, "retry_delay", delay):
                with self.assertRaisesRegex(meshfill.CancelledError, "this client is closed"):
                    await client.fetch_kv_arrays(manifest)
            await closing[0]

        with FakeServer() as server:
            asyncio.run(run(server))

    def test_holders(self):
        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                manifest = (await client.prefill([1] * 300, keep_kv=True)).kv
                arrays = await client.fetch_kv_arrays(manifest)
                np.testing.assert_array_equal(bits(arrays.v[3]), expected(3, range(300), range(4), DIM, True))

        with FakeServer() as server:
            one = FakeServer(leader=server, holder_runs=(0, 50, 100))
            two = FakeServer(leader=server, holder_runs=(50, 50, 100))
            with one, two:
                for holder, first in ((one, 0), (two, 50)):
                    server.holders.append(
                        pb.KvHolder(address=holder.address, layers=4, heads=4, first_token=first, run_tokens=50, step_tokens=100)
                    )
                asyncio.run(run(server))
                self.assertEqual((server.count("FetchKv"), one.count("FetchKv"), two.count("FetchKv")), (0, 1, 1))


if __name__ == "__main__":
    unittest.main()
