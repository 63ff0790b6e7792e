"""tools/python: the package `ptc` against a real mount, with processes of torch.distributed where these matter."""
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import models
import mount
import ranks

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/python"))
torch = mount.require("torch")
import ptc  # noqa: E402  pylint: disable=wrong-import-position
from ptc import group  # noqa: E402  pylint: disable=wrong-import-position

SHAPES = {"model.embed_tokens.weight": (256, 16), "model.norm.weight": (16,), "model.layers.0.mlp.up_proj.weight": (36, 16),
          "model.layers.0.mlp.down_proj.weight": (16, 36), "lm_head.weight": (256, 16)}


def whole(name, *shape):
    torch.manual_seed(sum(map(ord, name)))
    return torch.rand(shape)


def tensors_of(model, tp, rank):
    """A rank's tensors as PyTorch's."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    return {t.name: torch.frombuffer(bytearray(t.data), dtype=kinds[t.dtype]).reshape(t.shape)
            for t in model.rank_tensors(tp, 1, rank, 0)}


def blank(value):
    """Of a state the same, with nothing in it."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


class Runs:
    """Unpickling makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (self.path,)


class Package(ranks.TestCase):
    # ---- saving and loading ----

    def test_under_another_tp(self):
        model = models.Llama()
        job = ptc.Job.create(self.mount.path + "/under_another_tp", tp=2)
        for rank in range(2):
            held = tensors_of(model, 2, rank)
            moments = {name: {"exp_avg": tensor.float() * 2, "step": torch.tensor(7.0)} for name, tensor in held.items()}
            ptc.save({"model": held, "optim": {"state": moments, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95)}]},
                      "step": 7, "rng": torch.get_rng_state()}, job.incoming("step7"), rank=rank,
                     files={"config.json": model.config})
        self.assertEqual(ptc.commit(job.incoming("step7")), job.file("checkpoints/step7"))
        self.assertEqual(job.checkpoints(), ["step7"])
        job.set_layout(tp=4)
        for tp, path in ((4, "current"), (2, "checkpoints/step7"), (8, "checkpoints/step7/layouts/tp8-pp1-dp1")):
            for rank in range(tp):
                state = ptc.load(job.file(path), rank=rank)
                expected = tensors_of(model, tp, rank)
                self.assert_equal(state["model"], expected)
                self.assert_equal({name: one["exp_avg"] for name, one in state["optim"]["state"].items()},
                                  {name: tensor.float() * 2 for name, tensor in expected.items()})
                self.assert_equal(state["optim"]["param_groups"], [{"lr": 0.5, "betas": (0.9, 0.95)}])
                self.assertEqual(state["step"], 7)
                torch.set_rng_state(state["rng"])
        self.assertEqual(ptc.Job(job.path).status["layout"], "tp4-pp1-dp1")

    def test_what_is_put_together_again(self):
        job = ptc.Job.create(self.mount.path + "/put_together_again")
        state = {
            "model": {"layers.0.w": torch.rand(3, 4), "head": torch.rand(4), "empty": torch.zeros(0, 4)},
            "optim": {"state": {"layers.0.w": {"exp_avg": torch.rand(3, 4), "step": torch.tensor(3.0), "note": "x"},
                                "head": {"exp_avg": torch.rand(4)}}, "defaults": {"lr": 1e-3, 3: (1, None)}},
            "extra": {"a": {"b": torch.arange(6), "c": [torch.ones(2), {"d.e": torch.zeros(1)}, 5]}},
            "half": {"w": torch.rand(5).bfloat16(), "b": torch.rand(2) > 0.5, "c": torch.rand(2, 2).half()},
            "rng": {"cpu": torch.get_rng_state(), "python": (3, (1, 2), None)}, "bytes": b"\0\1",
            "scheduler": {"last_epoch": 3, "lrs": [0.1, float("inf")]}, "nothing": {}, "list": [[], {}],
        }
        job.save(state, "a")
        loaded = ptc.load(job.file("current"))
        self.assert_equal(loaded, state)
        flat = {"layers.0.w": torch.rand(3, 4), "head": torch.rand(4)}
        job.save(flat, "b")
        self.assert_equal(ptc.load(job.path), flat)

    def test_what_cannot_be_saved(self):
        where = self.temporary("plain")
        for state, reason in (
                ({"optim": {"state": {0: {"exp_avg": torch.ones(1)}}}}, "ptc.optimizer_state"),
                ({"model": {"a.b": {"c.d": torch.ones(1)}}}, "only one key of a path may hold dots"),
                ({"model": {"x": (torch.ones(1), 2)}}, "make it a list"),
                ({"model": {"x": torch.ones(2)}, "what": object()}, "type object cannot be saved"),
                ({"model": {"x": torch.ones(2).to_sparse()}}, "x: a tensor of layout"),
                ({"model": {"x": torch.ones(2, device="meta")}}, "x: a Tensor without memory of its own"),
                ({"a/b": {"x": torch.ones(2)}}, "names a file"), ({"a-0-of-1": {"x": torch.ones(2)}}, "one of a set"),
                ({"model": {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}}, "'a.b'"), ([], "a state is a dict")):
            with self.subTest(reason), self.assertRaisesRegex((TypeError, ValueError), reason):
                ptc.save(state, where)

    def test_a_name_is_no_path(self):
        """Whatever lies where a path leads stays there: begin() removes what a broken attempt of that name has left."""
        job = ptc.Job.create(self.mount.path + "/names")
        kept = self.temporary("mine")
        os.mkdir(kept)
        models.write_file(kept + "/precious", b"x")
        os.mkdir(job.file("incoming/other"))
        models.write_file(job.file("incoming/other/staged"), b"x")
        for name in (kept, "", ".", "..", "../checkpoints", "a/b", ".hidden"):
            with self.subTest(name), self.assertRaisesRegex(ValueError, "a name and no path"):
                job.save({"w": torch.ones(2)}, name)
        self.assertEqual((os.listdir(kept), os.listdir(job.file("incoming/other"))), (["precious"], ["staged"]))
        with self.assertRaises(ValueError):
            ptc.save({"model": {"__metadata__": torch.ones(2)}}, kept)

    def test_many_tensors_and_few_descriptors(self):
        job = ptc.Job.create(self.mount.path + "/many")
        job.save({"model": {f"w{i}": torch.full((2,), i) for i in range(300)}}, "a")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        targets = {f"w{i}": torch.zeros(2, dtype=torch.int64) for i in range(300)}
        ptc.Checkpoint(job.path).fill(targets)
        self.assertEqual([int(target[1]) for target in targets.values()], list(range(300)))

    def test_optimizer_state_of_other_parameters(self):
        model = torch.nn.Linear(2, 2)
        adam = torch.optim.Adam(model.parameters())
        model(torch.ones(2)).sum().backward()
        adam.step()
        state = ptc.optimizer_state(model, adam)
        wrapped = {**state, "state": {"module." + name: values for name, values in state["state"].items()}}
        with self.assertRaisesRegex(KeyError, "module.weight"):
            ptc.load_optimizer_state(model, adam, wrapped)
        with self.assertRaisesRegex(ValueError, "2 groups"):
            ptc.load_optimizer_state(model, adam, {**state, "param_groups": 2 * state["param_groups"]})
        factored = torch.optim.Adafactor(model.parameters())
        factored.step()
        kept = ptc.optimizer_state(model, factored)
        ptc.load_optimizer_state(model, torch.optim.Adafactor(model.parameters()), kept)

    def test_ranks_save_one_behind_the_other_in_the_background(self):
        job = ptc.Job.create(self.mount.path + "/overlap", dp=2)
        self.run_ranks(2, """
