"""A decoder that knows nothing of Meshfill but a model's folder goes on from fetched K and V, in double precision."""

import random
import unittest

import numpy as np

from real_server import RealServerTest, read_safetensors

VOCAB, LAYERS, THETA, NORM_EPS = 97, 3, 10000.0, 1e-6
DECODED = 32
TOLERANCE = 1e-4  # of a logit: the server computes in f32


class Decoder:
    """A Llama, one token at a time. keys, values: by layer, [tokens, kv_heads, head_dim]."""

    def __init__(self, model, keys, values):
        self.weights = {name: tensor.astype(np.float64) for name, tensor in read_safetensors(model / "model.safetensors").items()}
        self.keys = [np.asarray(k, np.float64) for k in keys]
        self.values = [np.asarray(v, np.float64) for v in values]

    def weight(self, name: str) -> np.ndarray:
        return self.weights[name + ".weight"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + NORM_EPS) * self.weight(name)

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """x: [heads, head_dim]. Its halves turn by the position (RoFormer, section 3.4.2, halves for pairs)."""
        half = x.shape[1] // 2
        angles = position * THETA ** (-np.arange(half) / half)
        low, high = x[:, :half], x[:, half:]
        return np.concatenate([low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], 1)

    def step(self, token: int) -> np.ndarray:
        """The logits behind one more token: [vocab]."""
        x = self.weight("model.embed_tokens")[token]
        for layer in range(LAYERS):
            prefix = f"model.layers.{layer}."
            position, heads, dim = self.keys[layer].shape
            normed = self.norm(x, prefix + "input_layernorm")
            q, k, v = ((self.weight(f"{prefix}self_attn.{of}_proj") @ normed).reshape(-1, dim) for of in "qkv")
            self.keys[layer] = np.concatenate([self.keys[layer], self.rotated(k, position)[None]])
            self.values[layer] = np.concatenate([self.values[layer], v[None]])
            q = self.rotated(q, position).reshape(heads, -1, dim)  # the query heads of each KV head
            scores = np.einsum("hgd,thd->hgt", q, self.keys[layer]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            attended = np.einsum("hgt,thd->hgd", weights, self.values[layer]).reshape(-1)
            x = x + self.weight(prefix + "self_attn.o_proj") @ attended
            normed = self.norm(x, prefix + "post_attention_layernorm")
            gate = self.weight(prefix + "mlp.gate_proj") @ normed
            up = self.weight(prefix + "mlp.up_proj") @ normed
            x = x + self.weight(prefix + "mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
        return self.weight("lm_head") @ self.norm(x, "model.norm")


class DecoderTest(RealServerTest):
    def check(self, draw: random.Random, pool: tuple, layout: str):
        """pool: ranks of each worker; one number is an embedded pool."""
        heads, kv_heads, dim = draw.choice([(4, 2, 8), (6, 2, 16), (4, 4, 12), (5, 1, 8)])
        model = self.make_model(f"model{draw.random()}", layers=LAYERS, hidden=48, heads=heads, kv_heads=kv_heads, head_dim=dim,
                                vocab=VOCAB, dtype="f32", context=4096, rope_theta=THETA, seed=draw.randrange(1000))
        settings = {"plan__layout": "striped", "plan__stripe": 16}
        client = self.serve(model, pool[0], **settings) if len(pool) == 1 else self.serve_pool(model, pool, **settings)
        ids = [draw.randrange(VOCAB) for _ in range(draw.randint(150, 400))]
        # What is fetched was computed in two runs, where the planner finds that faster: whole stripes of the ranks of the first.
        ran = client.prefill(ids[:130]).plan
        result = client.prefill(ids, keep_kv=True)
        self.assertEqual(result.cached_tokens % (16 * ran.ranks), 0)
        with client.lease(result.kv) as lease:
            if layout == "tokens":
                arrays = client.fetch_kv_arrays(lease)
                keys, values = arrays.k, arrays.v
            else:
                pages = client.fetch_kv_arrays(lease, layout=layout, page_tokens=32).pages
                if layout == "pages_hnd":
                    pages = pages.swapaxes(2, 3)
                tokens = pages.reshape(LAYERS, -1, kv_heads, 2 * dim)[:, : len(ids)]  # K beside V
                keys, values = tokens[..., :dim], tokens[..., dim:]
        decoder = Decoder(model, keys, values)
        token = result.first_token
        for step in range(DECODED):
            ids.append(token)
            decoded = decoder.step(token)
            longer = client.prefill(ids, return_logits=True, ignore_cache=True)
            np.testing.assert_allclose(decoded, longer.logits, rtol=0, atol=TOLERANCE, err_msg=f"step {step}")
            token = longer.first_token
            if int(np.argmax(decoded)) != token:  # two tokens are as good as each other
                self.assertLess(decoded.max() - decoded[token], TOLERANCE, f"step {step}")

    def test_32_tokens_are_as_behind_a_prefill_of_the_longer_prompt(self):
        for pool, layout in (((1,), "tokens"), ((4,), "pages_hnd"), ((3,), "pages_nhd"), ((2, 1), "tokens")):
            seed = random.randrange(2**32)
            with self.subTest(seed=seed, pool=pool, layout=layout):
                self.check(random.Random(seed), pool, layout)


if __name__ == "__main__":
    unittest.main()
