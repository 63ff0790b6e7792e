#!/usr/bin/env python3
"""How soon a layout that nobody has asked for before is there, of a model of very many tensors.

    PTC_BIN_DIR=$PWD/build/bin python3 tests/bench/layouts.py [--rounds 3] [--experts 256]

A DeepSeek-V3 of 61 layers and 256 experts each by itself, every matrix tiny, with Adam's moments: 136 011
tensors. Timed: ls of one rank's directory by its path, and its names with the first bytes of its file; of each
layout once in a round, in a daemon that has shown a first one. Of layouts of many ranks, `ls rank/`, and the names
in each rank's directory: of as many replicas of one state, and of states that differ. At last 150 layouts one after
another, each looked at: memory of the daemon. Baseline: json.loads of the header of what was written, which a reader
of that file does.
"""
import json
import os

import bench
from bench import mount

CONFIG = {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 61, "num_nextn_predict_layers": 0,
          "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
          "qk_rope_head_dim": 4, "v_head_dim": 8, "intermediate_size": 128, "moe_intermediate_size": 16,
          "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
          "vocab_size": 256, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
FIRST = "tp1-pp1-dp1"  # as it was written
LAYOUTS = ("tp8-pp4-dp1-ep16", "tp4-pp2-dp1-ep8", "tp2-pp1-dp1-ep32", "tp8-pp1-dp4-ep8",
           "tp2-pp1-dp1", "tp1-pp1-dp8-fsdp")  # of these two each rank has a part of every tensor
REPLICAS = "tp1-pp1-dp4096"  # of one state
STATES = "tp8-pp4-dp1-ep16"  # 512 ranks, each of a state of its own
ONE_AFTER_ANOTHER = [f"tp{tp}-pp1-dp{dp}-fsdp" for tp, most in ((1, 52), (2, 28)) for dp in range(2, most + 1)]
ONE_AFTER_ANOTHER += [f"tp{tp}-pp{pp}-dp1-ep{ep}" for tp in (1, 2, 4, 8) for pp in (1, 2, 4) for ep in (2, 4, 8, 16, 32, 64)]


def deepseek(experts):
    """(name, dtype, shape) of the parameters."""
    shapes = {"model.embed_tokens": (256, 64), "lm_head": (256, 64), "model.norm": (64,)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes.update({at + "input_layernorm": (64,), at + "post_attention_layernorm": (64,), at + "self_attn.q_a_proj": (32, 64),
                       at + "self_attn.q_a_layernorm": (32,), at + "self_attn.q_b_proj": (192, 32),
                       at + "self_attn.kv_a_proj_with_mqa": (20, 64), at + "self_attn.kv_a_layernorm": (16,),
                       at + "self_attn.kv_b_proj": (256, 16), at + "self_attn.o_proj": (64, 128)})
        dense = layer < CONFIG["first_k_dense_replace"]
        width = 128 if dense else 16
        for ffn in ["mlp."] if dense else ["mlp.shared_experts.", *(f"mlp.experts.{expert}." for expert in range(experts))]:
            shapes.update({at + ffn + "gate_proj": (width, 64), at + ffn + "up_proj": (width, 64), at + ffn + "down_proj": (64, width)})
        if not dense:
            shapes[at + "mlp.gate"] = (experts, 64)
    return [(name + ".weight", "BF16", shape) for name, shape in shapes.items()]


def look(path):
    for name in os.listdir(path):
        os.stat(f"{path}/{name}")
    with open(path + "/model.safetensors", "rb") as file:
        file.read(8)


def list_ranks(path):
    for rank in os.listdir(path):
        os.listdir(f"{path}/{rank}")


def main():
    options = bench.options(__doc__, rounds=3, experts=256)
    parameters, ratios = deepseek(options.experts), bench.Ratios()
    moments = bench.adam(parameters)
    half = (len(moments) + 1) // 2 if len(moments) > 400_000 else len(moments)  # a header has 100 MB at most
    for _ in range(options.rounds):
        with mount.Mount("--memory", "4G" if options.experts <= 256 else "12G") as daemon:
            job = daemon.job("bench")
            rank = job.incoming("base") + "/rank/0"
            bench.write_json(rank + "/config.json", {**CONFIG, "n_routed_experts": options.experts})
            files = {"model": bench.Writer(parameters), "optim": bench.Writer(moments[:half])}
            if moments[half:]:
                files["optim-1"] = bench.Writer(moments[half:])
            for name, writer in files.items():
                writer.write(f"{rank}/{name}.safetensors")
            job.commit("base")
            texts = [json.dumps(writer.header) for writer in files.values()]
            parse = bench.seconds(lambda texts=texts: [json.loads(text) for text in texts])
            for layout in (FIRST, *LAYOUTS):
                path = job.checkpoint("base", "layouts", layout, "rank", "0" if layout == FIRST else "1")
                what = layout + (", as it was written" if layout == FIRST else "")
                ratios.add(what, bench.seconds(os.listdir, path) / parse)
                ratios.add(what + ": its files", bench.seconds(look, path) / parse)
            for layout in (REPLICAS, STATES):
                ranks = job.checkpoint("base", "layouts", layout, "rank")
                ratios.add(layout + ": ls rank/", bench.seconds(os.listdir, ranks) / parse)
                ratios.add(layout + ": ls rank/*/", bench.seconds(list_ranks, ranks) / parse)
            before = daemon.own_bytes()
            for layout in ONE_AFTER_ANOTHER:
                look(job.checkpoint("base", "layouts", layout, "rank", "1"))
            ratios.add("150 layouts: memory / their headers' bytes", (daemon.own_bytes() - before) / sum(map(len, texts)))
    print(f"{sum(len(writer.header) for writer in files.values())} tensors; parsing their headers took {parse * 1000:.0f} ms")
    ratios.print()


if __name__ == "__main__":
    main()
