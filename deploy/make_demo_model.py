#!/usr/bin/env python3
"""Writes a small Llama that goes on as the prompt itself went on before: a Hugging Face folder of 2 MB, made by hand, not trained.

Usage: make_demo_model.py OUT    OUT must not be there

A token is a byte. The model looks for the places where the prompt's last 4 bytes stood before, and answers what followed
them. So a demo shows text, and a search in the prompt says what the answer must be (`continuation`).

Layer 0 looks back: head h looks h + 1 bytes back, by RoPE's fast pairs alone. Their phases make the sum of cosines largest at
that distance. Layer 1 looks for the same bytes: its queries hold the last 4 bytes, its keys the 4 bytes before a place, both
in RoPE's slow pairs, which hardly turn within a million tokens. Its values are the byte at the place. MLPs are zero.

The residual has the parts ONE (always 1), CODE (of the byte, a random unit vector), KEY (the sum of the 4 bytes before it),
QUERY (the last 4 bytes, but the byte itself), and ANSWER. A byte's distance in KEY and QUERY is told by a permutation of its
code, so that the sum keeps the order.
"""
import json
import math
import pathlib
import random
import struct
import sys

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 256, 4, 4, 128, 1 << 20
BYTES = 4  # that must agree
SIZE = 64  # of a code
ONE, CODE, KEY, QUERY, ANSWER = 0, 1, 1 + SIZE, 1 + 2 * SIZE, 1 + 3 * SIZE
ANSWERED = HIDDEN - ANSWER  # so many numbers of a code
THETA = 1e12
FAST, SLOW = range(24), range(HEAD_DIM // 2 - SIZE // 2, HEAD_DIM // 2)  # pairs of RoPE
LOOK_BACK, MATCH, LOGIT = 14.0, 10.0, 4.0  # sharpness: of a distance, of each byte that agrees, of the answer


def codes(chance):
    for _ in range(256):
        vector = [chance.gauss(0, 1) for _ in range(SIZE)]
        length = math.sqrt(sum(each * each for each in vector))
        yield [each / length for each in vector]


def permutation(chance):
    """[(place, sign)] of each number of a code."""
    return list(zip(chance.sample(range(SIZE), SIZE), (chance.choice((-1, 1)) for _ in range(SIZE))))


def slow_place(number):
    """Where the slow pairs have number 0 … SIZE - 1."""
    return SLOW[number % len(SLOW)] + (HEAD_DIM // 2 if number >= len(SLOW) else 0)


class Matrix:
    """[rows, columns], zero but for what is set."""

    def __init__(self, rows, columns):
        self.shape, self.rows = [rows, columns], [[0.0] * columns for _ in range(rows)]

    def add(self, row, column, value):
        self.rows[row][column] += value

    def data(self):
        return bf16(value for row in self.rows for value in row)


def bf16(values):
    """Rounded to nearest."""
    words = struct.unpack("<%dI" % (len(listed := list(values))), struct.pack("<%df" % len(listed), *listed))
    return struct.pack("<%dH" % len(words), *((word + 0x7FFF + (word >> 16 & 1)) >> 16 for word in words))


def tensors():
    """{name: (shape, bytes)}"""
    chance = random.Random(1)
    code = list(codes(chance))
    turns = [permutation(chance) for _ in range(BYTES)]  # of a byte that is 1, 2, … back from where an answer is looked for
    embed, head = Matrix(256, HIDDEN), Matrix(256, HIDDEN)
    for byte, vector in enumerate(code):
        embed.add(byte, ONE, 1)
        for place, value in enumerate(vector):
            embed.add(byte, CODE + place, value)
            if place < ANSWERED:
                head.add(byte, ANSWER + place, LOGIT * value)
    made = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    for layer in range(2):
        q, k = Matrix(HEADS * HEAD_DIM, HIDDEN), Matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        v, o = Matrix(KV_HEADS * HEAD_DIM, HIDDEN), Matrix(HIDDEN, HEADS * HEAD_DIM)
        (look_back if layer == 0 else look_for)(q, k, v, o, turns)
        name = f"model.layers.{layer}."
        made |= {name + f"self_attn.{which}_proj.weight": each for which, each in zip("qkvo", (q, k, v, o))}
        made |= {name + f"mlp.{which}_proj.weight": Matrix(*shape) for which, shape in
                 (("gate", (SIZE, HIDDEN)), ("up", (SIZE, HIDDEN)), ("down", (HIDDEN, SIZE)))}
    found = {name: (matrix.shape, matrix.data()) for name, matrix in made.items()}
    norms = ["model.norm"] + [f"model.layers.{layer}.{which}_layernorm" for layer in range(2) for which in ("input", "post_attention")]
    return found | {f"{name}.weight": ([HIDDEN], bf16([1.0] * HIDDEN)) for name in norms}


def scale(squares):
    """What RMSNorm multiplies a residual by, whose squares add up to this."""
    return math.sqrt(HIDDEN / squares)


def look_back(q, k, v, o, turns):
    root = math.sqrt(LOOK_BACK * math.sqrt(HEAD_DIM)) / scale(2)  # ONE and CODE
    for pair in FAST:
        angle = THETA ** (-2 * pair / HEAD_DIM)
        for head in range(HEADS):
            back = (head + 1) * angle
            q.add(head * HEAD_DIM + pair, ONE, root * math.cos(back))
            q.add(head * HEAD_DIM + pair + HEAD_DIM // 2, ONE, -root * math.sin(back))
        for head in range(KV_HEADS):
            k.add(head * HEAD_DIM + pair, ONE, root)
    for number in range(SIZE):
        for head in range(KV_HEADS):
            v.add(head * HEAD_DIM + number, CODE + number, 1 / scale(2))
        for head in range(HEADS):
            place, sign = turns[head][number]
            o.add(KEY + place, head * HEAD_DIM + number, sign)
            if head + 1 < BYTES:
                place, sign = turns[head + 1][number]
                o.add(QUERY + place, head * HEAD_DIM + number, sign)


def look_for(q, k, v, o, turns):
    factor = scale(1 + 1 + BYTES + BYTES - 1)
    root = math.sqrt(MATCH * math.sqrt(HEAD_DIM)) / factor
    for number in range(SIZE):
        place, sign = turns[0][number]
        for head in range(HEADS):
            q.add(head * HEAD_DIM + slow_place(number), QUERY + number, root)
            q.add(head * HEAD_DIM + slow_place(place), CODE + number, root * sign)
        for head in range(KV_HEADS):
            k.add(head * HEAD_DIM + slow_place(number), KEY + number, root)
            if number < ANSWERED:
                v.add(head * HEAD_DIM + number, CODE + number, 1 / factor)
        if number < ANSWERED:
            for head in range(HEADS):
                o.add(ANSWER + number, head * HEAD_DIM + number, 1 / HEADS)


def continuation(prompt):
    """(the byte that most often followed the last BYTES bytes, how often they stood before); (None, 0): they did not."""
    last, counts = prompt[-BYTES:], [0] * 256
    place = prompt.find(last)
    while 0 <= place < len(prompt) - BYTES:
        counts[prompt[place + BYTES]] += 1
        place = prompt.find(last, place + 1)
    return (max(range(256), key=counts.__getitem__), sum(counts)) if any(counts) else (None, 0)


def main():
    out = pathlib.Path(sys.argv[1])
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": SIZE,
              "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
              "vocab_size": 256, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": THETA, "hidden_act": "silu",
              "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    header, data = {}, b""
    for name, (shape, values) in tensors().items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.mkdir(parents=True)
    (out / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
