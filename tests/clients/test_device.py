"""ptc.load and ptc.save between files and a GPU, on a stand-in for NVIDIA's driver: it does what a stream is told when
somebody waits for it, and what it was not given back is counted. Memory of the "device" is the stand-in's.
"""
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
import unittest.mock

import models
import mount
import ranks
import users

sys.path.insert(0, ranks.PACKAGE)
torch = mount.require("torch")
mount.require("numpy")
import ptc  # noqa: E402  pylint: disable=wrong-import-position
from ptc import device as gpus, pages  # noqa: E402  pylint: disable=wrong-import-position

STAND_IN = os.path.join(os.path.dirname(mount.bin_dir()), "stand_in")
GPU = "cuda:0"


class Memory:
    """Of the stand-in's device, as tensors that PyTorch thinks are of the host."""

    def __init__(self):
        self.driver = gpus.driver_of(GPU)
        self.addresses = {}

    def empty(self, size, _device):
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        address = ctypes.c_uint64()
        with self.driver.entered():
            self.driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.addresses[address.value] = size
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address.value), dtype=torch.uint8)

    def has(self, tensor):
        return any(begin <= tensor.data_ptr() < begin + size for begin, size in self.addresses.items())

    def put(self, tensor):
        """A copy of it."""
        there = self.empty(tensor.numel() * tensor.element_size(), GPU).view(tensor.dtype).view(tensor.shape)
        there.copy_(tensor)
        return there

    def free(self):
        while self.addresses:
            self.driver.call("cuMemFree_v2", ctypes.c_uint64(self.addresses.popitem()[0]))


@contextlib.contextmanager
def on_stand_in(**sizes):
    """`sizes`: of ptc.device, so that small files have several windows."""
    memory = Memory()
    with contextlib.ExitStack() as held:
        for name, value in {"empty": memory.empty, "settle": lambda _: None, "bytes_free": lambda _: 0, **sizes}.items():
            held.enter_context(unittest.mock.patch.object(gpus, name, value))
        held.enter_context(unittest.mock.patch.object(
            gpus, "gpu_of", lambda one: torch.device(GPU) if torch.is_tensor(one) and memory.has(one) else None))
        held.enter_context(unittest.mock.patch.object(gpus, "driver_of", lambda _: memory.driver))
        yield memory
    memory.free()


SMALL = {"_WINDOW_BYTES": 1 << 16, "_BLOCK_BYTES": 1 << 14, "_BUFFER_BYTES": 1 << 13, "_OWN_BYTES": 1 << 12}
CASES = ("", "register", "read_only", "register,read_only")


def refuses(what):
    return unittest.mock.patch.dict(os.environ, {"PTC_STAND_IN_REFUSES": what})


def committed(daemon):
    """A job with a checkpoint `base` of a Llama."""
    job = daemon.job("llama")
    models.Llama().write_hf(job.incoming("base") + "/rank/0")
    job.commit("base")
    return job


class Loads(mount.TestCase):
    mount_options = ("--memory", "256M")  # of which pages can be registered
    only_root = "can mount a tmpfs for the store"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.job = committed(cls.mount)
        cls.job.set_layout(tp=2)

    def check(self, where, rank, **sizes):
        expected = ptc.load(where, rank=rank)
        with on_stand_in(**sizes) as memory:
            found = ptc.load(where, GPU, rank=rank)
            context = ctypes.c_void_p()
            memory.driver.call("cuCtxGetCurrent", ctypes.byref(context))
            self.assertFalse(context.value, "the thread's current device is what it was")
            self.assertEqual(list(found), list(expected))
            for section, tensors in expected.items():
                if not isinstance(tensors, dict):
                    continue
                self.assertEqual(list(found[section]), list(tensors))
                for name, tensor in tensors.items():
                    self.assertTrue(memory.has(found[section][name]) or tensor.numel() == 0, name)
                    self.assertEqual(found[section][name].dtype, tensor.dtype)
                    self.assertTrue(torch.equal(found[section][name], tensor), name)
            return memory.addresses

    def test_stored_and_computed_files(self):
        checkpoint = self.job.path + "/checkpoints/base"
        for layout in ("tp2-pp1-dp1", "tp1-pp1-dp1", "tp4-pp1-dp1", "tp1-pp2-dp1", "tp2-pp1-dp2-fsdp", "tp2-pp1-dp2-zero1"):
            for what in CASES:
                for sizes in ({}, SMALL):
                    with self.subTest(layout=layout, refuses=what, small=bool(sizes)), refuses(what):
                        where = f"{checkpoint}/layouts/{layout}"
                        last = len(os.listdir(where + "/rank")) - 1
                        self.check(where, 0, **sizes)
                        self.check(where, last, **sizes)

    def test_hf(self):
        self.check(self.job.path + "/checkpoints/base/hf", 0, **SMALL)

    def test_small_tensors_that_lie_together_share_memory(self):
        where = self.job.path + "/checkpoints/base/layouts/tp2-pp1-dp1"
        tensors = ptc.load(where, rank=0)["model"]
        self.assertLess(len(self.check(where, 0)), len(tensors))
        for address in self.check(where, 0, **SMALL):
            self.assertEqual(address % 16, 0)

    def test_a_driver_that_fails_leaves_nothing(self):
        where = self.job.path + "/checkpoints/base/layouts/tp2-pp1-dp1"
        with refuses("register,pinned"), on_stand_in(), self.assertRaisesRegex(OSError, "cuMemHostAlloc: out of memory"):
            ptc.load(where, GPU, rank=0)

    def test_who_does_not_want_it(self):
        with unittest.mock.patch.dict(os.environ, {"PTC_DEVICE_COPIES": "0"}):
            self.assertIsNone(gpus.driver_of(GPU))
        self.assertIsNone(gpus.driver_of("cpu"))

    def test_a_device_that_is_not_there(self):
        with self.assertLogs("ptc", "INFO") as said:
            self.assertIsNone(gpus.driver_of("cuda:7"))
        self.assertIn("cuda:7 is reached by PyTorch's own copies alone", said.output[0])


