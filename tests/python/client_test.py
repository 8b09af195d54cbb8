"""Prefill, plan, pool, cancel and errors of meshfill.Client."""

import asyncio
import subprocess
import tempfile
import threading
import unittest

import grpc
import numpy as np

import meshfill
import meshfill.aio
from fake_server import FakeServer, Faults
from fixtures import ServerTest, wait_until
from meshfill.messages import CHUNK_TOKENS, prefill_requests, token_array
from meshfill.results import Step
from meshfill.stubs import pb


class PrefillTest(ServerTest):
    def test_events_come_in_order_and_the_result_has_everything(self):
        server, client = self.pair()
        seen = []
        result = client.prefill(
            [1, 2, 3],
            request_id="one",
            top_k=2,
            return_logits=True,
            tile="2x2",
            layout="zigzag",
            stripe=32,
            priority=-3,
            tenant="t",
            cache_salt="s",
            ignore_cache=True,
            on_accepted=seen.append,
            on_progress=seen.append,
        )
        self.assertEqual([type(event) for event in seen], [meshfill.Accepted] + [meshfill.Progress] * 4)
        self.assertEqual((result.first_token, result.tokens, result.request_id), (6, 3, "one"))
        self.assertEqual(result.top, ((6, 1.5),))
        self.assertEqual(result.logits.tolist(), [0.5, -1.0, 2.0])
        self.assertIsNone(result.kv)
        header = server.calls[0][1]
        self.assertEqual((header.top_k, header.priority, header.tenant, header.cache_salt), (2, -3, "t", "s"))
        self.assertEqual((header.plan.tile.a, header.plan.tile.b, header.plan.stripe), (2, 2, 32))
        self.assertEqual(header.plan.layout, pb.LAYOUT_ZIGZAG)
        self.assertTrue(header.kv.ignore_cache and not header.kv.keep)

    def test_a_long_prompt_goes_in_chunks_below_the_message_limit(self):
        ids = np.full(1_000_000, 0xFFFFFFFF, np.uint32)
        messages = list(prefill_requests(pb.PrefillHeader(token_count=len(ids)), ids))
        self.assertEqual(sum(len(message.tokens.ids) for message in messages), len(ids))
        self.assertLess(max(message.ByteSize() for message in messages), 4 << 20)
        self.assertEqual(len(messages), 1 + -(-len(ids) // CHUNK_TOKENS))
        server, client = self.pair()
        self.assertEqual(client.prefill(np.arange(200_000) % 7).tokens, 200_000)

    def test_bad_arguments_are_refused_before_anything_is_sent(self):
        server, client = self.pair()
        for bad in ([], [-1], [1 << 32], [0.5], [[1]], "text without a tokenizer"):
            with self.assertRaises(ValueError):
                client.prefill(bad)
        for options in ({"tile": "2"}, {"tile": (1, 2, 3)}, {"layout": "round"}):
            with self.assertRaises(ValueError):
                client.prefill([1], **options)
        self.assertEqual(server.calls, [])

    def test_ids_of_every_kind_are_taken(self):
        for ids in ([1, 2], (1, 2), range(1, 3), iter([1, 2]), np.array([1, 2], np.int64)):
            self.assertEqual(token_array(ids).tolist(), [1, 2])

    def test_an_error_has_its_class_message_and_retry_delay(self):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        server, client = self.pair(faults=Faults(refuse=(code, "the queue\nis full"), retry_seconds=2.5))
        with self.assertRaises(meshfill.ResourceExhaustedError) as caught:
            client.prefill([1])
        self.assertEqual((caught.exception.code, caught.exception.retry_after), (code, 2.5))
        self.assertEqual(caught.exception.message, f"server {server.address}: the queue is full")
        for code in grpc.StatusCode:
            if code == grpc.StatusCode.OK:
                continue
            server.faults = Faults(refuse=(code, "no"))
            with self.assertRaises(meshfill.MeshfillError) as caught:
                client.prefill([1])
            self.assertEqual((caught.exception.code, caught.exception.retry_after), (code, None))

    def test_a_server_that_is_away_is_unavailable(self):
        with meshfill.Client("127.0.0.1:1") as client:
            with self.assertRaises(meshfill.UnavailableError) as caught:
                client.pool()
        self.assertIn("is `meshfill serve` listening there?", str(caught.exception))

    def test_the_timeout_ends_a_prefill(self):
        server, client = self.pair(faults=Faults(layer_seconds=30))
        with self.assertRaises(meshfill.DeadlineExceededError):
            client.prefill([1], timeout=2)
        wait_until(lambda: server.cancelled)

    def test_an_exception_in_a_callback_cancels_the_prefill(self):
        server, client = self.pair(faults=Faults(layer_seconds=30))

        def fail(_):
            raise KeyError("mine")

        with self.assertRaises(KeyError):
            client.prefill([1], on_accepted=fail)
        wait_until(lambda: server.cancelled)

    def test_cancel_ends_a_prefill_by_its_id(self):
        server, client = self.pair(faults=Faults(layer_seconds=30))
        failed = []

        def run():
            try:
                client.prefill([1], request_id="long", on_accepted=lambda _: accepted.set())
            except meshfill.CancelledError as error:
                failed.append(error)

        accepted = threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        accepted.wait(10)
        client.cancel("long")
        thread.join(10)
        self.assertEqual(len(failed), 1)
        with self.assertRaises(meshfill.NotFoundError):
            client.cancel("long")

    def test_plan_and_pool(self):
        _, client = self.pair()
        plan = client.plan(20_000, tile=(2, 2))
        self.assertEqual((plan.plan.layout, plan.plan.ranks, plan.predicted.seconds), ("striped", 4, 2.0))
        self.assertEqual(plan.steps, (Step("kv", ((0, 1),)), Step("q", ((1, 1),), spans=2)))
        self.assertEqual(plan.candidates[0].layout, "zigzag")
        pool = client.pool()
        self.assertEqual((pool.state, pool.model, pool.workers[0].first_rank), ("ready", "fake", -1))
        (request,) = pool.requests
        self.assertEqual((request.id, request.tenant, request.phase), ("long", "team", "paused"))
        self.assertEqual((request.tokens, request.layers_done), (65536, 3))

    def test_a_closed_client_refuses_every_call(self):
        server, client = self.pair()
        manifest = client.prefill([1] * 50, keep_kv=True).kv
        before = len(server.calls)
        client.close()
        client.close()
        for call in (
            lambda: client.prefill([1]),
            lambda: client.cancel("one"),
            lambda: client.plan(100),
            client.pool,
            lambda: client.renew_kv(manifest),
            lambda: client.release_kv(manifest),
            lambda: client.fetch_kv(manifest),
            lambda: client.fetch_kv_arrays(manifest),
        ):
            with self.assertRaisesRegex(meshfill.CancelledError, "this client is closed"):
                call()
        self.assertEqual(len(server.calls), before)


class AsyncClientTest(unittest.TestCase):
    def test_it_has_what_the_blocking_one_has_but_start_prefill(self):
        def public(cls):
            return {name for name in vars(cls) if not name.startswith("_")}

        self.assertEqual(public(meshfill.Client) - {"start_prefill"}, public(meshfill.aio.Client) - {"prefill_events"})

    def test_a_closed_client_refuses_every_call(self):
        async def run(server):
            client = meshfill.aio.Client(server.address)
            manifest = (await client.prefill([1] * 50, keep_kv=True)).kv
            before = len(server.calls)
            await client.close()
            await client.close()
            for call in (
                lambda: client.prefill([1]),
                lambda: client.cancel("one"),
                lambda: client.plan(100),
                client.pool,
                lambda: client.renew_kv(manifest),
                lambda: client.release_kv(manifest),
                lambda: client.fetch_kv(manifest).__anext__(),
                lambda: client.fetch_kv_arrays(manifest),
            ):
                with self.assertRaisesRegex(meshfill.CancelledError, "this client is closed"):
                    await call()
            self.assertEqual(len(server.calls), before)

        with FakeServer() as server:
            asyncio.run(run(server))


class ConnectionTest(ServerTest):
    def test_the_token_goes_with_every_call(self):
        server = self.serve(token="secret")
        client = self.connect(server, token="secret")
        client.pool()
        result = client.prefill([1] * 50, keep_kv=True)
        client.fetch_kv_arrays(result.kv)
        client.renew_kv(result.kv)
        client.release_kv(result.kv)
        with self.assertRaises(meshfill.UnauthenticatedError):
            self.connect(server).pool()

    def test_tls_with_client_certificates(self):
        with tempfile.TemporaryDirectory() as folder:
            key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
            command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
            command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
            try:
                subprocess.run(command, check=True, capture_output=True)
            except FileNotFoundError:
                self.skipTest("needs openssl")
            with open(key, "rb") as file:
                key_bytes = file.read()
            with open(certificate, "rb") as file:
                certificate_bytes = file.read()
            credentials = grpc.ssl_server_credentials(
                [(key_bytes, certificate_bytes)], root_certificates=certificate_bytes, require_client_auth=True
            )
            server = self.serve(credentials=credentials)
            options = {"root_certificates": certificate, "server_name": "localhost"}
            client = self.connect(server, client_certificate=certificate, client_key=key_bytes, **options)
            self.assertEqual(client.pool().model, "fake")
            with self.assertRaises(meshfill.UnavailableError):
                self.connect(server, **options).pool()
            with self.assertRaises(ValueError):
                meshfill.Client(server.address, client_key=key)


if __name__ == "__main__":
    unittest.main()
