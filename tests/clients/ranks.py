"""Processes of torch.distributed for the tests of tools/python, and comparing what they saved.

    class Things(ranks.TestCase):
        def test_it(self):
            self.run_ranks(2, "ptc.Job(path).save({'w': torch.ones(2)}, 'a')", job.path)
"""
import os
import subprocess
import sys
import time

import mount

PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/python")
torch = mount.require("torch")

PROLOGUE = """
import os, sys
sys.path.insert(0, PACKAGE)
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import ptc
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
rank, size, path, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=size)
def whole(name, *shape):
    torch.manual_seed(sum(map(ord, name)))
    return torch.rand(shape)
"""
# At once, because threads of PyTorch's own can abort a process that is taken apart.
EPILOGUE = """
if dist.is_initialized():
    dist.barrier()
    if rank == 0:
        import time; time.sleep(0.2)  # the store of the group is here
os._exit(0)
"""


class TestCase(mount.TestCase):
    def run_ranks(self, size, body, path):
        """Runs a text in `size` processes of a group."""
        meet = self.temporary(f"meet-{time.monotonic_ns()}")
        text = PROLOGUE.replace("PACKAGE", repr(PACKAGE)) + body + EPILOGUE
        processes = [subprocess.Popen([sys.executable, "-W", "ignore", "-c", text, str(rank), str(size), path, meet],
                                      stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in range(size)]
        for process in processes:
            self.addCleanup(process.kill)
            self.addCleanup(process.stderr.close)
        errors = [process.communicate(timeout=240)[1] for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * size, "\n".join(errors))

    def assert_equal(self, a, b, at=""):
        if isinstance(b, torch.Tensor):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), at)
            self.assertTrue(torch.equal(a, b), at)
        elif isinstance(b, dict):
            self.assertEqual(set(a), set(b), at)
            for key, value in b.items():
                self.assert_equal(a[key], value, f"{at}/{key}")
        elif isinstance(b, (list, tuple)):
            self.assertEqual((type(a), len(a)), (type(b), len(b)), at)
            for number, value in enumerate(b):
                self.assert_equal(a[number], value, f"{at}/{number}")
        else:
            self.assertEqual((type(a), a), (type(b), b), at)
