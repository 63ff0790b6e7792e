#!/usr/bin/env python3
"""How fast what other programs saved is read: the metadata of distributed checkpoints, and files of many tensors.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/intake.py [--layers 126] [--tensors 100000] [--rounds 3]

The metadata are of a Llama-3.1-405B in bf16 on 16 384 ranks, tp8-pp16-dp128: each tensor cut by tp and, in its rows, by FSDP.
Times are parts of Python's of the round: pickle.load as anybody would call it; the same with nothing that it names rebuilt
(tuples in place of objects); torch.load(mmap=True, weights_only=True). Memory: at most, for each byte of the pickle or file.
"""
import argparse
import gc
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile

import bench
from bench import mount
from goals import judge, verdict

torch = mount.require("torch")
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata)

TP, PP, DP = 8, 16, 128
AGAIN = 2  # Python's is the faster of so many, as ours is the fastest of five
GOALS = {".metadata / pickle load": 0.2, ".pt / torch load": 0.2}
MEMORY = 40


def ours(kind, path):
    """Seconds and bytes of memory: the fastest of five, in a process of its own."""
    program = os.path.join(mount.bin_dir(), "ptc_codec_dump")
    answer = json.loads(subprocess.run([program, "time", kind, path], check=True, capture_output=True, text=True).stdout)
    return answer["seconds"], answer["bytes"]


class Bare(pickle.Unpickler):
    """Builds tuples where something would be called."""

    class Thing(tuple):
        def __new__(cls, *arguments):
            return tuple.__new__(cls, arguments)

        def __setstate__(self, state):
            pass

        def __setitem__(self, key, value):
            pass

        def __hash__(self):
            return id(self)

    def find_class(self, module, name):
        return self.Thing

    def persistent_load(self, pid):
        return pid


def llama_405b(layers):
    """name → shape, and the axis that tp cuts."""
    hidden, inner, groups, vocabulary = 16384, 53248, 8 * 128, 128256
    yield "model.embed_tokens.weight", (vocabulary, hidden), 0
    for layer in range(layers):
        for name, shape, axis in (("self_attn.q_proj", (hidden, hidden), 0), ("self_attn.k_proj", (groups, hidden), 0),
                                  ("self_attn.v_proj", (groups, hidden), 0), ("self_attn.o_proj", (hidden, hidden), 1),
                                  ("mlp.gate_proj", (inner, hidden), 0), ("mlp.up_proj", (inner, hidden), 0),
                                  ("mlp.down_proj", (hidden, inner), 1), ("input_layernorm", (hidden,), None),
                                  ("post_attention_layernorm", (hidden,), None)):
            yield f"model.layers.{layer}.{name}.weight", shape, axis
    yield "model.norm.weight", (hidden,), None
    yield "lm_head.weight", (vocabulary, hidden), 0


def metadata(layers):
    described, stored, ends = {}, {}, {}
    for number, (name, shape, axis) in enumerate(llama_405b(layers)):
        chunks = []
        for tp in range(TP if axis is not None else 1):
            offset, size = [0] * len(shape), list(shape)
            if axis is not None:
                size[axis] //= TP
                offset[axis] = tp * size[axis]
            rows, begin = -(-size[0] // DP), offset[0]
            for dp in range(DP):
                offset[0], extent = begin + dp * rows, [min(rows, size[0] - dp * rows), *size[1:]]
                if extent[0] <= 0:
                    break
                rank = ((number * PP // (9 * layers + 3)) * DP + dp) * TP + tp
                file, length = f"__{rank}_0.distcp", 2 * torch.Size(extent).numel() + 1600
                at = ends.get(file, 0)
                ends[file] = at + length
                stored[MetadataIndex(name, torch.Size(offset), len(chunks))] = _StorageInfo(file, at, length)
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(extent)))
        described[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    return Metadata(described, {name: tuple(name.split(".")) for name in described}, stored), len(stored)


def bare_load(data):
    return Bare(io.BytesIO(data)).load()


def compare(ratios, memory, what, kind, path, size, rounds, **theirs):
    for _ in range(rounds):
        seconds, peak = ours(kind, path)
        print(f"  {what}: {seconds:.3f} s", file=sys.stderr)
        memory.add(what, peak / size)
        for name, action in theirs.items():
            took = []
            for _ in range(AGAIN):
                gc.collect()
                took.append(bench.seconds(action))
            ratios.add(f"{what} / {name.replace('_', ' ')}", seconds / min(took))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=126, help="of the model, of 126")
    parser.add_argument("--tensors", type=int, default=100_000, help="of the .pt")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median is shown")
    options = parser.parse_args()
    ratios, memory = bench.Ratios(), bench.Ratios()
    with tempfile.TemporaryDirectory(prefix="ptcfs-bench-") as folder:
        path = os.path.join(folder, ".metadata")
        made, chunks = metadata(options.layers)
        with open(path, "wb") as file:
            pickle.dump(made, file)
        del made
        with open(path, "rb") as file:
            data = file.read()
        print(f".metadata of {options.layers} layers: {chunks} chunks, {len(data) / 1e6:.1f} MB")
        compare(ratios, memory, ".metadata", "dcp", path, len(data), options.rounds,
                pickle_load=lambda: pickle.loads(data), nothing_rebuilt=lambda: bare_load(data))

        path = os.path.join(folder, "file.pt")
        torch.save({f"model.layers.{i // 10}.part{i % 10}.weight": torch.zeros(2, 3) for i in range(options.tensors)}, path)
        with zipfile.ZipFile(path) as archive:
            data = archive.read("file/data.pkl")
        pickled = os.path.join(folder, "data.pkl")
        with open(pickled, "wb") as file:
            file.write(data)
        print(f".pt of {options.tensors} tensors: {os.path.getsize(path) / 1e6:.1f} MB, of which pickle {len(data) / 1e6:.1f} MB")
        compare(ratios, memory, "data.pkl", "pickle", pickled, len(data), options.rounds, nothing_rebuilt=lambda: bare_load(data))
        compare(ratios, memory, ".pt", "torch", path, os.path.getsize(path), options.rounds, nothing_rebuilt=lambda: bare_load(data),
                torch_load=lambda: torch.load(path, mmap=True, weights_only=True))
    print("seconds, parts of Python's")
    ratios.print()
    print("bytes of memory for one of the file")
    memory.print()
    judge(ratios, GOALS, "see the other ratios", form=".3f")
    most = max(max(values) for values in memory.values.values())
    print(f"memory, most: {verdict(most, MEMORY, 'of one kind of file', form='.1f')}")


if __name__ == "__main__":
    main()
