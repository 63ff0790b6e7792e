"""Small models of true structure, and how tensor and pipeline parallelism cut them.

Needs nothing but Python's own library. A model is a list of Tensor; sizes are odd on purpose. The
cuts are written down here a second time, independently of ptcfs, so that its files can be compared
byte for byte with what they should be.
"""
import json
import os
import random
import struct
from dataclasses import dataclass

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "F64": 8,
              "I64": 8}
# The byte with the exponent's highest bits: without 0x40 no value is infinite or not a number.
FLOATS = {"F16", "BF16", "F32", "F64"}
FINITE = bytes(value & 0xBF for value in range(256))


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: tuple
    data: bytes

    @property
    def item_bytes(self):
        return ITEM_BYTES[self.dtype]


def count(shape):
    product = 1
    for extent in shape:
        product *= extent
    return product


def random_tensor(rng, name, dtype, shape):
    size = ITEM_BYTES[dtype]
    data = bytearray(rng.randbytes(count(shape) * size))
    if dtype in FLOATS:
        data[size - 1::size] = bytes(data[size - 1::size]).translate(FINITE)
    if dtype == "BOOL":
        data = bytearray(value & 1 for value in data)
    return Tensor(name, dtype, tuple(shape), bytes(data))


# ---- writing ------------------------------------------------------------------------------------

def safetensors_bytes(tensors, metadata=None):
    """As the reference writer: widest types first, then by name."""
    header, data, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for tensor in sorted(tensors, key=lambda t: (-t.item_bytes, t.name)):
        end = offset + len(tensor.data)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                               "data_offsets": [offset, end]}
        data.append(tensor.data)
        offset = end
    return safetensors_header(header) + b"".join(data)


def safetensors_header(header):
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def write_safetensors(path, tensors, metadata=None):
    write_file(path, safetensors_bytes(tensors, metadata or {"format": "pt"}))


def write_sharded(directory, tensors, shards=2):
    """model-0000i-of-0000n.safetensors and the index, as save_pretrained writes them."""
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = tensors[shard * len(tensors) // shards:(shard + 1) * len(tensors) // shards]
        write_safetensors(os.path.join(directory, name), part)
        weight_map.update({tensor.name: name for tensor in part})
    index = {"metadata": {"total_size": sum(len(t.data) for t in tensors)},
             "weight_map": weight_map}
    write_file(os.path.join(directory, "model.safetensors.index.json"), json.dumps(index, indent=2))


NPY_TYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8", "U8": "|u1",
             "I8": "|i1", "BOOL": "|b1", "BF16": "<V2"}


def npy_bytes(tensor):
    header = repr({"descr": NPY_TYPES[tensor.dtype], "fortran_order": False,
                   "shape": tuple(tensor.shape)})
    pad = -(10 + len(header) + 1) % 64
    text = (header + " " * pad + "\n").encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + tensor.data


def read_safetensors(path):
    with open(path, "rb") as file:
        return parse_safetensors(file.read())


def read_hf(top):
    """name → tensor of a directory as from_pretrained() reads it: one file, or several by their index."""
    index = os.path.join(top, "model.safetensors.index.json")
    names = ["model.safetensors"]
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        names = sorted(set(weight_map.values()))
    found = {}
    for name in names:
        tensors = read_safetensors(os.path.join(top, name))
        assert len(names) == 1 or set(tensors) == {key for key in weight_map if weight_map[key] == name}
        found.update(tensors)
    return found


def parse_safetensors(content):
    """name → Tensor. Trusts the file: it is ptcfs that is under test, not this."""
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + size])
    header.pop("__metadata__", None)
    return {name: Tensor(name, entry["dtype"], tuple(entry["shape"]),
                         content[8 + size + entry["data_offsets"][0]:
                                 8 + size + entry["data_offsets"][1]])
            for name, entry in header.items()}


def read_npy(path):
    """(shape, bytes) of a .npy file."""
    import ast
    with open(path, "rb") as file:
        content = file.read()
    assert content[:6] == b"\x93NUMPY", path
    wide = content[6] > 1
    size = struct.unpack_from("<I" if wide else "<H", content, 8)[0]
    start = 12 if wide else 10
    header = ast.literal_eval(content[start:start + size].decode())
    assert not header["fortran_order"] or len(header["shape"]) < 2
    return tuple(header["shape"]), content[start + size:]


# ---- cutting ------------------------------------------------------------------------------------

def take(tensor, axis, segments, extent, name=None):
    """The tensor with only `segments` [(begin, end), …] of an axis, zeros up to `extent`."""
    outer = count(tensor.shape[:axis])
    row = count(tensor.shape[axis + 1:]) * tensor.item_bytes
    length = tensor.shape[axis]
    parts = []
    for o in range(outer):
        base = o * length * row
        taken = 0
        for begin, end in segments:
            parts.append(tensor.data[base + begin * row:base + end * row])
            taken += end - begin
        parts.append(bytes((extent - taken) * row))
    shape = tensor.shape[:axis] + (extent,) + tensor.shape[axis + 1:]
    return Tensor(name or tensor.name, tensor.dtype, shape, b"".join(parts))


