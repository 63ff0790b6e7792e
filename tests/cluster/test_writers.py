"""Processes of several nodes that save together through ptc.Writer, each into the mount of its own node: dcp.save, dcp.async_save
while training goes on, and one of them that fails. PyTorch is needed."""
import os
import shutil
import tempfile
import time

import cluster
import cases
import mount
import ranks

torch = mount.require("torch")
RANKS = 4

BODY = """
from torch.distributed.checkpoint import CheckpointException
mesh, node = init_device_mesh("cpu", (2, 2)), rank // 2

class Writer(ptc.Writer):
    \"\"\"Looks at what its node has before the commit: the shards of its own two processes.\"\"\"
    def finish(self, metadata, results):
        shards = {name.split("-")[1] for name in os.listdir(self._where() + "/rank/0") if name.startswith("shard-")}
        assert shards == {"00001", "00002"}, shards
        super().finish(metadata, results)

def weights():
    return {"a.weight": distribute_tensor(whole("a", 8, 6), mesh, [Shard(0), Shard(1)]),
            "b.weight": distribute_tensor(whole("b", 7), mesh, [Shard(0), Replicate()])}
def state():
    model = weights()
    return {"model": model, "optim": {"state": {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.)} for name, tensor in model.items()},
                                      "param_groups": [{"lr": 0.5, "params": list(model)}]}, "epoch": 3}
def blank():
    def zeros(name, *shape): return distribute_tensor(torch.zeros(shape), other, [Shard(0)])
    model = {"a.weight": zeros("a", 8, 6), "b.weight": zeros("b", 7)}
    return {"model": model, "optim": {"state": {name: {"exp_avg": tensor * 1, "step": torch.tensor(0.)} for name, tensor in model.items()},
                                      "param_groups": [{"lr": 0.0, "params": []}]}, "epoch": 0}
other = init_device_mesh("cpu", (4,))

def expect(name):
    \"\"\"Read through each process' own node, into another mesh.\"\"\"
    found = blank()
    dcp.load(found, storage_reader=ptc.Reader(f"{path}/checkpoints/{name}"))
    for key, tensor in (("a.weight", whole("a", 8, 6)), ("b.weight", whole("b", 7))):
        assert torch.equal(found["model"][key].full_tensor(), tensor), key
        assert torch.equal(found["optim"]["state"][key]["exp_avg"].full_tensor(), tensor * 2), key
        assert found["optim"]["state"][key]["step"] == 3
    assert found["epoch"] == 3 and found["optim"]["param_groups"] == [{"lr": 0.5, "params": ["a.weight", "b.weight"]}]
"""


class Writers(cases.TestCase):
    NODES = 2

    def setUp(self):
        super().setUp()
        self.scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)
        self.nodes.job(0, self.name)
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")

    def run_ranks(self, body):
        """The first half of them on the first node."""
        meet = os.path.join(self.scratch, f"meet-{time.monotonic_ns()}")
        text = ranks.PROLOGUE.replace("PACKAGE", repr(ranks.PACKAGE)) + BODY + body + ranks.EPILOGUE
        codes, said = ranks.SERVER.run(text, [[str(rank), str(RANKS), self.job(rank // 2).path, meet] for rank in range(RANKS)], self.scratch)
        self.assertEqual(codes, [0] * RANKS, said)

    def incoming(self):
        return [[name for name in os.listdir(os.path.dirname(self.job(node).incoming("x"))) if not name.endswith(".error")]
                for node in range(self.NODES)]

    def test_each_writes_on_its_own_node(self):
        self.run_ranks("""
dcp.save(state(), storage_writer=Writer(path, "a"))
expect("a")
""")
        self.assertEqual(self.incoming(), [[], []])
        for node in range(self.NODES):
            self.assertEqual(os.listdir(self.job(node).file("checkpoints")), ["a"])
        self.nodes.nodes[1].ptc("verify", self.name)

    def test_training_goes_on_meanwhile(self):
        """dcp.async_save has copied when it returns: what is saved are the values of that step."""
        self.run_ranks("""
held = state()
writer = Writer(path)
for name in ("a", "b"):
    future = dcp.async_save(held, checkpoint_id=name, storage_writer=writer)
    for tensor in (*held["model"].values(), *(one["exp_avg"] for one in held["optim"]["state"].values())):
        tensor.to_local().add_(1)
    future.result()
    for tensor in (*held["model"].values(), *(one["exp_avg"] for one in held["optim"]["state"].values())):
        tensor.to_local().sub_(1)
    held = state()
    expect(name)
""")
        self.assertEqual(sorted(os.listdir(self.job(1).file("checkpoints"))), ["a", "b"])

    def test_another_training_on_any_of_its_nodes_is_refused(self):
        """And takes nothing away."""
        self.run_ranks("""
import subprocess
job = ptc.Job(path)
where = job.begin("x")
if rank >= 2: ptc.save({"w": torch.zeros(4)}, where, rank=rank)
dist.barrier()
if rank % 2 == 0:
    other = subprocess.run([sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[2]); import ptc; ptc.Job(sys.argv[1]).begin('x')",
                            path, os.path.dirname(os.path.dirname(ptc.__file__))], capture_output=True, text=True,
                           env={key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")})
    assert other.returncode == 1 and "x is being saved by process" in other.stderr, other.stderr
dist.barrier()
if rank >= 2: assert os.path.isdir(f"{where}/rank/{rank}")
""")

    def test_one_that_fails(self):
        """All are told; there is no checkpoint, and the next save of that name is whole."""
        self.run_ranks("""
import ptc.safetensors
write = ptc.safetensors.write
def full(*arguments): raise OSError(28, "No space left on device")
if rank == 3: ptc.safetensors.write = full
try:
    dcp.save(state(), storage_writer=Writer(path, "a"))
    raise SystemExit("it was saved")
except CheckpointException as error:
    assert "No space left on device" in str(error), error
assert os.listdir(path + "/checkpoints") == []
ptc.safetensors.write = write
dcp.save(state(), storage_writer=Writer(path, "a"))
expect("a")
""")
        self.assertEqual(self.incoming(), [[], []])


if __name__ == "__main__":
    mount.main()
