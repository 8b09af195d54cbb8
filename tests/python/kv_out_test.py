"""What FetchKv gives is what `meshfill prefill --kv-out` writes, byte for byte, read by NumPy alone."""

import random
import subprocess
import threading
import time
import unittest

import numpy as np

from meshfill.kv import KvShape
from real_server import BINARY, SECONDS, RealServerTest, read_safetensors

VOCAB, LAYERS, HEADS, KV_HEADS, DIM = 211, 3, 8, 4, 16


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


class KvOutTest(RealServerTest):
    def setUp(self):
        super().setUp()
        self.seed = random.randrange(2**32)
        self.draw = random.Random(self.seed)
        shape = {"layers": LAYERS, "hidden": 64, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "vocab": VOCAB}
        self.model = self.make_model("model", dtype="f32", **shape)

    def draw_plan(self, ranks: int) -> dict:
        heads = self.draw.choice([h for h in (1, 2, 4) if ranks % h == 0])
        a = self.draw.choice([a for a in range(1, ranks // heads + 1) if ranks // heads % a == 0])
        layout, stripe = self.draw.choice(["striped", "zigzag", "contiguous"]), self.draw.randint(1, 70)
        return {"heads": heads, "tile": (a, ranks // heads // a), "layout": layout, "stripe": stripe}

    def kv_out(self, arguments: list, ids: list, plan: dict):
        """[K, V], each [layers, tokens, kv_heads, head_dim], that `meshfill prefill` writes by this plan."""
        file = self.folder / "kv.safetensors"
        a, b = plan["tile"]
        command = [BINARY, "prefill", *arguments, "--tokens", "-", "--kv-out", file, "--heads", plan["heads"]]
        command += ["--tile", f"{a}x{b}", "--layout", plan["layout"], "--stripe", plan["stripe"]]
        subprocess.run(list(map(str, command)), input=" ".join(map(str, ids)).encode(), check=True, stdout=subprocess.DEVNULL,
                       timeout=SECONDS)
        tensors = read_safetensors(file)
        self.assertEqual(len(tensors), 2 * LAYERS)
        return [np.stack([tensors[f"layers.{layer}.{of}"] for layer in range(LAYERS)]) for of in "kv"]

    def draw_range(self, tokens: int) -> dict:
        layout = self.draw.choice(["tokens", "pages_hnd", "pages_nhd"])
        page = 0 if layout == "tokens" else self.draw.choice([1, 5, 16, 32])
        first_layer, first_head = self.draw.randrange(LAYERS), self.draw.randrange(KV_HEADS)
        first_token, count = self.draw.randrange(tokens), 0
        if page:
            first_token -= first_token % page
        if self.draw.random() < 0.7:
            count = self.draw.randint(1, tokens - first_token)
            if page:
                count -= count % page  # 0: to the end, whose last page is filled with zeros
        return {
            "layout": layout, "page_tokens": page, "first_token": first_token, "tokens": count,
            "first_layer": first_layer, "layers": self.draw.randint(1, LAYERS - first_layer),
            "first_head": first_head, "heads": self.draw.randint(1, KV_HEADS - first_head),
        }

    def check_range(self, client, manifest, written, wanted: dict):
        """Each element by the definition of its layout."""
        first, end = wanted["first_token"], wanted["first_token"] + wanted["tokens"]
        if not wanted["tokens"]:
            end = manifest.tokens
        layers = slice(wanted["first_layer"], wanted["first_layer"] + wanted["layers"])
        heads = slice(wanted["first_head"], wanted["first_head"] + wanted["heads"])
        k, v = (bits(values)[layers, first:end, heads] for values in written)
        fetched = client.fetch_kv_arrays(manifest, **wanted)
        if wanted["layout"] == "tokens":
            np.testing.assert_array_equal(bits(fetched.k), k)
            np.testing.assert_array_equal(bits(fetched.v), v)
            return
        page, rows = wanted["page_tokens"], np.concatenate([k, v], axis=3)
        pages = np.zeros((rows.shape[0], -(-rows.shape[1] // page), page, *rows.shape[2:]), rows.dtype)
        for token in range(rows.shape[1]):
            pages[:, token // page, token % page] = rows[:, token]
        if wanted["layout"] == "pages_hnd":
            pages = pages.swapaxes(2, 3)
        np.testing.assert_array_equal(bits(fetched.pages), pages)

    def check(self, client, ids: list, plan: dict, written):
        manifest = client.prefill(ids, keep_kv=True, ignore_cache=True, **plan).kv
        for _ in range(6):
            wanted = self.draw_range(len(ids))
            with self.subTest(wanted=wanted):
                self.check_range(client, manifest, written, wanted)
        client.release_kv(manifest)

    def draw_prompt(self) -> list:
        return [self.draw.randrange(VOCAB) for _ in range(self.draw.randint(1, 600))]

    def local(self, ranks: int, **settings) -> list:
        """Arguments of an embedded pool."""
        return self.settings(self.model, pool__embedded__ranks=ranks, pool__embedded__peak_flops="1e11", **settings)

    def test_embedded_pools_of_1_to_16_ranks(self):
        for ranks in range(1, 17):
            # The same dtype, and the same speeds: the same plan.
            alike = {"model__dtype": self.draw.choice(["f32", "bf16"]), "plan__profile_path": self.folder / f"speed{ranks}.json"}
            client = self.serve(self.model, ranks, **alike)
            plan, ids = self.draw_plan(ranks), self.draw_prompt()
            with self.subTest(seed=self.seed, ranks=ranks, dtype=alike["model__dtype"], tokens=len(ids), plan=plan):
                self.check(client, ids, plan, self.kv_out(self.local(ranks, **alike), ids, plan))

    def test_pools_of_workers(self):
        for workers in ((1,), (2, 1), (1, 1, 2), (3, 3)):
            client = self.serve_pool(self.model, workers)
            for _ in range(2):
                plan, ids = self.draw_plan(sum(workers)), self.draw_prompt()
                with self.subTest(seed=self.seed, workers=workers, tokens=len(ids), plan=plan):
                    written = self.kv_out(["--server", client.address], ids, plan)
                    self.check(client, ids, plan, written)
                    # Links of another speed may have another schedule, and so other last bits.
                    embedded = self.kv_out(self.local(sum(workers)), ids, plan)
                    for one, other in zip(written, embedded):
                        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)

    def test_the_first_layer_comes_before_the_third_is_computed(self):
        model = self.make_model("deep", dtype="f32", layers=12, hidden=64, heads=4, kv_heads=1, head_dim=16, vocab=VOCAB)
        client = self.serve(model, 2)
        shape = KvShape(tokens=8000, layers=12, kv_heads=1, head_dim=16, dtype="f32")
        ids = [self.draw.randrange(VOCAB) for _ in range(shape.tokens)]
        for _ in range(10):  # a busy machine may wake the reader late
            came, done = [], {}

            def read(accepted):
                def run():
                    came.extend(part.tokens for part in client.fetch_kv(accepted.kv_lease, shape=shape, layers=1))
                    done["first layer"] = time.monotonic()

                done["thread"] = threading.Thread(target=run)
                done["thread"].start()

            def on_progress(progress):
                if progress.layers_done >= 3:
                    done.setdefault("third layer", time.monotonic())

            client.prefill(ids, keep_kv=True, ignore_cache=True, on_accepted=read, on_progress=on_progress)
            done["thread"].join()
            self.assertEqual(sum(came), shape.tokens)
            if done["first layer"] < done["third layer"]:
                return
        self.fail("the first layer was never there before the third was computed")


if __name__ == "__main__":
    unittest.main()
