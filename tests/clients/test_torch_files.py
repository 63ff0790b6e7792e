"""What torch.save and torch.distributed.checkpoint write, read without torch, and files that are laid out again."""
import argparse
import collections
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

import mount
import pickles

torch = mount.require("torch")

PROCESS = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.device_mesh import init_device_mesh
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
whole = torch.load(f"{folder}/whole.pt")
cuts = {"rows": Shard(0), "columns": Shard(1), "odd": Shard(0), "both": Replicate(), "few": Shard(0)}
model = {name: distribute_tensor(tensor, mesh, [cuts[name]]) for name, tensor in whole.items()}
state = {"model": model, "optim": {"state": {"rows": {"step": torch.tensor(3.), "exp_avg": model["rows"]}},
                                   "param_groups": [{"lr": 0.1, "params": ["rows"]}]},
         "plain": torch.arange(5), "epoch": 7, "text": "a.b"}
torch.save(state, f"{folder}/rank-{rank}.pt")
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard import sharded_tensor
metadata = ShardMetadata([3 * rank, 0], [3, 4], f"rank:{rank}/cpu")
torch.save({"w": sharded_tensor.init_from_local_shards([sharded_tensor.Shard(whole["rows"][3 * rank:][:3].clone(), metadata)], [6, 4])},
           f"{folder}/sharded-{rank}.pt")
dcp.save(state, checkpoint_id=f"{folder}/dcp")
# All have saved; then at once, because threads of PyTorch's own can abort a process that is taken apart.
open(f"{folder}/done.{rank}", "w").close()
while not all(os.path.exists(f"{folder}/done.{other}") for other in range(2)): time.sleep(0.01)
os._exit(0)
"""

ORDERS = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
def cut(*order):
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), TensorMeta(torch.Size([8]), (1,), torch.float32), shard_order=(ShardOrderEntry(0, order),))
    return DTensor(torch.arange(2.), spec, requires_grad=False)
uneven = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False, shape=(7,), stride=(1,))
def after_tp(rows, held, split=2):  # FSDP has cut last
    return DTensor.from_local(torch.ones(held), mesh, [_StridedShard(0, split_factor=split), Shard(0)], run_check=False, shape=(rows,), stride=(1,))
torch.save({"usual": cut(0, 1), "other": cut(1, 0), "uneven": uneven, "even.after": after_tp(8, 2), "odd.after": after_tp(9, 2),
            "none.after": after_tp(2, 1), "more.after": after_tp(9, 3), "many.after": after_tp(8, 2, 1 << 40)}, sys.argv[1])
os._exit(0)
"""

TYPES = {torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
         torch.complex64: "C64", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
         torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
         torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ"}


def bits(tensor):
    if tensor.numel() == 0:
        return b""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def some(dtype, *shape):
    size = torch.empty((), dtype=dtype).element_size()
    count = size * torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    return (torch.arange(count) * 7 % 120).to(torch.uint8).view(dtype).view(shape)


def flat(value, path=()):
    """Tensors by the name that DCP gives."""
    if isinstance(value, torch.Tensor):
        yield ".".join(map(str, path)), value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from flat(item, (*path, number))


def model_and_optimizer():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def state():
    model, optimizer = model_and_optimizer()
    tied = torch.arange(12.).reshape(3, 4)
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "types": {name: some(dtype, 3, 2) for dtype, name in TYPES.items()},
        "parameter": torch.nn.Parameter(torch.ones(2, 2)), "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "views": {"transposed": tied.t(), "row": tied[1], "column": tied[:, 1], "expanded": torch.ones(3).expand(2, 3)},
        "tied": [tied, tied, tied.view(3, 4)], "scalar": torch.tensor(3), "empty": torch.empty(0, 3),
        "tuple": (torch.ones(1), {7: torch.ones(2), -1: 5}), "rng": torch.get_rng_state(), "step": 17, "huge": 2**70, "lr": 1e-3,
        "text": "é", "size": torch.Size([2, 3]), "device": torch.device("cpu"), "dtype": torch.bfloat16, "none": None,
        "raw": b"\x00\xff", "set": {1, 2}, "nothing": {}, "flags": [True, False], "ordered": collections.OrderedDict(a=1, b=torch.zeros(1)),
    }


class TorchFiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.program = os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc_codec_dump")
        if not os.access(cls.program, os.X_OK):
            mount.skip(f"there is no {cls.program}")

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ptcfs-torch-")
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def dump(self, *words, fails=False):
        done = subprocess.run([self.program, *words], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1 if fails else 0, done.stdout[:2000] + done.stderr[:2000])
        answer = json.loads(done.stdout)
        return answer["error"] if fails else answer

    def save(self, value, name="file.pt", **options):
        torch.save(value, self.path(name), **options)
        return self.path(name)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def same_pickle(self, data):
        ours = self.dump("pickle", self.write("pickle", data))
        self.assertEqual(pickles.merged(ours), pickles.merged(pickles.of_python(data)))

    def test_pickles(self):
        value = {"a": [1, -1, 255, 65536, 2**40, -2**63, 2**63, -2**80, 2**3000, 1.5, float("inf"), None, True, False],
                 "t": (1, (2,), (), (1, 2, 3), (1, 2, 3, 4)), "s": {1, 2}, "f": frozenset([3]), "b": b"\x00\xff" * 200, "e": b"",
                 "ba": bytearray(b"x"), "u": "é" * 300, "od": collections.OrderedDict(a=1), "dd": collections.defaultdict(list, {1: [2]}),
                 "ns": argparse.Namespace(a=1), "long": list(range(3000)), "many": {i: str(i) for i in range(3000)}, "c": 1j,
                 "counter": collections.Counter("aab"), "range": range(3), "type": dict}
        value["again"] = value["a"]
        for protocol in range(6):
            with self.subTest(protocol=protocol):
                if protocol >= 2:  # text of protocols 0 and 1 has its own form of numbers
                    self.same_pickle(pickle.dumps(value, protocol))
                else:
                    del value["a"][5:9]
                    self.same_pickle(pickle.dumps(value, protocol))

    def test_pickles_of_torch(self):
        for protocol in (2, 3, 4, 5):
            with zipfile.ZipFile(self.save(state(), pickle_protocol=protocol)) as archive:
                self.same_pickle(archive.read("file/data.pkl"))

    def test_zip(self):
        path = self.save(state())
        with zipfile.ZipFile(path) as archive:
            theirs = sorted([i.filename, i.header_offset, i.file_size, i.CRC] for i in archive.infolist())
        ours = self.dump("zip", path)
        self.assertEqual(sorted([name, header, size, crc] for name, header, _, size, crc in ours), theirs)

    def expect_tensors(self, path, value):
        found = self.dump("torch", path)
        with open(path, "rb") as file:
            data = file.read()
        expected = dict(flat(value))
        self.assertEqual([t["name"] for t in found["tensors"]], list(expected))
        self.assertEqual(found["opaque"], [])
        for tensor in found["tensors"]:
            theirs = expected[tensor["name"]]
            self.assertEqual(tensor["dtype"], TYPES[theirs.dtype], tensor["name"])
            self.assertEqual(tensor["shape"], list(theirs.shape), tensor["name"])
            self.assertEqual(tensor["strides"], list(theirs.stride()), tensor["name"])
            self.assertEqual(tensor["storage_offset"], theirs.storage_offset(), tensor["name"])
            self.assertEqual(tensor["contiguous"], theirs.is_contiguous(), tensor["name"])
            if tensor["contiguous"]:
                self.assertEqual(data[tensor["offset"]:][:tensor["bytes"]], bits(theirs), tensor["name"])
        for one, other in ((a, b) for a in found["tensors"] for b in found["tensors"]):
            a, b = (expected[t["name"]].untyped_storage() for t in (one, other))
            self.assertEqual(one["storage"] == other["storage"], a._cdata == b._cdata, (one["name"], other["name"]))
        return found

    def test_tensors(self):
        value = state()
        for protocol in (2, 5):
            found = self.expect_tensors(self.save(value, pickle_protocol=protocol), value)
            paths = {t["name"]: t["path"] for t in found["tensors"]}
            self.assertEqual(paths["model.0.weight"], "model.0%2Eweight")
            self.assertEqual(paths["optimizer.state.0.exp_avg"], "optimizer.state.%i0.exp_avg")
            self.assertEqual(paths["tuple.1.7"], "tuple.%t1.%i7")
            self.assertEqual(paths["tied.2"], "tied.%l2")
            literals = {literal["name"]: literal["value"] for literal in found["literals"]}
            self.assertEqual(literals["step"], 17)
            self.assertEqual(literals["flags"], [True, False])
            self.assertEqual(literals["nothing"], {"dict": []})
            self.assertEqual(literals["tuple.1.-1"], 5)
            self.assertEqual(literals["optimizer.param_groups.0.params"], [0, 1, 2, 3, 4])
            self.assertEqual(literals["huge"], {"long": (2**70).to_bytes(9, "little").hex()})
            self.assertNotIn("model", literals)

    def test_files_of_one_tensor(self):
        for value in (torch.ones(2, 3), torch.nn.Parameter(torch.ones(2))):
            self.expect_tensors(self.save(value), value)

    def equal(self, one, other):
        self.assertIs(type(one), type(other))
        if isinstance(one, torch.Tensor):
            self.assertEqual((one.dtype, one.shape, one.requires_grad), (other.dtype, other.shape, other.requires_grad))
            self.assertEqual(bits(one), bits(other))
        elif isinstance(one, dict):
            self.assertEqual(list(one), list(other))
            for key in one:
                self.equal(one[key], other[key])
        elif isinstance(one, (list, tuple)):
            self.assertEqual(len(one), len(other))
            for a, b in zip(one, other):
                self.equal(a, b)
        else:
            self.assertEqual(one, other)

    def test_laid_out_again(self):
        value = state()
        for protocol in (2, 4):
            self.dump("rewrite", self.save(value, pickle_protocol=protocol), self.path("made.pt"))
            for mapped in (True, False):
                loaded = torch.load(self.path("made.pt"), mmap=mapped, weights_only=True)
                self.equal(loaded, value)
                self.assertEqual(loaded["tied"][0].data_ptr(), loaded["tied"][2].data_ptr())
                self.assertIs(loaded["tied"][0], loaded["tied"][1])
                self.assertEqual(loaded["model"]._metadata, value["model"]._metadata)
            with zipfile.ZipFile(self.path("made.pt")) as archive:
                self.assertIsNone(archive.testzip())

    def test_laid_out_again_and_read_without_headers(self):
        # torch computes where storages are, if told to and the file says that it may; this it gets wrong for other writers.
        from torch.utils.serialization import config
        value = {"first": torch.ones(5)}
        for number in range(12):
            value[f"empty.{number}"] = torch.empty(0, 3)
            value[f"full.{number}"] = torch.arange(3. + number)
        value["opaque"] = torch.ones(3, dtype=torch.complex128)
        self.dump("rewrite", self.save(value), self.path("made.pt"))
        with open(self.path("made.pt"), "rb") as file:
            data = file.read()
        for calculate in (False, True):
            with config.patch("load.calculate_storage_offsets", calculate):
                self.equal(torch.load(self.path("made.pt"), mmap=True, weights_only=True), value)
                shapes = torch.load(self.path("made.pt"), map_location="meta", weights_only=True)
            for name, tensor in shapes.items():
                self.assertEqual((tensor.device.type, tensor.shape, tensor.dtype), ("meta", value[name].shape, value[name].dtype))
                offset = tensor.untyped_storage()._checkpoint_offset
                self.assertEqual(data[offset:][:tensor.nbytes], bits(value[name]), name)

    def test_laid_out_in_other_shapes(self):
        value = state()
        made = self.dump("rewrite", self.save(value), self.path("made.pt"), "half")
        loaded = torch.load(self.path("made.pt"), mmap=True, weights_only=True)
        for (name, theirs), (_, whole) in zip(flat(loaded), flat(value)):
            half = whole[:whole.shape[0] // 2] if whole.dim() else whole
            self.assertEqual(bits(theirs), bits(half), name)
            self.assertTrue(theirs.is_contiguous())
        self.assertEqual(loaded["optimizer"]["param_groups"], value["optimizer"]["param_groups"])
        for tensor in made["tensors"]:
            self.assertEqual(tensor["offset"] % 64, 0)

    def test_refusals(self):
        self.assertIn("before torch 1.6", self.dump("torch", self.save(state(), _use_new_zipfile_serialization=False), fails=True))
        self.assertIn("plain pickle", self.dump("torch", self.write("p", pickle.dumps([1], 2)), fails=True))
        self.assertIn("no zip archive", self.dump("torch", self.write("p", b"hello" * 200), fails=True))
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), self.path("script.pt"))
        self.assertIn("TorchScript", self.dump("torch", self.path("script.pt"), fails=True))
        good = self.save({"w": torch.ones(4), "v": torch.ones(3)})
        def copied(name, change=lambda name, data: data, method=zipfile.ZIP_STORED):
            with zipfile.ZipFile(good) as source, zipfile.ZipFile(self.path(name), "w", method) as target:
                for member in source.namelist():
                    data = change(member, source.read(member))
                    if data is not None:
                        target.writestr(member, data)
            return self.path(name)
        self.dump("torch", copied("same.pt"))
        self.assertIn("'file/byteorder' is compressed (method 8, deflate)", self.dump("torch", copied("z.pt", method=zipfile.ZIP_DEFLATED), fails=True))
        big = copied("big.pt", lambda name, data: b"big" if name.endswith("byteorder") else data)
        self.assertIn("only little-endian", self.dump("torch", big, fails=True))
        lost = copied("lost.pt", lambda name, data: None if name.endswith("data/1") else data)
        self.assertIn("tensor 'v': its storage '1' is not in the zip archive", self.dump("torch", lost, fails=True))
        short = copied("short.pt", lambda name, data: data[:8] if name.endswith("data/0") else data)
        self.assertIn("tensor 'w': its storage '0' should have 16 bytes, but the zip archive has 8", self.dump("torch", short, fails=True))
        lying = copied("lying.pt", lambda name, data: data.replace(b"K\x04\x85", b"K\x05\x85") if name.endswith("pkl") else data)
        self.assertIn("tensor 'w': its elements, [5] with strides [1] from 0 on, do not lie", self.dump("torch", lying, fails=True))
        self.assertIn("two tensors are at 'a.b'", self.dump("torch", self.save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}), fails=True))
        deep = torch.ones(1)
        for _ in range(100):
            deep = [deep]
        self.assertIn("nested deeper than 64", self.dump("torch", self.save(deep), fails=True))

    def test_storages_with_bytes_left_over(self):
        value = {"w": torch.arange(10, dtype=torch.uint8)[:8].view(torch.float32)}
        self.expect_tensors(self.save(value), value)

    def test_distributed_checkpoint_of_a_transpose(self):
        import torch.distributed.checkpoint as dcp
        dcp.save({"w": torch.arange(12.).reshape(3, 4).t()}, checkpoint_id=self.path("dcp"), no_dist=True)
        found = self.dump("dcp", self.path("dcp"))
        (chunk,) = found["tensors"][0]["chunks"]
        self.assertEqual((chunk["extent"], chunk["strides"], chunk["bytes"]), ([4, 3], [1, 4], 48))
        with open(os.path.join(self.path("dcp"), found["files"][chunk["file"]]), "rb") as file:
            file.seek(chunk["begin"])
            self.assertEqual(file.read(48), bits(torch.arange(12.)))

    def test_what_is_opaque(self):
        value = {"sparse": torch.eye(3).to_sparse(), "conj": torch.ones(2, dtype=torch.complex64).conj(), "c128": torch.ones(2, dtype=torch.complex128),
                 "quantized": torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8), "space": argparse.Namespace(t=torch.ones(2)),
                 (1, 2): torch.ones(1), "storage": torch.ones(3).untyped_storage(), "meta": [torch.empty(3, device="meta")], "fine": torch.ones(3)}
        found = self.dump("torch", self.save(value))
        self.assertEqual([t["name"] for t in found["tensors"]], ["fine"])
        reasons = {o["name"]: o["reason"] for o in found["opaque"]}
        for name, part in (("sparse", "_rebuild_sparse_tensor"), ("conj", "lazy conjugate"), ("c128", "ComplexDoubleStorage"),
                           ("quantized", "_rebuild_qtensor"), ("space", "argparse.Namespace"), ("", "its key, a tuple"), ("storage", "without a tensor"),
                           ("meta.0", "_rebuild_meta_tensor_no_storage")):
            self.assertIn(part, reasons[name])
        self.dump("rewrite", self.path("file.pt"), self.path("made.pt"))
        loaded = torch.load(self.path("made.pt"), weights_only=False)
        self.assertTrue(torch.equal(loaded["sparse"].to_dense(), torch.eye(3)))
        self.assertTrue(torch.equal(loaded["c128"], value["c128"]))
        self.assertTrue(torch.equal(loaded["space"].t, torch.ones(2)))
        self.assertTrue(torch.equal(loaded["fine"], torch.ones(3)))

    def spawn(self):
        whole = {"rows": some(torch.float32, 6, 4), "columns": some(torch.bfloat16, 3, 8), "odd": some(torch.float32, 5, 2),
                 "both": some(torch.int64, 2, 2), "few": some(torch.float16, 1, 4)}
        torch.save(whole, self.path("whole.pt"))
        processes = [subprocess.Popen([sys.executable, "-c", PROCESS, str(rank), self.folder], stderr=subprocess.PIPE, text=True)
                     for rank in range(2)]
        for process in processes:
            _, errors = process.communicate(timeout=200)
            self.assertEqual(process.returncode, 0, errors[-2000:])
        return whole

    def test_dtensors(self):
        whole = self.spawn()
        boxes = {"rows": ("[0:3, 0:4]", "[3:6, 0:4]"), "columns": ("[0:3, 0:4]", "[0:3, 4:8]"), "odd": ("[0:3, 0:2]", "[3:5, 0:2]"),
                 "both": ("[0:2, 0:2]",) * 2, "few": ("[0:1, 0:4]", "[1:1, 0:4]")}
        for rank in range(2):
            found = self.dump("torch", self.path(f"rank-{rank}.pt"))
            tensors = {t["name"]: t for t in found["tensors"]}
            self.assertEqual(found["opaque"], [])
            self.assertIsNone(tensors["plain"]["sharding"])
            for name, tensor in whole.items():
                sharding = tensors[f"model.{name}"]["sharding"]
                self.assertEqual(sharding["global_shape"], list(tensor.shape))
                self.assertEqual(sharding["box"], boxes[name][rank])
                self.assertEqual((sharding["mesh_shape"], sharding["mesh_ranks"], sharding["names"], sharding["coordinate"]),
                                 ([2], [0, 1], ["dp"], [rank]))
            self.assertEqual(tensors["optim.state.rows.exp_avg"]["sharding"], tensors["model.rows"]["sharding"])
            self.dump("rewrite", self.path(f"rank-{rank}.pt"), self.path("made.pt"), "plain")
            loaded = torch.load(self.path("made.pt"), mmap=True, weights_only=True)
            rows = whole["rows"][3 * rank:3 * rank + 3]
            self.assertEqual(bits(loaded["model"]["rows"]), bits(rows))
            self.assertIs(type(loaded["model"]["rows"]), torch.Tensor)
            (sharded,) = self.dump("torch", self.path(f"sharded-{rank}.pt"))["tensors"]
            self.assertEqual((sharded["name"], sharded["shape"], sharded["sharding"]["global_shape"], sharded["sharding"]["box"]),
                             ("w", [3, 4], [6, 4], boxes["rows"][rank]))
            self.dump("rewrite", self.path(f"sharded-{rank}.pt"), self.path("made.pt"), "plain")
            self.assertEqual(bits(torch.load(self.path("made.pt"), weights_only=True)["w"]), bits(rows))

    def test_dtensors_cut_otherwise(self):
        done = subprocess.run([sys.executable, "-c", ORDERS, self.path("orders.pt")], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        shardings = {t["name"]: t["sharding"] for t in self.dump("torch", self.path("orders.pt"))["tensors"]}
        boxes = {name: sharding["box"] for name, sharding in shardings.items()}
        self.assertEqual(boxes, {"usual": "[2:4]", "other": "[4:6]", "uneven": None, "even.after": "[4:6]", "odd.after": "[5:7]",
                                 "none.after": "[1:2]", "more.after": None, "many.after": None})
        self.assertEqual((shardings["usual"]["mesh_ranks"], shardings["uneven"]["mesh_ranks"]), ([0, 1, 2, 3], []))

    def part(self, whole, chunk):
        for axis, (offset, extent) in enumerate(zip(chunk["offset"], chunk["extent"])):
            whole = whole.narrow(axis, offset, extent)
        return whole

    def test_distributed_checkpoint(self):
        whole = self.spawn()
        folder = self.path("dcp")
        found = self.dump("dcp", folder)
        with open(os.path.join(folder, ".metadata"), "rb") as file:
            theirs = pickle.load(file)
        expected = {f"model.{name}": tensor for name, tensor in whole.items()}
        expected.update({"optim.state.rows.exp_avg": whole["rows"], "optim.state.rows.step": torch.tensor(3.), "plain": torch.arange(5)})
        self.assertEqual({t["name"] for t in found["tensors"]}, set(expected))
        self.assertEqual({v["name"] for v in found["values"]}, set(theirs.state_dict_metadata) - set(expected))
        for tensor in found["tensors"]:
            value, name = expected[tensor["name"]], tensor["name"]
            self.assertEqual((tensor["dtype"], tensor["shape"]), (TYPES[value.dtype], list(value.shape)), name)
            elements = 0
            for chunk in tensor["chunks"]:
                with open(os.path.join(folder, found["files"][chunk["file"]]), "rb") as file:
                    file.seek(chunk["begin"])
                    data = file.read(chunk["bytes"])
                self.assertEqual(data, bits(self.part(value, chunk)), name)
                elements += torch.Size(chunk["extent"]).numel()
            self.assertEqual(elements, value.numel(), name)
        paths = {item["name"]: item["path"] for item in found["tensors"] + found["values"]}
        self.assertEqual(paths["optim.state.rows.exp_avg"], "optim.state.rows.exp_avg")
        self.assertEqual(paths["optim.param_groups.0.lr"], "optim.param_groups.%l0.lr")
        for value in found["values"]:
            with open(os.path.join(folder, found["files"][value["file"]]), "rb") as file:
                file.seek(value["offset"])
                torch.load(io.BytesIO(file.read(value["length"])), weights_only=True)

        self.refuse_damaged(folder, theirs)

    def refuse_damaged(self, folder, metadata):
        good = pickle.dumps(metadata)
        def refused(part, change):
            damaged = pickle.loads(good)
            change(damaged, damaged.state_dict_metadata, damaged.storage_data)
            with open(os.path.join(folder, ".metadata"), "wb") as file:
                pickle.dump(damaged, file)
            self.assertIn(part, self.dump("dcp", folder, fails=True))
        def item(items, name, number=0):
            return [key for key in items if key.fqn == name][number]
        size = torch.Size
        refused("tensor 'model.rows': its chunks hold 12 of its 24 elements", lambda m, d, i: d["model.rows"].chunks.pop() and i.pop(item(i, "model.rows", 1)))
        refused("tensor 'model.rows': its chunks [0:3, 0:4] and [2:5, 0:4] overlap",
                lambda m, d, i: (setattr(d["model.rows"].chunks[1], "offsets", size([2, 0])),
                                 i.update({type(item(i, "model.rows"))("model.rows", size([2, 0])): i.pop(item(i, "model.rows", 1))})))
        refused("its chunk [3:7, 0:4] is not within [6, 4]", lambda m, d, i: setattr(d["model.rows"].chunks[1], "sizes", size([4, 4])))
        refused("tensor 'model.rows': nobody says in which file its chunk [3:6, 0:4] is", lambda m, d, i: i.pop(item(i, "model.rows", 1)))
        refused("value 'epoch': nobody says", lambda m, d, i: i.pop(item(i, "epoch")))
        refused("has 5 bytes in", lambda m, d, i: setattr(i[item(i, "model.rows")], "length", 5))
        refused("overlap", lambda m, d, i: setattr(i[item(i, "model.rows")], "offset", i[item(i, "model.columns")].offset + 1))
        refused("should be in bytes", lambda m, d, i: setattr(i[item(i, "model.rows")], "offset", 10**9))
        refused("no name of a file", lambda m, d, i: setattr(i[item(i, "model.rows")], "relative_path", "../x"))
        refused("storage extension", lambda m, d, i: setattr(i[item(i, "model.rows")], "transform_descriptors", ["zstd"]))
        refused("its type is not supported: torch.complex128", lambda m, d, i: setattr(d["model.rows"].properties, "dtype", torch.complex128))
        refused("value 'model.rows': it is stored, but not described", lambda m, d, i: d.pop("model.rows"))
        with open(os.path.join(folder, ".metadata"), "wb") as file:
            pickle.dump([1], file)
        self.assertIn("not the metadata of a distributed checkpoint, but a list", self.dump("dcp", folder, fails=True))


if __name__ == "__main__":
    mount.main()
