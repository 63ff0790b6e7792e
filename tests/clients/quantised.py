"""Weights quantised as AWQ, GPTQ, compressed-tensors, FP8 and FP4 store them, and what they stand for.

Slow and obvious: an element is found by its row and column, one bit after the other where words are
packed, so that it can be compared with what a rank's part of every tensor stands for. A scheme has
    quantise(rng, out, in)         → {end of the name: (dtype, array)}
    dequantise(tensors, out, in)   → array [out, in]
    fits(rows, columns, in)        whether a rank can have just these of the weight
"""
import numpy

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of a word, lowest bits first
FP4 = (0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6)


def pack_rows(values, bits, order=None):
    """[words, n] of [elements, n]: one stream of bits for each column, 32 to a word."""
    elements, count = values.shape
    words = numpy.zeros((elements * bits // 32, count), numpy.uint32)
    for element in range(elements):
        place = element if order is None else element // 8 * 8 + order.index(element % 8)
        for bit in range(bits):
            at = place * bits + bit
            words[at // 32] |= ((values[element] >> bit & 1) << (at % 32)).astype(numpy.uint32)
    return words.view(numpy.int32)


def unpack_rows(words, bits, order=None):
    words = numpy.ascontiguousarray(words).view(numpy.uint32)
    values = numpy.zeros((len(words) * 32 // bits, words.shape[1]), numpy.int64)
    for element in range(len(values)):
        place = element if order is None else element // 8 * 8 + order.index(element % 8)
        for bit in range(bits):
            at = place * bits + bit
            values[element] |= (words[at // 32] >> (at % 32) & 1).astype(numpy.int64) << bit
    return values


def e4m3(codes):
    codes = codes.astype(numpy.int64)
    exponent, fraction = codes >> 3 & 15, codes & 7
    value = numpy.where(exponent == 0, fraction / 8 * 2.0 ** -6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return numpy.where(codes & 128, -value, value)


def scales(rng, *shape):
    return rng.integers(1, 1000, shape).astype(numpy.float16)


def on_grid(places, unit):
    """Runs of these places begin and end on multiples."""
    runs = [place for place in places if place - 1 not in places]
    ends = [place + 1 for place in places if place + 1 not in places]
    return all(place % unit == 0 for place in runs + ends)


class Scheme:
    words_of_rows, words_of_columns, group = 1, 1, None
    config = {}
    says_groups = True  # the configuration, where there are any
    heads, step = (8, 16, 24, 32), 32  # sizes of heads, and what the others are multiples of

    def fits_words(self, rows, columns, out, inputs):
        """Whether no cut goes through a packed word, whatever groups it cuts."""
        return ((len(rows) == out or on_grid(rows, self.words_of_rows)) and
                (len(columns) == inputs or on_grid(columns, self.words_of_columns)))

    def fits(self, rows, columns, out, inputs):
        return (self.fits_words(rows, columns, out, inputs) and
                (len(columns) == inputs or self.group is None or inputs <= self.group or on_grid(columns, self.group)))

    def groups(self, inputs):
        return 1 if self.group is None else -(-inputs // self.group)

    def group_of(self, column):
        return 0 if self.group is None else column // self.group


class Awq(Scheme):
    words_of_rows = 8

    def __init__(self, group):
        self.group = group
        self.config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}

    def quantise(self, rng, out, inputs):
        groups = self.groups(inputs)
        return {"qweight": ("I32", pack_rows(rng.integers(0, 16, (out, inputs)), 4, AWQ_ORDER).T),
                "qzeros": ("I32", pack_rows(rng.integers(0, 16, (out, groups)), 4, AWQ_ORDER).T),
                "scales": ("F16", scales(rng, groups, out))}

    def dequantise(self, part, out, inputs):
        values, zeros = unpack_rows(part["qweight"].T, 4, AWQ_ORDER), unpack_rows(part["qzeros"].T, 4, AWQ_ORDER)
        assert values.shape == (out, inputs)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            group = self.group_of(column)
            found[:, column] = (values[:, column] - zeros[:, group]) * part["scales"][group].astype(float)
        return found


class Gptq(Scheme):
    def __init__(self, bits, group, act_order, known=True):
        self.bits, self.group, self.act_order = bits, group, act_order
        self.words_of_rows = self.words_of_columns = 8 if bits == 4 else 4 if bits == 8 else 32
        self.config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": act_order}
        if not known:
            del self.config["desc_act"]
        self.whole_groups = act_order or not known
        if bits == 3:
            self.heads = (32, 64)

    def fits(self, rows, columns, out, inputs):
        if not self.whole_groups:
            return super().fits(rows, columns, out, inputs)
        return self.fits_words(rows, columns, out, inputs)

    def quantise(self, rng, out, inputs):
        groups, top = self.groups(inputs), 1 << self.bits
        order = numpy.array([self.group_of(column) for column in range(inputs)], numpy.int32)
        if self.act_order:
            rng.shuffle(order)
        return {"qweight": ("I32", pack_rows(rng.integers(0, top, (inputs, out)), self.bits)),
                "qzeros": ("I32", pack_rows(rng.integers(0, top - 1, (out, groups)), self.bits).T),
                "scales": ("F16", scales(rng, groups, out)), "g_idx": ("I32", order)}

    def dequantise(self, part, out, inputs):
        values, zeros = unpack_rows(part["qweight"], self.bits).T, unpack_rows(part["qzeros"].T, self.bits)
        assert values.shape == (out, inputs) and part["g_idx"].shape == (inputs,)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            # Where the groups are cut too, their numbers are still those of the whole.
            group = part["g_idx"][column] if self.whole_groups else self.group_of(column)
            found[:, column] = (values[:, column] - zeros[:, group] - 1) * part["scales"][group].astype(float)
        return found


class PackQuantised(Scheme):
    """compressed-tensors: the zeros are packed along the outputs, the weight along the inputs."""

    def __init__(self, bits, group, symmetric=True, act_order=False):
        self.bits, self.group, self.symmetric, self.act_order = bits, group, symmetric, act_order
        self.words_of_columns = 32 // bits
        self.words_of_rows = 1 if symmetric else 32 // bits
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group,
                   "strategy": "channel" if group is None else "group", "actorder": "group" if act_order else None}
        self.config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                       "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}

    def fits(self, rows, columns, out, inputs):
        if not self.act_order:
            return super().fits(rows, columns, out, inputs)
        return self.fits_words(rows, columns, out, inputs)

    def quantise(self, rng, out, inputs):
        groups, top = self.groups(inputs), 1 << self.bits
        parts = {"weight_packed": ("I32", pack_rows(rng.integers(0, top, (inputs, out)), self.bits).T),
                 "weight_scale": ("BF16", rng.integers(0x3f00, 0x4000, (out, groups)).astype(numpy.uint16)),
                 "weight_shape": ("I64", numpy.array([out, inputs]))}
        if not self.symmetric:
            parts["weight_zero_point"] = ("I32", pack_rows(rng.integers(0, top, (out, groups)), self.bits))
        if self.act_order:
            order = numpy.array([self.group_of(column) for column in range(inputs)], numpy.int32)
            rng.shuffle(order)
            parts["weight_g_idx"] = ("I32", order)
        return parts

    def dequantise(self, part, out, inputs):
        values = unpack_rows(part["weight_packed"].T, self.bits).T
        assert values.shape == (out, inputs)
        zeros = numpy.full(part["weight_scale"].shape, 1 << (self.bits - 1))
        if not self.symmetric:
            zeros = unpack_rows(part["weight_zero_point"], self.bits)
        scale = (part["weight_scale"].astype(numpy.uint32) << 16).view(numpy.float32).astype(float)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            group = part["weight_g_idx"][column] if self.act_order else self.group_of(column)
            found[:, column] = (values[:, column] - zeros[:, group]) * scale[:, group]
        return found


class Eight(Scheme):
    """One byte an element: FP8 or INT8, with a scale for all, for each output or for each block."""

    def __init__(self, of, name="weight_scale", dtype="F8_E4M3", axes=2, block=128):
        self.of, self.name, self.dtype8, self.axes = of, name, dtype, axes
        if of == "block":
            self.group, self.says_groups = block, False
        if of == "block" and block == 128:
            self.heads, self.step = (64, 128), 128
        self.config = {"quant_method": "fp8"}

    def fits(self, rows, columns, out, inputs):
        if self.of != "block":
            return True
        # A block that has all elements of an axis is whole on each rank; not so where `scales` of the rules hold.
        whole = not self.name.endswith("_inv")
        return ((len(rows) == out or (whole and out <= self.group) or on_grid(rows, self.group)) and
                (len(columns) == inputs or (whole and inputs <= self.group) or on_grid(columns, self.group)))

    def quantise(self, rng, out, inputs):
        shape = {"tensor": (1,) * self.axes, "channel": (out, 1)[:self.axes],
                 "block": (-(-out // (self.group or 1)), self.groups(inputs))}[self.of]
        codes = rng.integers(0, 256, (out, inputs)).astype(numpy.uint8)
        codes[codes & 127 == 127] = 1
        parts = {"weight": (self.dtype8, codes if self.dtype8 != "I8" else codes.view(numpy.int8)),
                 self.name: ("F32", rng.integers(1, 1000, shape).astype(numpy.float32))}
        if self.of == "tensor":
            parts["input_scale"] = ("F32", numpy.ones((), numpy.float32))
        return parts

    def dequantise(self, part, out, inputs):
        codes, scale = part["weight"], part[self.name].astype(float)
        values = codes.astype(float) if self.dtype8 == "I8" else e4m3(codes)
        assert values.shape == (out, inputs)
        if self.of == "tensor":
            return values * scale.reshape(())
        if self.of == "channel":
            return values * scale.reshape(out, 1)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            found[:, column] = values[:, column] * scale[numpy.arange(out) // self.group, column // self.group]
        return found


class Nvfp4(Scheme):
    """Two elements in a byte, a scale for 16 of them and one for all."""
    words_of_columns, group = 2, 16

    def __init__(self, weight, of_all):
        self.weight, self.of_all = weight, of_all
        self.config = {"quant_method": "modelopt", "config_groups": {"group_0": {"weights": {
            "num_bits": 4, "type": "float", "group_size": 16}}}}

    def quantise(self, rng, out, inputs):
        return {self.weight: ("U8", rng.integers(0, 256, (out, inputs // 2)).astype(numpy.uint8)),
                "weight_scale": ("F8_E4M3", rng.integers(0, 127, (out, inputs // 16)).astype(numpy.uint8)),
                self.of_all: ("F32", rng.integers(1, 9, (1,)).astype(numpy.float32)),
                "input_scale": ("F32", numpy.ones((), numpy.float32))}

    def dequantise(self, part, out, inputs):
        packed = part[self.weight]
        assert packed.shape == (out, inputs // 2)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            codes = packed[:, column // 2] >> (4 * (column % 2)) & 15
            found[:, column] = numpy.array(FP4)[codes] * e4m3(part["weight_scale"][:, column // 16])
        return found * float(part[self.of_all][0])


class Mxfp4(Scheme):
    """As DeepSeek-V4's experts are published: two elements in a byte, for 32 of them the exponent of their scale."""
    words_of_columns, group = 2, 32
    # Published ones say neither group nor bits: then ranks that have one each cannot commit what they have.
    config = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128], "group_size": 32, "bits": 4}

    def quantise(self, rng, out, inputs):
        return {"weight": ("I8", rng.integers(0, 256, (out, inputs // 2)).astype(numpy.uint8).view(numpy.int8)),
                "scale": ("F8_E8M0", rng.integers(120, 135, (out, inputs // 32)).astype(numpy.uint8))}

    def dequantise(self, part, out, inputs):
        packed = part["weight"].view(numpy.uint8)
        assert packed.shape == (out, inputs // 2)
        found = numpy.zeros((out, inputs))
        for column in range(inputs):
            codes = packed[:, column // 2] >> (4 * (column % 2)) & 15
            found[:, column] = numpy.array(FP4)[codes] * 2.0 ** (part["scale"][:, column // 32].astype(int) - 127)
        return found


#: Name → scheme; with small groups, so that small models have many.
SCHEMES = {
    "awq": Awq(16), "awq, one group": Awq(None),
    "gptq": Gptq(4, 16, False), "gptq, one group": Gptq(4, None, False), "gptq of 8 bits": Gptq(8, 16, False),
    "gptq of 3 bits": Gptq(3, 32, False), "gptq of any order": Gptq(4, 16, True),
    "gptq that does not say its order": Gptq(4, 16, False, known=False),
    "packed": PackQuantised(4, 16), "packed with zeros": PackQuantised(4, 32, symmetric=False),
    "packed by channels": PackQuantised(4, None), "packed of 8 bits": PackQuantised(8, 16),
    "packed of any order": PackQuantised(4, 16, act_order=True),
    "fp8": Eight("tensor", axes=0), "fp8, one scale": Eight("tensor", axes=1),
    "fp8 by inverse": Eight("tensor", "weight_scale_inv", axes=0),
    "fp8 by channels": Eight("channel"), "fp8 by channels, one axis": Eight("channel", axes=1),
    "fp8 by blocks": Eight("block", "weight_scale_inv"), "fp8 by small blocks": Eight("block", block=16),
    "fp8 by blocks of DeepSeek-V4": Eight("block", "scale"), "mxfp4 of DeepSeek-V4": Mxfp4(),
    "int8 by channels": Eight("channel", dtype="I8"),
    "nvfp4": Nvfp4("weight_packed", "weight_global_scale"), "nvfp4 of modelopt": Nvfp4("weight", "weight_scale_2"),
}