job = ptc.Job(path)
futures = [job.save({"w": torch.full((4,), i)}, f"s{i}", wait=False) for i in range(12)]
job.save({"w": torch.ones(4)}, "here")
assert [future.result(60) for future in futures] == [f"{path}/checkpoints/s{i}" for i in range(12)]
""", job.path)
        self.assertEqual(len(job.checkpoints()), 13)

    def test_a_rank_that_fails_anywhere_is_told_to_all(self):
        """Where it is: while the place is made, in the commit itself, and in a save of its own before the commit."""
        job = ptc.Job.create(self.mount.path + "/fails", dp=2)
        self.run_ranks(2, """
from ptc import group
job = ptc.Job(path)
def told(call, mine, others):
    try:
        call()
        raise SystemExit("went well")
    except mine[0] as error:
        assert rank == 1 and mine[1] in str(error), (rank, error)
    except OSError as error:
        assert rank == 0 and others in str(error), (rank, error)
def begin(name):
    if rank == 1: raise NotImplementedError("no place")
    return ptc.Job.incoming(job, name)
job.incoming = begin
told(lambda: job.save({"w": torch.ones(2)}, "a"), (NotImplementedError, "no place"),
     "a was not begun, for another rank could not: rank 1: no place")
del job.incoming
where = job.begin("b")
saved = ptc.save({"w": torch.ones(2), "other": object() if rank else 1}, where, wait=False)
told(lambda: ptc.commit(where), (TypeError, "type object"), "rank 1: other: a value of type object")
told(lambda: ptc.commit(where if rank == 0 else "/nowhere"), (FileNotFoundError, "no job"), "rank 1: [Errno 2] no job")
class Odd(Exception):
    def __init__(self, a, b): super().__init__(a)
