#!/usr/bin/env python3
"""Writes a model with the names, shapes and files of a real Llama and random weights.

    make_llama.py DIR [--size 68m|160m|1b] [--seed N]
"""
import argparse
import json
import os
import random

from models import FINITE, count, write_file

SIZES = {  # hidden, layers, heads, key-value heads, feed-forward, vocabulary, tied
    "68m": (768, 2, 12, 12, 3072, 32000, False),
    "160m": (768, 12, 12, 12, 3072, 32000, False),
    "1b": (2048, 16, 32, 8, 8192, 128256, True),
}


def shapes(hidden, layers, heads, kv, ffn, vocab, tied):
    dim = hidden // heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "self_attn.q_proj.weight", (hidden, hidden)
        yield layer + "self_attn.k_proj.weight", (kv * dim, hidden)
        yield layer + "self_attn.v_proj.weight", (kv * dim, hidden)
        yield layer + "self_attn.o_proj.weight", (hidden, hidden)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        yield layer + "mlp.gate_proj.weight", (ffn, hidden)
        yield layer + "mlp.up_proj.weight", (ffn, hidden)
        yield layer + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (vocab, hidden)


def write_model(directory, size, seed):
    """One tensor at a time, so that memory holds only one."""
    rng = random.Random(seed)
    wanted = sorted(shapes(*SIZES[size]))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in wanted:
        end = offset + 2 * count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "model.safetensors"), "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in wanted:
            data = bytearray(rng.randbytes(2 * count(shape)))
            data[1::2] = bytes(data[1::2]).translate(FINITE)
            file.write(data)
    hidden, layers, heads, kv, ffn, vocab, tied = SIZES[size]
    write_file(os.path.join(directory, "config.json"), json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16"}, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--size", choices=SIZES, default="68m")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_model(arguments.directory, arguments.size, arguments.seed)


if __name__ == "__main__":
    main()
