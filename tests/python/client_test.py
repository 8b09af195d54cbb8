"""Prefill, plan, pool, cancel and errors of meshfill.Client."""

import asyncio
import contextlib
import inspect
import io
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from unittest import mock

import grpc
import numpy as np

import meshfill
import meshfill.aio
from fake_server import FakeServer, Faults
from fixtures import ServerTest, wait_until, wait_until_async
from meshfill.channel import Connection
from meshfill.messages import CHUNK_TOKENS, PrefillOptions, RangeOptions, prefill_requests, token_array
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
        self.assertLessEqual(max(message.ByteSize() for message in messages), 64 << 10)  # the least limits.max_message_bytes
        self.assertEqual(len(messages), 1 + -(-len(ids) // CHUNK_TOKENS))
        server, client = self.pair()
        self.assertEqual(client.prefill(np.arange(200_000) % 7).tokens, 200_000)

    def test_bad_arguments_are_refused_before_anything_is_sent(self):
        server, client = self.pair()
        for bad in ([], [-1], [1 << 32], [0.5], [[1]], "text without a tokenizer", None, 5, {1, 2}, b"abc"):
            with self.assertRaises(ValueError, msg=repr(bad)):
                client.prefill(bad)
        for options in (
            {"tile": "2"},
            {"tile": (1, 2, 3)},
            {"tile": (1.5, 2)},
            {"tile": (-1, 2)},
            {"tile": 2},
            {"layout": "round"},
            {"layout": 1},
            {"heads": 1.5},
            {"stripe": "64"},
            {"request_id": 5},
            {"cache_salt": b"salt"},
            {"tenant": 5},
            {"tenant": "équipe"},  # no header can carry it
            {"priority": 0.5},
            {"top_k": None},
            {"top_k": 1 << 32},
            {"keep_kv": True, "lease_seconds": 1.5},
            {"keep_kv": True, "lease_seconds": -1},
            {"lease_seconds": 60},  # of nothing
            {"timeout": "5"},
            {"timeout": -5},
            {"timeout": float("nan")},
        ):
            with self.assertRaises(ValueError, msg=str(options)):
                client.prefill([1], **options)
        for call in (
            lambda: client.plan(2.5),
            lambda: client.plan(0),
            lambda: client.plan("10"),
            lambda: client.plan(10, timeout="5"),
            lambda: client.pool(timeout=-1),
            lambda: client.cancel(5),
            lambda: client.renew_kv("lease", 2.5),
            lambda: client.lease("lease", seconds=2.5),
        ):
            with self.assertRaises(ValueError):
                call()
        self.assertEqual(server.calls, [])

    def test_numbers_of_numpy_are_whole_numbers(self):
        server, client = self.pair()
        client.prefill([1], top_k=np.int32(3), tile=np.array([1, 2]), timeout=np.float32(60))
        header = server.calls[0][1]
        self.assertEqual((header.top_k, header.plan.tile.a, header.plan.tile.b), (3, 1, 2))

    def test_options_are_those_of_start_prefill(self):
        parameters = dict(inspect.signature(meshfill.Client.start_prefill).parameters)
        self.assertEqual(set(PrefillOptions.__annotations__), set(parameters) - {"self", "prompt"})
        parameters = dict(inspect.signature(meshfill.Client.fetch_kv).parameters)
        self.assertEqual(set(RangeOptions.__annotations__), set(parameters) - {"self", "lease", "shape", "attempts", "timeout"})

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
        self.assertIsInstance(caught.exception.__cause__, grpc.RpcError)
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

    def test_the_example_of_the_readme_runs(self):
        text = (pathlib.Path(__file__).parent.parent.parent / "python" / "README.md").read_text(encoding="utf-8")
        code = textwrap.dedent(text[text.index("    import meshfill\n") : text.index("\n`fetch_kv`")])
        server, asked = self.serve(), []
        compute = server.source.compute
        server.source.compute = lambda ids: asked.append(max(ids)) or compute(ids)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code.replace("127.0.0.1:50051", server.address), {})
        self.assertIn("(4, 5000, 4, 8)", out.getvalue())
        self.assertLess(asked[0], 256)  # the vocabulary of `make-model`

    def test_a_state_of_a_newer_server_is_shown_as_its_number(self):
        server, client = self.pair()
        server.state = 9
        self.assertEqual(client.pool().state, "9")

    def test_calls_pass_while_streams_wait(self):
        server, client = self.pair(faults=Faults(layer_seconds=30), max_streams=4)
        calls = [client.start_prefill([1], request_id=f"r{i}", keep_kv=True) for i in range(4)]
        leases = [next(iter(call)).kv_lease for call in calls]
        calls += [client.start_prefill([1], request_id=f"r{i}") for i in (4, 5)]  # these wait
        self.assertEqual(client.pool(timeout=9).state, "ready")
        client.renew_kv(leases[0], timeout=9)
        self.assertEqual(set(server.live), {"r0", "r1", "r2", "r3"})
        client.cancel("r0", timeout=9)
        wait_until(lambda: {"r4", "r5"} & set(server.live))
        for call in calls:
            call.cancel()

    def test_a_call_that_begins_while_the_client_is_closed_is_cancelled(self):
        server = self.serve()
        for call in (lambda client: client.pool(), lambda client: client.prefill([1])):
            client = self.connect(server)
            begin = client._channels.begin
            with mock.patch.object(client._channels, "begin", lambda *args: client.close() or begin(*args)):
                with self.assertRaisesRegex(meshfill.CancelledError, "this client is closed"):
                    call(client)

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


class RefusedUploadTest(ServerTest):
    """A server that refuses a prompt at its header: whoever sends it is still sending."""

    IDS = np.full(1_000_000, 100_000, np.uint32)
    TRIES = 15

    def setUp(self):
        refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        self.server = self.serve(faults=Faults(refuse=refuse, retry_seconds=2.5))

    def check(self, error):
        self.assertEqual((error.message, error.retry_after), (f"server {self.server.address}: the queue is full", 2.5))

    def test_the_blocking_client_tells_why(self):
        client = self.connect(self.server)
        for _ in range(self.TRIES):
            with self.assertRaises(meshfill.ResourceExhaustedError) as caught:
                client.prefill(self.IDS)
            self.check(caught.exception)

    def test_the_asyncio_client_tells_why(self):
        async def run():
            async with meshfill.aio.Client(self.server.address) as client:
                for _ in range(self.TRIES):
                    with self.assertRaises(meshfill.ResourceExhaustedError) as caught:
                        await client.prefill(self.IDS)
                    self.check(caught.exception)

        asyncio.run(run())


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

    def test_what_ends_a_prefill(self):
        async def run(server):
            server.faults = Faults(layer_seconds=30)
            client = meshfill.aio.Client(server.address)
            # Its task.
            task = asyncio.ensure_future(client.prefill([1], request_id="a task"))
            await wait_until_async(lambda: "a task" in server.live)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await wait_until_async(lambda: server.cancelled == ["a task"])
            # An iterator that is closed.
            events = client.prefill_events([1], request_id="an iterator")
            self.assertEqual((await events.__anext__()).request_id, "an iterator")
            await events.aclose()
            await wait_until_async(lambda: server.cancelled[1:] == ["an iterator"])
            # An exception of a callback.
            with self.assertRaises(ZeroDivisionError):
                await client.prefill([1], request_id="a callback", on_accepted=lambda _: 1 / 0)
            await wait_until_async(lambda: server.cancelled[2:] == ["a callback"])
            # Its timeout.
            with self.assertRaises(meshfill.DeadlineExceededError):
                await client.prefill([1], request_id="a timeout", timeout=1)
            # The client's end.
            task = asyncio.ensure_future(client.prefill([1], request_id="a close"))
            await wait_until_async(lambda: "a close" in server.live)
            await client.close()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await wait_until_async(lambda: server.cancelled[-1] == "a close")

        with FakeServer() as server:
            asyncio.run(run(server))

    def test_bad_arguments_are_value_errors(self):
        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                for call in (
                    lambda: client.prefill(None),
                    lambda: client.prefill([1], tenant="équipe"),
                    lambda: client.prefill([1], timeout="5"),
                    lambda: client.plan(2.5),
                    lambda: client.renew_kv("lease", 2.5),
                    lambda: client.cancel(5),
                ):
                    with self.assertRaises(ValueError):
                        await call()
            self.assertEqual(server.calls, [])

        with FakeServer() as server:
            asyncio.run(run(server))

    def test_calls_pass_while_streams_wait(self):
        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                tasks = [asyncio.ensure_future(client.prefill([1], request_id=f"r{i}")) for i in range(6)]
                await wait_until_async(lambda: len(server.live) == 4)
                self.assertEqual((await client.pool(timeout=9)).state, "ready")
                await client.cancel(server.live[0], timeout=9)
                await wait_until_async(lambda: len(server.live) == 4 and server.cancelled)
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        with FakeServer(faults=Faults(layer_seconds=30), max_streams=4) as server:
            asyncio.run(run(server))

    def test_text_becomes_ids_beside_the_event_loop(self):
        class SlowTokenizer:
            def encode(self, text):
                began.set()
                self.done = time_out.wait(10)
                return [1, 2, 3]

        async def run(server):
            async with meshfill.aio.Client(server.address) as client:
                client._blocking._tokenizer = tokenizer
                task = asyncio.ensure_future(client.prefill("text"))
                await wait_until_async(began.is_set)  # the loop runs on
                time_out.set()
                self.assertEqual((await task).tokens, 3)
                self.assertTrue(tokenizer.done)

        began, time_out, tokenizer = threading.Event(), threading.Event(), SlowTokenizer()
        with FakeServer() as server:
            asyncio.run(run(server))

    def test_it_is_there_without_an_import_of_its_own(self):
        code = "import meshfill, sys; assert 'meshfill.aio' not in sys.modules; meshfill.aio.Client; meshfill.nothing"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertIn("AttributeError: module 'meshfill' has no attribute 'nothing'", done.stderr)


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

    def test_space_around_a_token_is_not_sent(self):
        server = self.serve(token="secret")
        self.assertEqual(self.connect(server, token="secret\n").pool().state, "ready")
        open_server = self.serve()
        self.assertEqual(self.connect(open_server, token="\n").pool().state, "ready")

    def test_what_cannot_be_sent_as_a_header_is_refused_by_name(self):
        for module in (meshfill, meshfill.aio):
            for name, bad in (
                ("token", "two\nlines"),
                ("token", "ключ"),
                ("token", 5),
                ("tenant", "équipe"),
                ("tenant", None),
                ("metadata", [("X-Upper", "a")]),
                ("metadata", [("x-number", 1)]),
                ("metadata", [("x-text-bin", "text")]),
                ("metadata", ["ab", "c"]),
                ("metadata", [("x-line", "a\n")]),
            ):
                with self.assertRaisesRegex(ValueError, name, msg=str(bad)) as caught:
                    module.Client("127.0.0.1:1", **{name: bad})
                self.assertNotIn("lines", str(caught.exception))
            for name, bad in (("model", 5), ("timeout", "5"), ("timeout", -1)):
                with self.assertRaisesRegex(ValueError, name):
                    module.Client("127.0.0.1:1", **{name: bad})

    def test_secrets_are_not_shown(self):
        shown = repr(Connection(client_certificate=b"certificate", client_key=b"key-secret", token="token-secret"))
        self.assertNotIn("secret", shown)

    def test_an_empty_certificate_is_no_plain_text(self):
        with tempfile.NamedTemporaryFile() as empty:
            for source in (b"", b" \n", empty.name):
                with self.assertRaisesRegex(ValueError, "root_certificates is empty"):
                    meshfill.Client("127.0.0.1:1", root_certificates=source, token="secret")
                with self.assertRaisesRegex(ValueError, "client_key is empty"):
                    meshfill.Client("127.0.0.1:1", client_certificate=b"pem", client_key=source)
        with self.assertRaises(FileNotFoundError):
            meshfill.Client("127.0.0.1:1", root_certificates="")

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
            for wrong in ({"tls": True}, {"root_certificates": certificate, "server_name": "another"}):
                with self.assertRaisesRegex(meshfill.UnavailableError, "root_certificates, server_name") as caught:
                    self.connect(server, client_certificate=certificate, client_key=key, **wrong).pool()
                self.assertNotIn("listening there", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