def even(length, rank, ranks):
    assert length % ranks == 0, (length, ranks)
    part = length // ranks
    return [(rank * part, (rank + 1) * part)], part


def kv_heads(length, heads, rank, ranks):
    if ranks <= heads:
        return even(length, rank, ranks)
    dim = length // heads
    head = rank * heads // ranks
    return [(head * dim, (head + 1) * dim)], dim


def vocabulary(length, rank, ranks, multiple=128):
    if ranks == 1:
        return [(0, length)], length
    padded = -(-length // (multiple * ranks)) * multiple * ranks
    part = padded // ranks
    begin, end = min(rank * part, length), min((rank + 1) * part, length)
    return [(begin, end)], part


def fused(length, parts, rank, ranks):
    block = length // parts
    segments = []
    for part in range(parts):
        (begin, end), = even(block, rank, ranks)[0]
        segments.append((part * block + begin, part * block + end))
    return segments, length // ranks


def stage_of_layer(layer, layers, pp):
    base, more = divmod(layers, pp)
    begin = 0
    for stage in range(pp):
        begin += base + (1 if stage < more else 0)
        if layer < begin:
            return stage
    raise AssertionError(layer)


class Family:
    """A model with its rules. Subclasses say how each tensor is cut."""
    layers = 0

    def __init__(self, seed=1):
        self.rng = random.Random(seed)
        self.tensors = []
        self.build()

    def add(self, name, *shape, dtype=None):
        self.tensors.append(random_tensor(self.rng, name, dtype or self.dtype, shape))

    def config_text(self):
        return json.dumps(self.config, indent=2) + "\n"

    def write_hf(self, directory, sharded=False):
        if sharded:
            write_sharded(directory, self.tensors)
        else:
            write_safetensors(os.path.join(directory, "model.safetensors"), self.tensors)
        write_file(os.path.join(directory, "config.json"), self.config_text())

    def rank_tensors(self, tp, pp, tp_rank, pp_rank):
        """What a rank holds, by the rules."""
        held = []
        for tensor in self.tensors:
            if pp_rank in self.stages(tensor.name, pp):
                held.append(self.cut(tensor, tp_rank, tp))
        return held

    def write_ranks(self, directory, tp, pp, dp=1):
        """incoming/<name> as a job of tp × pp × dp ranks writes it."""
        for rank in range(tp * pp * dp):
            tp_rank, pp_rank = rank % tp, rank // (tp * dp)
            where = os.path.join(directory, "rank", str(rank))
            write_safetensors(os.path.join(where, "model.safetensors"),
                              self.rank_tensors(tp, pp, tp_rank, pp_rank))
            if rank == 0:
                write_file(os.path.join(where, "config.json"), self.config_text())

    def layer_of(self, name):
        for before, after in zip(name.split("."), name.split(".")[1:]):
            if before in ("layers", "h", "layer") and after.isdigit():
                return int(after)
        return None

    def stages(self, name, pp):
        layer = self.layer_of(name)
        if layer is not None:
            return {stage_of_layer(layer, self.layers, pp)}
        return {pp - 1} if name.startswith(self.last) else {0}


class Llama(Family):
    dtype = "BF16"
    layers = 5
    hidden, heads, kv, dim, ffn, vocab = 64, 8, 2, 8, 176, 515
    last = ("model.norm", "lm_head")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
              "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
              "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16"}

    def build(self):
        self.add("model.embed_tokens.weight", self.vocab, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            self.add(layer + "input_layernorm.weight", self.hidden)
            self.add(layer + "self_attn.q_proj.weight", self.heads * self.dim, self.hidden)
            self.add(layer + "self_attn.k_proj.weight", self.kv * self.dim, self.hidden)
            self.add(layer + "self_attn.v_proj.weight", self.kv * self.dim, self.hidden)
            self.add(layer + "self_attn.o_proj.weight", self.hidden, self.heads * self.dim)
            self.add(layer + "post_attention_layernorm.weight", self.hidden)
            self.add(layer + "mlp.gate_proj.weight", self.ffn, self.hidden)
            self.add(layer + "mlp.up_proj.weight", self.ffn, self.hidden)
            self.add(layer + "mlp.down_proj.weight", self.hidden, self.ffn)
        self.add("model.norm.weight", self.hidden)
        self.add("lm_head.weight", self.vocab, self.hidden)

    def cut(self, tensor, rank, ranks):
        name = tensor.name
        if "embed_tokens" in name or "lm_head" in name:
            return take(tensor, 0, *vocabulary(tensor.shape[0], rank, ranks))
        if "k_proj" in name or "v_proj" in name:
            return take(tensor, 0, *kv_heads(tensor.shape[0], self.kv, rank, ranks))
        if any(part in name for part in ("q_proj", "gate_proj", "up_proj")):
            return take(tensor, 0, *even(tensor.shape[0], rank, ranks))
        if "o_proj" in name or "down_proj" in name:
            return take(tensor, 1, *even(tensor.shape[1], rank, ranks))
        return tensor


class ThreeWays(Llama):
    """Of which two ranks cannot have halves, as of SmolLM."""
    layers = 2
    hidden, heads, kv, dim, ffn, vocab = 72, 9, 3, 8, 177, 515

    def __init__(self, vocab=515, fused=False, **sizes):
        self.vocab, self.fused = vocab, fused
        self.__dict__.update(sizes)
        self.config = {**Llama.config, "model_type": "phi3" if fused else "llama", "hidden_size": self.hidden,
                       "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                       "num_key_value_heads": self.kv, "vocab_size": vocab}
        super().__init__()

    def build(self):
        super().build()
        if not self.fused:
            return
        gone = (".q_proj.", ".k_proj.", ".v_proj.", ".gate_proj.", ".up_proj.")
        self.tensors = [tensor for tensor in self.tensors if not any(word in tensor.name for word in gone)]
        for layer in range(self.layers):
            self.add(f"model.layers.{layer}.self_attn.qkv_proj.weight", (self.heads + 2 * self.kv) * self.dim, self.hidden)
            self.add(f"model.layers.{layer}.mlp.gate_up_proj.weight", 2 * self.ffn, self.hidden)


class Gpt2(Family):
    dtype = "F16"
    layers = 3
    hidden, heads, vocab, positions = 48, 4, 257, 33
    last = ("ln_f",)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden,
              "n_head": heads, "n_layer": layers, "vocab_size": vocab, "n_positions": positions}

    def build(self):
        self.add("wte.weight", self.vocab, self.hidden)
        self.add("wpe.weight", self.positions, self.hidden)
        for i in range(self.layers):
            for norm in ("ln_1", "ln_2"):
                self.add(f"h.{i}.{norm}.weight", self.hidden)
                self.add(f"h.{i}.{norm}.bias", self.hidden)
            for name, inside, outside in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1),
                                          ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
                self.add(f"h.{i}.{name}.weight", inside * self.hidden, outside * self.hidden)
                self.add(f"h.{i}.{name}.bias", outside * self.hidden)
        self.add("ln_f.weight", self.hidden)
        self.add("ln_f.bias", self.hidden)

    def stages(self, name, pp):
        if name == "wte.weight":
            return {0, pp - 1}  # the head is tied to it
        return super().stages(name, pp)

    def cut(self, tensor, rank, ranks):
        name = tensor.name
        if name == "wte.weight":
            return take(tensor, 0, *vocabulary(tensor.shape[0], rank, ranks))
        axis = len(tensor.shape) - 1
        if "c_attn" in name:
            return take(tensor, axis, *fused(tensor.shape[axis], 3, rank, ranks))
        if "c_fc" in name:
            return take(tensor, axis, *even(tensor.shape[axis], rank, ranks))
        if "c_proj.weight" in name:
            return take(tensor, 0, *even(tensor.shape[0], rank, ranks))
        return tensor