class Saves(mount.TestCase):
    mount_options = ("--memory", "512M")
    only_root = "can mount a tmpfs for the store"

    def state(self):
        torch.manual_seed(1)
        return {"model": {f"layer{i}.weight": torch.randn(300, 1000 + i) for i in range(5)},
                "optim": {"state.layer0.weight.exp_avg": torch.randn(1000, 700), "state.layer0.weight.step": torch.tensor(3.0)},
                "step": 7}

    def on_device(self, state, memory):
        return {key: {name: memory.put(tensor) if tensor.numel() > 1 else tensor.clone() for name, tensor in value.items()}
                if isinstance(value, dict) else value for key, value in state.items()}

    def compare(self, path, state):
        found = ptc.load(path, rank=0)
        for section in ("model", "optim"):
            for name, tensor in state[section].items():
                self.assertTrue(torch.equal(found[section][name], tensor), name)
        self.assertEqual(found["step"], state["step"])

    def test_what_is_on_a_device(self):
        state = self.state()
        for number, what in enumerate(CASES):
            for sizes in ({}, SMALL):
                with self.subTest(refuses=what, small=bool(sizes)), refuses(what), on_stand_in(**sizes) as memory:
                    job = ptc.Job.create(f"{self.mount.path}/saves{number}{len(sizes)}")
                    made = self.on_device(state, memory)
                    made["model"]["layer4.weight"] = made["model"]["layer4.weight"].t()  # not in one piece
                    with unittest.mock.patch.object(gpus, "store", wraps=gpus.store) as stored:
                        where = job.save(made, "step1")
                    self.assertEqual(stored.call_count, 2)
                    expected = self.state()
                    expected["model"]["layer4.weight"] = expected["model"]["layer4.weight"].t()
                    self.compare(where, expected)

    def test_training_goes_on_while_a_copy_is_saved(self):
        job = ptc.Job.create(self.mount.path + "/snapshot")
        state = self.state()
        with on_stand_in() as memory:
            made = self.on_device(state, memory)

            def saved(name, free):
                for section in ("model", "optim"):
                    for key, tensor in state[section].items():
                        made[section][key].copy_(tensor)
                with unittest.mock.patch.object(gpus, "bytes_free", lambda _: free), \
                        unittest.mock.patch.object(gpus, "mark", lambda _: lambda: None), \
                        unittest.mock.patch.object(gpus, "snapshot", wraps=gpus.snapshot) as asked:
                    future = job.save(made, name, wait=False)
                    for section in ("model", "optim"):
                        for tensor in made[section].values():
                            tensor.zero_()
                    self.assertEqual(asked.call_count, 1)
                return future.result()
            self.compare(saved("step1", 1 << 30), state)
            self.compare(saved("step2", 1 << 20), state)  # there is no room for a copy

    def test_a_driver_that_can_do_nothing(self):
        """PyTorch's own copies are left; here all is in the host's memory anyway."""
        job = ptc.Job.create(self.mount.path + "/without")
        with refuses("register,pinned"), on_stand_in() as memory, self.assertLogs("ptc", "INFO") as said, \
                unittest.mock.patch.dict(gpus._told, clear=True):
            self.compare(job.save(self.on_device(self.state(), memory), "step1"), self.state())
        self.assertIn("PyTorch copies what is saved: ", said.output[-1])

    def test_no_room_on_the_host(self):
        with on_stand_in() as memory:
            job = ptc.Job.create(self.mount.path + "/full")
            with unittest.mock.patch.object(ptc.safetensors, "_take_space", side_effect=OSError(28, "No space left on device")), \
                    self.assertRaisesRegex(OSError, "No space left"):
                job.save(self.on_device(self.state(), memory), "step1")
            self.assertEqual([name for name in os.listdir(job.path + "/incoming") if "step1" in name
                              and os.listdir(job.path + "/incoming/" + name + "/rank/0")], [])


