"""Processes of torch.distributed for the tests of tools/python, and comparing what they saved.

    class Things(ranks.TestCase):
        def test_it(self):
            self.run_ranks(2, "ptc.Job(path).save({'w': torch.ones(2)}, 'a')", job.path)
"""
import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import mount

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(HERE, "../../tools/python")
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


class Server:
    """rank_server.py, which is started when the first text is run."""

    def __init__(self):
        self.process = None

    def start(self):
        self.process = subprocess.Popen([sys.executable, "-B", "-W", "ignore", os.path.join(HERE, "rank_server.py")], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        atexit.register(Server.end, self.process)

    @staticmethod
    def end(process):
        """And all that it forked."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdin.close()
        process.stdout.close()
        process.wait()

    def run(self, text, arguments, scratch, seconds=240):
        """A process for each list of words, in `scratch`, side by side: their exit codes, and what they said."""
        if self.process is None or self.process.poll() is not None:  # it was ended below
            self.start()
        with tempfile.TemporaryDirectory(prefix="said-", dir=scratch) as logs:
            wanted = {"text": text, "arguments": arguments, "directory": scratch,
                      "logs": [os.path.join(logs, str(number)) for number in range(len(arguments))]}
            self.process.stdin.write(json.dumps(wanted) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            codes = json.loads(self.process.stdout.readline() or "[]")
            said = "\n".join(mount.read_text(log) for log in wanted["logs"] if os.path.exists(log))
        if not codes:
            raise AssertionError(f"the processes have not ended within {seconds} s:\n{said}")
        return codes, said


SERVER = Server()


class TestCase(mount.TestCase):
    def run_ranks(self, size, body, path):
        """Runs a text in `size` processes of a group."""
        meet = self.temporary(f"meet-{time.monotonic_ns()}")
        text = PROLOGUE.replace("PACKAGE", repr(PACKAGE)) + body + EPILOGUE
        codes, said = SERVER.run(text, [[str(rank), str(size), path, meet] for rank in range(size)], self.scratch)
        self.assertEqual(codes, [0] * size, said)

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