class Bert(Family):
    dtype = "F32"
    layers = 3
    hidden, heads, ffn, vocab, positions = 24, 4, 72, 131, 21
    last = ("pooler",)
    config = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": hidden,
              "num_attention_heads": heads, "num_hidden_layers": layers, "intermediate_size": ffn,
              "vocab_size": vocab, "max_position_embeddings": positions}

    def build(self):
        self.add("embeddings.position_ids", 1, self.positions, dtype="I64")
        self.add("embeddings.word_embeddings.weight", self.vocab, self.hidden)
        self.add("embeddings.position_embeddings.weight", self.positions, self.hidden)
        self.add("embeddings.token_type_embeddings.weight", 2, self.hidden)
        self.norm("embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}."
            for name in ("query", "key", "value"):
                self.dense(layer + "attention.self." + name, self.hidden, self.hidden)
            self.dense(layer + "attention.output.dense", self.hidden, self.hidden)
            self.norm(layer + "attention.output.LayerNorm")
            self.dense(layer + "intermediate.dense", self.ffn, self.hidden)
            self.dense(layer + "output.dense", self.hidden, self.ffn)
            self.norm(layer + "output.LayerNorm")
        self.dense("pooler.dense", self.hidden, self.hidden)

    def norm(self, name):
        self.add(name + ".weight", self.hidden)
        self.add(name + ".bias", self.hidden)

    def dense(self, name, outside, inside):
        self.add(name + ".weight", outside, inside)
        self.add(name + ".bias", outside)

    def cut(self, tensor, rank, ranks):
        name = tensor.name
        if "word_embeddings" in name:
            return take(tensor, 0, *vocabulary(tensor.shape[0], rank, ranks))
        if any(part in name for part in (".query.", ".key.", ".value.", "intermediate.dense")):
            return take(tensor, 0, *even(tensor.shape[0], rank, ranks))
        if name.endswith("output.dense.weight"):
            return take(tensor, 1, *even(tensor.shape[1], rank, ranks))
        return tensor