class InTheDevicesMemory(mount.TestCase):
    """Of a daemon that has the same device."""
    mount_options = ("--memory", "256M", "--gpu", "0", "-o", "allow_other")
    only_root = "can mount a tmpfs for the store"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.job = committed(cls.mount)
        cls.expected = [ptc.load(cls.job.path + "/checkpoints/base/layouts/tp2-pp1-dp1", rank=rank, copy=True) for rank in range(2)]
        cls.job.set_layout(tp=2, memory="device")

    def compare(self, found, rank):
        expected = self.expected[rank]["model"]
        self.assertEqual(list(found["model"]), list(expected))
        for name, tensor in expected.items():
            self.assertTrue(torch.equal(found["model"][name], tensor), name)

    def mapped(self):
        """How many mappings of a device's memory this process has."""
        return mount.read_text("/proc/self/maps").count("memfd:stand-in")

    def test_the_very_memory(self):
        def wrap(owner, address, size, _device):
            memory = (ctypes.c_ubyte * size).from_address(address)
            memory.owner = owner
            return torch.frombuffer(memory, dtype=torch.uint8)
        with on_stand_in() as memory, unittest.mock.patch.object(gpus, "wrap", wrap):
            for rank in range(2):
                found = ptc.load(self.job.path + "/current", GPU, rank=rank, shared=True)
                self.assertEqual(self.mapped(), 1)
                self.assertFalse(memory.addresses, "nothing is copied")
                self.compare(found, rank)
                address = found["model"]["model.norm.weight"].data_ptr()
                rights = [line.split()[1] for line in mount.read_text("/proc/self/maps").splitlines()
                          if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)]
                self.assertEqual(rights, ["r--s"])
                del found
                self.assertEqual(self.mapped(), 0)

    def test_a_copy_of_it(self):
        with on_stand_in() as memory:
            for rank in range(2):
                found = ptc.load(self.job.path + "/current", GPU, rank=rank)
                self.assertEqual(self.mapped(), 0)
                self.assertTrue(all(map(memory.has, found["model"].values())))
                self.compare(found, rank)

    def test_another_device_and_others_read_it(self):
        with on_stand_in() as memory:
            memory.driver.uuid = bytes(16)
            self.addCleanup(setattr, memory.driver, "uuid", gpus.Driver(0).uuid)
            self.compare(ptc.load(self.job.path + "/current", GPU, rank=1, shared=True), 1)
        self.compare(ptc.load(self.job.path + "/current", rank=0, copy=True), 0)

    def test_who_may_not_have_it_reads_it(self):
        os.chmod(self.mount.top, 0o755)

        def ask():
            file = os.open(self.job.path + "/current/rank/0/model.safetensors", os.O_RDONLY)
            return str(pages.ask(file)) + str(len(os.read(file, 100)))
        self.assertRegex(users.run_as((41001, 42001), ask), r"^(None|Found\(descriptor=-1, gpu=b'', size=0\))100$")  # no GPU's

    def test_processes_that_are_killed_leave_nothing(self):
        descriptors = f"/proc/{self.mount.process.pid}/fd"
        path = self.job.path + "/current/rank/0/model.safetensors"
        before = len(os.listdir(descriptors))
        for _ in range(100):
            child = os.fork()
            if child == 0:
                try:
                    with open(path, "rb") as file:
                        borrowed = gpus.Borrowed.of(gpus.Driver(0), pages.ask(file.fileno()))
                        os.kill(os.getpid(), signal.SIGKILL * bool(borrowed))
                except BaseException:  # pylint: disable=broad-except
                    traceback.print_exc()
                finally:
                    os._exit(1)
            self.assertEqual(os.waitpid(child, 0)[1], signal.SIGKILL)
        self.assertLessEqual(len(os.listdir(descriptors)), before + 4)


def run_on_the_stand_in():
    """In a process that finds it, and says at its end what was not given back."""
    left = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"ptc-stand-in-{os.getpid()}")
    done = subprocess.run([sys.executable, "-B", *sys.argv], check=False, env={
        **os.environ, "LD_LIBRARY_PATH": STAND_IN, "PTC_STAND_IN_LEFT": left})
    if done.returncode:
        sys.exit(done.returncode)
    with open(left, encoding="utf-8") as file:
        ended = [json.loads(line) for line in file]
    os.unlink(left)
    for numbers in ended:
        print("at the end:", numbers)
        for what in ("allocated", "pinned", "registered", "queues"):
            assert numbers[what] == 0, f"{numbers[what]} left: {what}"
    own = max(ended, key=lambda numbers: numbers["most_registered"])  # the others are daemons'
    assert own["copied_unpinned"] == 0, "bytes went through memory that the device cannot read by itself"
    assert own["most_registered"] > 4


if __name__ == "__main__":
    if not os.path.exists(STAND_IN + "/libcuda.so.1"):
        mount.skip("the stand-in for the driver is not built")
    if "PTC_STAND_IN_LEFT" in os.environ:
        mount.main()
    run_on_the_stand_in()