def odd(): raise Odd("an odd one", 2)
try:
    group.prepare().together(odd, here=True)
    raise SystemExit("went well")
except (Odd, ptc.PtcError) as error:
    assert isinstance(error, Odd) == (rank == 0) and "an odd one" in str(error), error
job.save({"w": torch.ones(2)}, "b")
""", job.path)
        self.assertEqual(job.checkpoints(), ["b"])

    def test_the_same_name_in_the_background(self):
        """The second waits for the first, and removes nothing of it. It is refused as any name that is there."""
        job = ptc.Job.create(self.mount.path + "/same")
        busy = threading.Event()
        self.addCleanup(busy.set)
        group.in_background(lambda: busy.wait(60))
        first = job.save({"w": torch.ones(4)}, "a", wait=False)
        threading.Timer(0.3, busy.set).start()
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            job.save({"w": torch.zeros(4)}, "a", wait=False)
        self.assertTrue(first.done())
        self.assertEqual(first.result(60), job.file("checkpoints/a"))
        self.assertEqual(ptc.load(job.path)["w"].tolist(), [1, 1, 1, 1])
        self.assertEqual(os.listdir(job.file("incoming")), [])
        with self.assertLogs("ptc") as logs:
            failed = job.save({"w": torch.ones(4), "what": object()}, "b", wait=False)
            self.assertFalse(failed.cancel())
            self.assertEqual(job.save({"w": torch.ones(4)}, "b"), job.file("checkpoints/b"))
        self.assertIn("type object cannot be saved", logs.output[0])
        with self.assertRaises(TypeError):
            failed.result()

    def test_what_is_given_may_change_again(self):
        job = ptc.Job.create(self.mount.path + "/given", tp=2)
        busy = threading.Event()
        self.addCleanup(busy.set)
        group.in_background(lambda: busy.wait(60))
        config, layout, files, lists = {"a": [1]}, {"tp": 1}, {"more/note.txt": bytearray(b"kept")}, [1, {"x": 2}]
        files["config.json"] = config
        saved = job.save({"model": {"w": torch.ones(2)}, "lists": lists}, "a", wait=False, layout=layout, files=files)
        config["a"].append(2)
        layout["tp"] = 4
        files["more/note.txt"][0] = 0
        files["other"] = "x"
        lists[1]["x"] = 3
        busy.set()
        saved.result(60)
        rank = job.file("checkpoints/a/layouts/tp1-pp1-dp1/rank/0")
        self.assertEqual(mount.read_json(rank + "/config.json"), {"a": [1]})
        self.assertEqual((mount.read_text(rank + "/more/note.txt"), os.path.exists(rank + "/other")), ("kept", False))
        self.assertEqual(ptc.load(rank)["lists"], [1, {"x": 2}])
        for name in ("../../../b", "/tmp/x", "ptc.json", "more/../model.safetensors", "."):
            with self.subTest(name), self.assertRaisesRegex(ValueError, "files: "):
                job.save({"model": {"w": torch.ones(2)}}, "b", files={name: "x"})

    def test_little_is_copied_at_a_time(self):
        """Of tensors that do not lie in one piece, as of those of a device, a copy is made; never of all at once."""
        code = ("import sys, resource; sys.path.insert(0, sys.argv[1]); import torch, ptc\n"
                "state = {'model': {f'w{i}': torch.ones(1 << 10, 1 << 12).T for i in range(12)}}\n"  # 192 MiB
                "state['model']['one'] = torch.arange(1 << 25).view(2, -1).T\n"  # and 256
                "ptc.save({'model': {'w': torch.ones(8, 8).T}}, sys.argv[2] + '/first')\n"
                "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
                "ptc.save(state, sys.argv[2])\n"
                "more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
                "assert more < 150 << 10, f'{more >> 10} MiB more'\n"
                "back = ptc.load(sys.argv[2])['model']\n"
                "assert all(torch.equal(back[name], tensor) for name, tensor in state['model'].items())")
        subprocess.run([sys.executable, "-c", code, os.path.dirname(os.path.dirname(ptc.__file__)),
                        self.temporary("copied")], check=True)

    def test_an_older_torch_is_named(self):
        code = ("import sys; sys.path.insert(0, sys.argv[1]); import torch; torch.__version__ = '2.4.1'; import ptc\n"
                "for use in (lambda: ptc.Reader, lambda: ptc.box((2,), None, ())):\n"
                "    try: use(); raise SystemExit('used')\n"
                "    except ImportError as error: assert '2.5 or newer, and this is 2.4.1' in str(error), error")
        subprocess.run([sys.executable, "-c", code, os.path.dirname(os.path.dirname(ptc.__file__))], check=True)

    def test_a_file_of_anybody(self):
        """Of safetensors: what is wrong with it is a ValueError."""
        directory = self.temporary("anybody")
        os.mkdir(directory)
        for header, reason in (('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', ""),
                               ('{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}', "type 'F4'"),
                               ('{"w":{"dtype":[],"shape":[2],"data_offsets":[0,8]}}', "the entry"),
                               ('{"w":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}', "does not lie"),
                               ('{"w":{"dtype":"F32","shape":[2]}}', "the entry"), ('{"w":3}', "the entry"),
                               ('{"w":{"dtype":"F32","shape":["a"],"data_offsets":[0,8]}}', "the entry"),
                               ("", "ended before"), ("[]", "no object")):
            with self.subTest(header):
                models.write_file(directory + "/model.safetensors",
                                  len(header).to_bytes(8, "little") + header.encode() + bytes(8))
                if not reason:
                    self.assertEqual(ptc.load(directory)["model"]["w"].tolist(), [0, 0])
                    continue
                with self.assertRaisesRegex(ValueError, reason):
                    ptc.load(directory)

    def test_mapped_and_once(self):
        """Tensors are the file's memory; writing to one changes nobody else's."""
        job = ptc.Job.create(self.mount.path + "/mapped")
        job.save({"model": {"w": torch.arange(1 << 18, dtype=torch.float32)}}, "a")
        state, again = ptc.load(job.path), ptc.load(job.path)
        with open("/proc/self/maps", encoding="utf-8") as maps:
            self.assertIn("model.safetensors", maps.read())
        state["model"]["w"][5] = -1
        self.assertEqual(again["model"]["w"][5], 5)
        self.assertEqual(ptc.load(job.path)["model"]["w"][5], 5)
        numpy = mount.require("numpy")
        self.assertEqual(ptc.load(job.path, numpy=True)["model"]["w"].dtype, numpy.float32)

    def test_in_the_background(self):
        job = ptc.Job.create(self.mount.path + "/background")
        weight, expected = torch.rand(1000), []
        futures = []
        for step in range(4):
            expected.append(weight.clone())
            futures.append(job.save({"model": {"w": weight}, "step": step}, f"step{step}", wait=False))
            weight += 1  # training goes on
        for step, future in enumerate(futures):
            self.assertEqual(future.result(60), job.file(f"checkpoints/step{step}"))
            self.assert_equal(ptc.load(future.result())["model"]["w"], expected[step])
        self.assertEqual(job.checkpoints(), [f"step{step}" for step in range(4)])
        self.assertEqual(ptc.load(job.path)["step"], 3)

    def test_a_child_that_is_forked(self):
        """Has a thread of its own for what goes on in the background."""
        ptc.save({"w": torch.ones(2)}, self.temporary("parent"), False).result()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(ptc.save({"w": torch.ones(2)}, self.temporary("child"), False).result() != self.temporary("child"))
        self.assertEqual(os.waitpid(child, 0)[1], 0)

    def test_without_torch(self):
        """With NumPy alone."""
        job = ptc.Job.create(self.mount.path + "/without")
        code = ("import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1]); import ptc, numpy\n"
                "job = ptc.Job(sys.argv[2]); state = {'model': {'a.w': numpy.arange(6.).reshape(2, 3)}, 'step': 3}\n"
                "job.save(state, 'a'); back = ptc.load(job.path)\n"
                "assert back['step'] == 3 and (back['model']['a.w'] == state['model']['a.w']).all()\n"
                "assert (ptc.Checkpoint(job.path).read('a.w', ptc.slices.Box((0, 1), (2, 2))) == [[1, 2], [4, 5]]).all()")
        subprocess.run([sys.executable, "-c", code, os.path.dirname(os.path.dirname(ptc.__file__)), job.path], check=True)

    # ---- jobs ----

    def test_refusals_have_the_reason(self):
        job = ptc.Job.create(self.mount.path + "/refusals")
        with self.assertRaisesRegex(ptc.LayoutError, "did you mean 'tp'"):
            job.set_layout(tpp=2)
        with self.assertRaises(OSError):
            models.write_file(job.file("dataset/consumed"), "x")
        with self.assertRaisesRegex(ptc.LayoutError, "did you mean 'tp'"):
            job.wait()
        job.set_layout(tp=1)
        ptc.save(tensors_of(models.Llama(), 2, 0), job.incoming("half"), layout={"tp": 2})
        with self.assertRaisesRegex(ptc.CommitError, "half: .*rank 1.*layout="):
            ptc.commit(job.incoming("half"))
        self.assertTrue(os.path.exists(job.incoming("half") + "/rank/0/model.safetensors"))
        job.save({"w": torch.ones(2)}, "once")
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            job.save({"w": torch.ones(2)}, "once")
        with self.assertRaises(FileNotFoundError):
            ptc.Job(self.scratch)
        with self.assertRaises(ptc.PtcError):
            job.plan(tp=3, dp=-1)

    def test_create_takes_no_edit_back(self):
        """A training script begins with it, each time that it is started."""
        path = self.mount.path + "/begun"
        self.assertEqual(ptc.Job.create(path, dp=2).status["layout"], "tp1-pp1-dp2")
        ptc.Job(path).set_layout(tp=2, dp=1)
        self.assertEqual(ptc.Job.create(path, dp=2).status["layout"], "tp2-pp1-dp1")
        with self.assertRaisesRegex(FileNotFoundError, "not right below a mount of ptcfs"):
            ptc.Job.create(self.scratch + "/elsewhere", dp=2)
        self.assertFalse(os.path.lexists(self.scratch + "/elsewhere"))

    def test_plan_and_watch(self):
        job = ptc.Job.create(self.mount.path + "/watch")
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        ptc.commit(job.incoming("base"))
        self.assertEqual(job.plan(), {})
        self.assertGreater(job.plan(tp=2)["bytes"]["total"], 0)
        seen = []

        def look():
            for layout in ptc.Job(job.path).watch(interval=0.02):
                if layout is not None:
                    seen.append(layout["tp"])
                    if layout["tp"] == 4:
                        return
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        time.sleep(0.3)
        for tp in (2, 4):
            status = job.set_layout(tp=tp)
            self.assertEqual(status["layout"], f"tp{tp}-pp1-dp1")
            time.sleep(0.3)
        watcher.join(30)
        self.assertEqual(seen, [2, 4])
        self.assertEqual(job.plan()["to"], "tp4-pp1-dp1")

    # ---- boxes, and PyTorch's distributed checkpointing ----

    def test_boxes(self):
        model = models.Llama()
        job = ptc.Job.create(self.mount.path + "/boxes")
        model.write_hf(job.incoming("base") + "/rank/0")
        ptc.commit(job.incoming("base"))
        checkpoint = ptc.Checkpoint(job.file("current"))
        tensors = tensors_of(model, 1, 0)
        for name, tensor in tensors.items():
            self.assert_equal(checkpoint.read(name), tensor)
        name = "model.layers.1.mlp.up_proj.weight"
        for part in (((3, 0), (7, 64)), ((3, 5), (1, 9)), ((3, 5), (4, 9)), ((176, 0), (0, 64))):
            part = ptc.slices.Box(*part)
            self.assert_equal(checkpoint.read(name, part), tensors[name][part.slices])
        for part in (((3, 5), (1, 64)), ((-1, 0), (1, 64)), ((0, 0), (177, 64)), ((0,), (9,)), ((0, 0), (1, -1))):
            with self.subTest(part), self.assertRaisesRegex(ValueError, "has no Box"):
                checkpoint.read(name, ptc.slices.Box(*part))
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        checkpoint.fill(target)
        self.assert_equal(target, tensors)
        with self.assertRaisesRegex(KeyError, "no tensor nonesuch"):
            checkpoint.fill({"nonesuch": torch.ones(1)})

    def test_dcp_into_another_mesh(self):
        """tp2 x dp2 with Adam's moments and values, then 3 ranks of FSDP, then all in one process, and by ptc.load under tp."""
        job = ptc.Job.create(self.mount.path + "/dcp")
        self.run_ranks(4, f"""
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
model, moments = {{}}, {{}}
for name, shape in {SHAPES!r}.items():
    cut = [Shard(0), Replicate() if "norm" in name else Shard(1 if "down" in name else 0)]
    model[name] = distribute_tensor(whole(name, *shape), mesh, cut)
    moments[name] = {{"exp_avg": distribute_tensor(whole("m" + name, *shape), mesh, cut), "step": torch.tensor(5.0)}}
state = {{"model": model, "optim": {{"state": moments, "param_groups": [{{"lr": 0.25, "betas": (0.9, 0.95)}}]}}, "epoch": 3}}
dcp.save(state, storage_writer=ptc.Writer(path, "a", files={{"note.txt": "kept"}}))
try:
    dcp.save(state, storage_writer=ptc.Writer(path, "a"))
    raise SystemExit("saved twice")
except dcp.api.CheckpointException as error:
    assert "exists already" in str(error), error
""", job.path)
        self.run_ranks(3, f"""
mesh = init_device_mesh("cpu", (3,))
def empty(shape): return distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])
state = {{"model": {{name: empty(shape) for name, shape in {SHAPES!r}.items()}},
         "optim": {{"state": {{name: {{"exp_avg": empty(shape), "step": torch.tensor(0.0)}} for name, shape in {SHAPES!r}.items()}},
                   "param_groups": [{{"lr": 0.0, "betas": None}}]}}, "epoch": 0}}
dcp.load(state, storage_reader=ptc.Reader(path + "/current"))
for name, shape in {SHAPES!r}.items():
    assert torch.equal(state["model"][name].full_tensor(), whole(name, *shape)), name
    assert torch.equal(state["optim"]["state"][name]["exp_avg"].full_tensor(), whole("m" + name, *shape)), name
    assert state["optim"]["state"][name]["step"] == 5
assert state["epoch"] == 3 and state["optim"]["param_groups"] == [{{"lr": 0.25, "betas": (0.9, 0.95)}}], state
checkpoint = ptc.Checkpoint(path)
loaded = checkpoint.dtensor("model.norm.weight", mesh, [Shard(0)])
assert torch.equal(loaded.full_tensor(), whole("model.norm.weight", 16))
""", job.path)
        state = ptc.load(job.path)
        self.assertEqual((state["epoch"], state["optim"]["param_groups"]), (3, [{"lr": 0.25, "betas": (0.9, 0.95)}]))
        self.assertEqual(mount.read_text(job.file("current/rank/0/note.txt")), "kept")
        job.set_layout(tp=2, dp=2)
        for rank in range(4):
            state = ptc.load(job.file("current"), rank=rank)
            up = "model.layers.0.mlp.up_proj.weight"
            self.assert_equal(state["model"][up], whole(up, 36, 16).chunk(2)[rank % 2])
            self.assert_equal(state["optim"]["state"][up]["exp_avg"], whole("m" + up, 36, 16).chunk(2)[rank % 2])

    def test_dcp_without_the_package(self):
        """What Writer saved, by dcp.load alone: tensors under the names of the state, values not."""
        job = ptc.Job.create(self.mount.path + "/dcp_alone")
        import torch.distributed.checkpoint as dcp
        state = {"model": {"a.w": torch.rand(3, 2)}, "optim": {"state": {"a.w": {"exp_avg": torch.rand(3, 2), "step": torch.tensor(4.0)}},
                                                               "param_groups": [{"lr": 0.5}]}}
        dcp.save(state, storage_writer=ptc.Writer(job, "a"), no_dist=True)
        back = blank(state)
        del back["optim"]["param_groups"]
        dcp.load(back, checkpoint_id=job.file("checkpoints/a/dcp"), no_dist=True)
        self.assert_equal({**back, "optim": {**back["optim"], "param_groups": state["optim"]["param_groups"]}}, state)
        self.assertIn("values that are no tensors", mount.read_text(job.file("checkpoints/a/dcp/LEFT_OUT.txt")))

    def test_dcp_of_any_nesting(self):
        """Writer's checkpoints are what was given, by Reader and by load; so are those of save, by Reader."""
        job = ptc.Job.create(self.mount.path + "/dcp_nesting")
        import torch.distributed.checkpoint as dcp
        one, two = torch.rand(3, 2), torch.arange(4)
        for number, state in enumerate((
                {"w": one, "model": {"a.b": two}}, {"model": {"b": {"c": one}}, "w": two, "epoch": 3},
                {"model": one, "w": two}, {"gan": {"model": {"w": one}}, "other": {"model": {"w": two}}},
                {"app": {"model": {"w": one}, "n": 1}}, {"model": {"w": one}, "ema": {"model": {"w": two}}},
                {"list": [1, one, {"x.y": [two]}], "model": {"w": two}}, {"model": {"w": one}, "../..": {"w": two}},
                {"zoo": {"w": one}, "a": {"w": two}, "model": {"w": one + 1}})):
            for writes in ("dcp", "ptc"):
                with self.subTest(number=number, writes=writes):
                    name = f"{writes}{number}"
                    if writes == "dcp":
                        dcp.save(state, storage_writer=ptc.Writer(job, name), no_dist=True)
                    elif "../.." in state:
                        continue
                    else:
                        job.save(state, name)
                    self.assert_equal(ptc.load(job.file("checkpoints", name)), state)
                    back = blank(state)
                    dcp.load(back, storage_reader=ptc.Reader(job.file("checkpoints", name)), no_dist=True)
                    self.assert_equal(back, state)
        bare = {"w": torch.zeros(3, 2)}
        dcp.load(bare, storage_reader=ptc.Reader(job.file("checkpoints/ptc8")), no_dist=True)
        self.assert_equal(bare["w"], one + 1)  # the model's, of several
        with self.assertRaisesRegex(BaseException, "a_b.* would both be"):
            dcp.save({"a.b": {"w": one}, "a_b": {"w": two}}, storage_writer=ptc.Writer(job, "both"), no_dist=True)

    def test_dcp_runs_no_code(self):
        job = ptc.Job.create(self.mount.path + "/dcp_code")
        import torch.distributed.checkpoint as dcp
        for name, value in (("a", Runs(self.temporary("has_run"))), ("b", {"betas": (0.9, 0.95), "w": torch.ones(2)})):
            dcp.save({"w": torch.ones(2), "value": value}, storage_writer=ptc.Writer(job, name), no_dist=True)
        shutil.rmtree(self.temporary("has_run"), ignore_errors=True)

        def load(name, value=None, **options):
            state = {"w": torch.zeros(2), "value": value}
            dcp.load(state, storage_reader=ptc.Reader(job.file("checkpoints", name), **options), no_dist=True)
            return state
        with self.assertRaisesRegex(BaseException, "value is no value .*os.makedirs.* weights_only=False"):
            load("a")
        with self.assertRaisesRegex(ValueError, "ptc.Reader"):
            ptc.load(job.file("checkpoints/a"))
        self.assertFalse(os.path.exists(self.temporary("has_run")))
        value = load("b", {"betas": None, "w": torch.zeros(2)})["value"]
        self.assertEqual((value["betas"], value["w"].tolist()), ((0.9, 0.95), [1, 1]))
        load("a", weights_only=False)
        self.assertTrue(os.path.exists(self.temporary("has_run")))

    def test_dcp_reads_what_ranks_saved(self):
        job = ptc.Job.create(self.mount.path + "/dcp_of_ranks", tp=2)
        model = models.Llama()
        for rank in range(2):
            held = tensors_of(model, 2, rank)
            ptc.save({"model": held, "optim": {"state": {name: {"exp_avg": tensor.float()} for name, tensor in held.items()},
                                               "param_groups": [{"lr": 0.5}]}, "step": 9}, job.incoming("a"), rank=rank,
                     files={"config.json": model.config})
        ptc.commit(job.incoming("a"))
        import torch.distributed.checkpoint as dcp
        tensors = tensors_of(model, 1, 0)
        state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
                 "optim": {"state": {name: {"exp_avg": torch.zeros(tensor.shape)} for name, tensor in tensors.items()},
                           "param_groups": [{"lr": 0.0}]}, "step": 0}
        dcp.load(state, storage_reader=ptc.Reader(job.path), no_dist=True)
        self.assert_equal(state["model"], tensors)
        self.assert_equal({name: one["exp_avg"] for name, one in state["optim"]["state"].items()},
                          {name: tensor.float() for name, tensor in tensors.items()})
        self.assertEqual((state["step"], state["optim"]["param_groups"][0]["lr"]), (9, 0.5))

    def test_one_rank_that_cannot_save_is_told_to_all(self):
        job = ptc.Job.create(self.mount.path + "/one_rank", dp=2)
        self.run_ranks(2, """
job = ptc.Job(path)
try:
    job.save({"w": torch.ones(2), "other": object() if rank else 1}, "a")
    raise SystemExit("saved")
except TypeError as error:
    assert rank == 1 and "type object" in str(error), error
except OSError as error:
    assert rank == 0 and "rank 1: other: a value of type object" in str(error), error
job.save({"w": torch.ones(2)}, "a")
""", job.path)
        self.assertEqual(job.checkpoints(), ["a"])

    def test_fsdp_saves_its_own_rows(self):
        """fully_shard's parameters and Adam's moments as they are; another number of ranks loads its own rows and goes on."""
        job = ptc.Job.create(self.mount.path + "/fsdp", dp=3, optimizer="fsdp")
        body = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 7, bias=False))
for layer in model: fully_shard(layer)
fully_shard(model)
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 6)).square().sum().backward(); adam.step(); adam.zero_grad()
def whole_state():
    return [x.full_tensor() for p in model.parameters() for x in (p, adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])]
"""
        self.run_ranks(3, body + """
step(); step()
job = ptc.Job(path)
future = job.save({"model": model.state_dict(), "optim": ptc.optimizer_state(model, adam), "step": 2}, "two", wait=False)
step()
assert future.result(60) == path + "/checkpoints/two"
torch.save(whole_state(), path + f"/three-{rank}.pt")
""", job.path)
        job.set_layout(dp=2)
        self.run_ranks(2, body + """
state = ptc.load(path + "/current")
for name, parameter in model.named_parameters():
    with torch.no_grad(): parameter.to_local().copy_(state["model"][name])
ptc.load_optimizer_state(model, adam, state["optim"])
step()
for a, b in zip(whole_state(), torch.load(path + "/three-0.pt")):
    assert torch.allclose(a, b, rtol=1e-5), (a, b)
""", job.path)


if __name__ == "__main__":
    mount.main()
