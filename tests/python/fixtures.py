"""What several tests of this folder need."""

import asyncio
import time
import unittest

import numpy as np

import fake_server
import meshfill


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of bf16 values, whichever dtype they have."""
    return array.view(np.uint16)


def expected(layer: int, tokens: range, heads: range, head_dim: int, is_v: bool) -> np.ndarray:
    """[tokens, heads, head_dim], uint16: what SyntheticKv has, element by element formula."""
    return fake_server.synthetic_bits(layer, np.asarray(tokens), np.asarray(heads), head_dim, is_v)


def wait_until(condition, seconds: float = 10.0) -> None:
    """AssertionError: it did not become true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain")
        time.sleep(0.005)


async def wait_until_async(condition, seconds: float = 10.0) -> None:
    """The same, while other tasks run."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain")
        await asyncio.sleep(0.005)


class ServerTest(unittest.TestCase):
    """A fake server and a client of it."""

    def serve(self, **options) -> fake_server.FakeServer:
        server = fake_server.FakeServer(**options)
        self.addCleanup(server.stop)
        return server

    def connect(self, server, **options) -> meshfill.Client:
        client = meshfill.Client(server.address, **options)
        self.addCleanup(client.close)
        return client

    def pair(self, *, client=None, **options):
        server = self.serve(**options)
        return server, self.connect(server, **(client or {}))
