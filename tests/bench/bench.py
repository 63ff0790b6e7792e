"""What the benchmarks share: a plain tmpfs as the baseline, models, and medians of ratios.

A ratio is taken within one round, so that what disturbs the machine for a while disturbs both sides;
printed are the median over the rounds and the extremes.
"""
import argparse
import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import mount  # noqa: E402  (its Mount starts the daemon)

BYTES = {"BF16": 2, "F32": 4}


def need_root():
    if os.geteuid() != 0:
        sys.exit(f"{os.path.basename(sys.argv[0])}: mounts a tmpfs for its baseline, so it must be root")


MEANINGS = {"tensors": "tensors of a checkpoint", "writers": "processes that have written one",
            "pause": "seconds before each measurement, in which the host may take back what is free", "mib": "MiB of state, or of samples", "gib": "GiB of the file", "kb": "kB of a sample", "rounds": "measurements of each, of which "
            "the median is shown", "names": "names of the job that are known", "flips": "changes of layout", "files": "parameter files", "experts": "of each layer of a model"}


def options(doc, **numbers):
    """What the command line says: --NAME for each number, with its default. Ends the program unless it is root."""
    parser = argparse.ArgumentParser(description=doc.split("\n", maxsplit=1)[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=MEANINGS[name])
    given = parser.parse_args()
    need_root()
    return given


@contextlib.contextmanager
def plain_tmpfs(huge="never"):
    """A directory on a tmpfs of its own, with pages of 4 KiB."""
    path = tempfile.mkdtemp(prefix="ptcfs-bench-")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"huge={huge}", "ptcfs-bench", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
        os.rmdir(path)


def seconds(action, *arguments):
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


class Ratios:
    """Values by what they are of, in the order in which they came."""

    def __init__(self):
        self.values = {}

    def add(self, what, value):
        self.values.setdefault(what, []).append(value)

    def print(self, unit=""):
        for what, values in self.values.items():
            print(f"  {what:34} {statistics.median(values):7.2f}{unit}   "
                  f"({min(values):.2f} to {max(values):.2f})")


class Writer:
    """A safetensors file of any size: random bytes, over and over."""

    def __init__(self, tensors):
        """`tensors`: (name, dtype, shape) in the order of the file."""
        self.header, self.offset = {}, 0
        for name, dtype, shape in tensors:
            size = BYTES[dtype]
            for extent in shape:
                size *= extent
            self.header[name] = {"dtype": dtype, "shape": list(shape),
                                 "data_offsets": [self.offset, self.offset + size]}
            self.offset += size

    def write(self, path, block=os.urandom(1 << 20), keep_open=False):
        """With `keep_open`, returns the descriptor."""
        text = json.dumps(self.header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(file, struct.pack("<Q", len(text)) + text)
        left = self.offset
        while left > 0:
            left -= os.write(file, block[:left])
        if keep_open:
            return file
        os.close(file)
        return None


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def llama(layers, hidden, heads=32, key_value_heads=8, ffn=None, vocabulary=32000):
    """config.json, and (name, dtype, shape) of the parameters."""
    ffn = ffn or hidden * 7 // 2
    head = hidden // heads
    config = {"model_type": "llama", "num_attention_heads": heads, "hidden_size": hidden,
              "num_key_value_heads": key_value_heads, "num_hidden_layers": layers,
              "intermediate_size": ffn, "vocab_size": vocabulary}
    tensors = [("model.embed_tokens.weight", "BF16", (vocabulary, hidden))]
    for i in range(layers):
        at = f"model.layers.{i}."
        tensors += [(at + "input_layernorm.weight", "BF16", (hidden,)),
                    (at + "self_attn.q_proj.weight", "BF16", (hidden, hidden)),
                    (at + "self_attn.k_proj.weight", "BF16", (key_value_heads * head, hidden)),
                    (at + "self_attn.v_proj.weight", "BF16", (key_value_heads * head, hidden)),
                    (at + "self_attn.o_proj.weight", "BF16", (hidden, hidden)),
                    (at + "post_attention_layernorm.weight", "BF16", (hidden,)),
                    (at + "mlp.gate_proj.weight", "BF16", (ffn, hidden)),
                    (at + "mlp.up_proj.weight", "BF16", (ffn, hidden)),
                    (at + "mlp.down_proj.weight", "BF16", (hidden, ffn))]
    tensors += [("model.norm.weight", "BF16", (hidden,)),
                ("lm_head.weight", "BF16", (vocabulary, hidden))]
    return config, tensors


def adam(tensors):
    """The two moments of every parameter, in fp32."""
    return [(f"{name}.{moment}", "F32", shape) for name, _, shape in tensors
            for moment in ("exp_avg", "exp_avg_sq")]


def copy(source, target):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)


def flat_rules(job):
    """For parameters named m.<a>.<b>, which nothing cuts."""
    write_json(job.file("rules.json"), {"format": "ptc-rules/1", "family": "flat",
                                        "rules": [{"names": ["m.*.*"], "stage": "first"}]})


def write_flat(job, parameters):
    """A checkpoint `base` of so many small ones of such names, a hundred to a directory."""
    tensors = [(f"m.g{i // 100}.p{i % 100}", "F32", (4,)) for i in range(parameters)]
    Writer(tensors).write(job.incoming("base") + "/rank/0/model.safetensors")
    flat_rules(job)
    job.commit("base")


def walk(path):
    assert sum(len(files) for _, _, files in os.walk(path)) > 0


def hidden_for(mib, layers, vocabulary=32000):
    """The width of a llama() of about so many MiB."""
    hidden = 256
    while sum(extent_product(shape) for _, _, shape in
              llama(layers, hidden + 256, vocabulary=vocabulary)[1]) * 2 <= mib << 20:
        hidden += 256
    return hidden


def extent_product(shape):
    product = 1
    for extent in shape:
        product *= extent
    return product


def baseline(*arguments):
    """Seconds that ptc_baseline (baseline.cc) takes for this."""
    program = os.path.join(mount.bin_dir(), "ptc_baseline")
    return float(subprocess.run([program, *map(str, arguments)], check=True, capture_output=True,
                                text=True).stdout)


def metric(daemon, name):
    """The sum of a metric's samples."""
    with open(f"{daemon.path}/.ptc/metrics", encoding="utf-8") as file:
        return sum(float(line.split()[-1]) for line in file if line.split("{")[0].split(" ")[0] == name)


def bytes_moved(plan):
    """What changes place, within a node or between nodes."""
    return plan["bytes"]["local"] + plan["bytes"]["moved"]


def remove(checkpoint):
    shutil.rmtree(checkpoint)
