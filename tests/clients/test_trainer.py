"""The callback for Hugging Face's Trainer, of several ranks: what each has written, also on another node; FSDP's state.

What goes on from a checkpoint must come out as what was never interrupted, so everything of every rank is there.
"""
import importlib.util
import os
import shutil
import sys
import tempfile
import unittest

import mount

for wanted in ("torch", "transformers", "accelerate"):
    mount.require(wanted)
import ranks  # noqa: E402  pylint: disable=wrong-import-position
import test_frameworks as frameworks  # noqa: E402  pylint: disable=wrong-import-position
from test_frameworks import ptc, torch  # noqa: E402  pylint: disable=wrong-import-position
from ptc.job import remove  # noqa: E402  pylint: disable=wrong-import-position
from safetensors.torch import load_file  # noqa: E402  pylint: disable=wrong-import-position

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../cluster"))
import cluster  # noqa: E402  pylint: disable=wrong-import-position

# With dropout: the state of each rank's random numbers tells.
RUN = """
import accelerate
from ptc.trainer import Callback
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
job_path, how, steps, out = sys.argv[4], sys.argv[5], int(sys.argv[6]), sys.argv[7]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
more = {}
if how.startswith("deepspeed"):
    import deepspeed, deepspeed.comm.torch
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", init_method="file://" + meet, rank=rank, world_size=size)
    more = {"deepspeed": {"zero_optimization": {"stage": int(how[-1])}, "zero_allow_untested_optimizer": True,
                          "train_micro_batch_size_per_gpu": "auto", "checkpoint": {"load_universal": True}}}
    begin = accelerate.state.AcceleratorState.__init__

    def on_a_processor(self, *arguments, deepspeed_plugin=None, **others):  # which accelerate leaves out
        begin(self, *arguments, deepspeed_plugin=deepspeed_plugin, **others)
        if deepspeed_plugin is not None:
            self.distributed_type, self.deepspeed_plugins = accelerate.DistributedType.DEEPSPEED, deepspeed_plugin
            plugin = next(iter(deepspeed_plugin.values())) if isinstance(deepspeed_plugin, dict) else deepspeed_plugin
            plugin.set_mixed_precision("no")
            plugin.select(_from_accelerator_state=True)
    accelerate.state.AcceleratorState.__init__ = on_a_processor
else:
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=size)
if how.endswith("STATE_DICT"):
    more = {"fsdp": True, "fsdp_config": {"state_dict_type": how, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
    begin = accelerate.state.AcceleratorState.__init__

    def on_a_processor(self, *arguments, fsdp_plugin=None, **others):  # which accelerate does not do by itself
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **others)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = accelerate.DistributedType.FSDP, fsdp_plugin
    accelerate.state.AcceleratorState.__init__ = on_a_processor
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=256, tie_word_embeddings=False, attention_dropout=0.5))
samples = [{"input_ids": torch.tensor([n % 7, 1, 2, 3]), "labels": torch.tensor([n % 7, 1, 2, 3])} for n in range(64)]
callback = Callback(job_path)
output = os.path.join(job_path, "incoming/trainer")
os.makedirs(output, exist_ok=True)
arguments = TrainingArguments(output, max_steps=steps, save_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
                              learning_rate=0.01, **more)
def everything(model):  # parameters, and the state of random numbers
    if how.startswith("deepspeed"):
        from deepspeed.utils import safe_get_full_fp32_param as full  # its steps from there tell of the moments
        return [full(one).clone() for one in trainer.model_wrapped.module.parameters()] + [torch.get_rng_state()]
    parameters = [one.detach().full_tensor() if hasattr(one, "full_tensor") else one.detach().clone() for one in model.parameters()]
    return [*parameters, torch.get_rng_state()]
class Begins(TrainerCallback):
    def on_train_begin(self, *_, model=None, **__):
        self.found = everything(model) if latest or not how.startswith("deepspeed") else []  # which has no moments at first
begins = Begins()
trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[callback, begins])
latest = callback.latest
trainer.train(resume_from_checkpoint=latest)
torch.save([latest and os.path.relpath(latest, job_path) if not how.startswith("deepspeed") else latest and os.path.relpath(
    os.path.realpath(latest + "/model.safetensors"), job_path), begins.found, everything(trainer.model)], f"{out}-{rank}")
"""


def run(scratch, paths, how, steps, out):
    """A rank for each path of the job, to so many steps; of each where it began, and all that it had then and at the end."""
    meet = os.path.join(scratch, f"meet-{out}")
    text = frameworks.PROLOGUE.replace("if size > 1 or NEEDS_GROUP:", "if False:") + RUN + frameworks.EPILOGUE
    words = [[str(rank), str(len(paths)), meet, path, how, str(steps), os.path.join(scratch, out)] for rank, path in enumerate(paths)]
    codes, said = ranks.SERVER.run(text, words, scratch)
    assert codes == [0] * len(paths), said
    return [torch.load(os.path.join(scratch, f"{out}-{rank}")) for rank in range(len(paths))]


class Common(unittest.TestCase):
    """`paths`: the job as each rank sees it."""

    def setUp(self):
        self.scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)

    def goes_on(self, paths, how, place):
        """Four steps; and two, that go on from the second to the fourth."""
        job = ptc.Job(paths[0])
        whole = run(self.scratch, paths, how, 4, "whole")
        self.assertEqual(job.checkpoints(), ["checkpoint-2", "checkpoint-4"])
        self.assertEqual([os.listdir(path + "/incoming/trainer") for path in paths], [[]] * len(paths))
        remove(job.file("checkpoints/checkpoint-4"))
        for (_, _, found), (_, _, expected) in zip(self.resumed(paths, how, place), whole):
            self.same(found, expected)
        self.assertEqual(job.checkpoints(), ["checkpoint-2", "checkpoint-4"])
        return whole[0][2]

    def resumed(self, paths, how, place):
        found = run(self.scratch, paths, how, 4, f"resumed-{len(paths)}")
        self.assertEqual([begun for begun, _, _ in found], [place] * len(paths))
        return found

    def same(self, found, expected):
        self.assertEqual(len(found), len(expected))
        for number, (one, other) in enumerate(zip(found, expected)):
            self.assertTrue(torch.equal(one, other), number)


class Trees(ranks.TestCase):
    """Directories as two nodes have them: of rank 0, and of ranks 1 and 2."""
    SAVE = """
from ptc import group, trees
node = os.path.join(path, str(min(rank, 1)))
source, target = node + "/source", node + "/to/rank/0"
def write(name, content):
    os.makedirs(os.path.dirname(f"{source}/{name}"), exist_ok=True)
    with open(f"{source}/{name}", "wb") as file: file.write(content)
def everything(top):
    return {os.path.relpath(os.path.join(where, name), top): open(os.path.join(where, name), "rb").read()
            for where, _, names in os.walk(top) for name in names}
write(f"own_{rank}", b"own")
write(f"tree/deep/{rank}", bytes([rank]) * (rank * 1000 + 1))
write("tree/empty_%d" % rank, b"")
if rank < 2: write("tree/same", bytes([rank]))
processes = group.prepare()
"""

    def test_each_node_moves_its_own(self):
        self.run_ranks(3, self.SAVE + """
trees.move(processes, source, target)
assert not os.path.exists(source)
wanted = {}
for one in (0,) if rank == 0 else (1, 2):
    wanted.update({f"own_{one}": b"own", f"tree/deep/{one}": bytes([one]) * (one * 1000 + 1), f"tree/empty_{one}": b""})
if rank == 0: wanted["tree/same"] = bytes([0])
assert everything(target) == wanted, everything(target)
""", self.scratch)

    def test_all_see_one_directory(self):
        """Which a network's file system may be: one of them moves it."""
        self.run_ranks(3, self.SAVE.replace("min(rank, 1)", "0") + """
trees.move(processes, source, target)
assert not os.path.exists(source) and len(everything(target)) == 10, everything(target)
""", self.scratch)

    def test_some_have_written_nothing(self):
        self.run_ranks(3, self.SAVE + """
import shutil
dist.barrier()
if rank == 1: shutil.rmtree(source)
dist.barrier()
trees.move(processes, source, target)
assert len(everything(target)) == (4 if rank == 0 else 0), everything(target)
""", self.scratch)

    def test_marks_of_former_calls(self):
        """What processes left that were killed says nothing of who leads now, and is no file of the checkpoint."""
        self.run_ranks(3, self.SAVE + """
if rank > 0: write(".ptc-rank-0", b""); write(".ptc-rank-0123456789abcdef-0", b"")
trees.move(processes, source, target)
assert not os.path.exists(source)
assert len(everything(target)) == (4 if rank == 0 else 6), everything(target)
assert not [name for name in everything(target) if "ptc-rank" in name], everything(target)
""", self.scratch)

    def test_no_marks_stay(self):
        """Where one fails in between; and what it failed at goes well the next time."""
        for failing in (0, 1):
            for call in ("listdir", "isdir"):
                self.run_ranks(3, self.SAVE + f"""
at = os if "{call}" == "listdir" else os.path
plain = at.{call}
def fail(name, *rest):
    if str(name).endswith("source"): raise OSError("not today")
    return plain(name, *rest)
dist.barrier()
if rank == {failing}: at.{call} = fail
try:
    trees.move(processes, source, target)
    raise SystemExit("moved")
except OSError as error:
    assert "not today" in str(error), error
at.{call} = plain
dist.barrier()
assert os.path.exists(source) and not [name for name in everything(source) if "ptc-rank" in name], everything(source)
dist.barrier()
trees.move(processes, source, target)
assert not os.path.exists(source) and len(everything(target)) == (4 if rank == 0 else 6), everything(target)
""", self.temporary(f"{failing}-{call}"))

    def test_one_that_fails(self):
        """All learn it, and none waits."""
        for failing in (0, 1):
            self.run_ranks(3, self.SAVE + f"""
if rank == {failing}: open(node + "/to", "w").close()
dist.barrier()
try:
    trees.move(processes, source, target)
    raise SystemExit("moved")
except OSError as error:
    assert "to/rank" in str(error) and (rank == {failing} or "rank {failing}: " in str(error)), error
""", self.temporary(str(failing)))


class OneNode(Common, mount.TestCase):
    def test_ddp(self):
        job = ptc.Job.create(self.mount.path + "/ddp")
        self.goes_on([job.path] * 2, "ddp", "checkpoints/checkpoint-2/layouts/tp1-pp1-dp1/rank/0")

    def test_sharded_state_of_fsdp(self):
        """Also on other numbers of ranks; its tensors are cut by layouts as any other's."""
        job = ptc.Job.create(self.mount.path + "/sharded")
        whole = self.goes_on([job.path] * 2, "SHARDED_STATE_DICT", "checkpoints/checkpoint-2/dcp")
        for size in (1, 3):
            for _, began_with, _ in self.resumed([job.path] * size, "SHARDED_STATE_DICT", "checkpoints/checkpoint-4/dcp"):
                self.same(began_with[:-1], whole[:-1])
            for name in job.checkpoints()[2:]:
                remove(job.file("checkpoints", name))
        job.set_layout(tp=2)
        for rank in range(2):
            state = load_file(job.file("current/rank", rank, "pytorch_model_fsdp_0/model.safetensors"))
            self.assertEqual(state["model.layers.0.mlp.up_proj.weight"].shape, (24, 32))
        self.assertIn("config.json", os.listdir(job.file("checkpoints/checkpoint-4/hf")))


    @unittest.skipUnless(importlib.util.find_spec("deepspeed"), "Python has no deepspeed here")
    def test_deepspeed(self):
        """The engine goes on with all it had; on other numbers of ranks it has the same parameters."""
        place = "checkpoints/checkpoint-2/layouts/tp1-pp1-dp1/rank/0/model.safetensors"
        for stage in (1, 2):
            with self.subTest(stage=stage):
                job = ptc.Job.create(self.mount.path + f"/deepspeed-{stage}")
                shutil.rmtree(self.scratch)
                os.mkdir(self.scratch)
                whole = self.goes_on([job.path] * 2, f"deepspeed-{stage}", place)
                for size in (1, 4):
                    for _, began_with, _ in self.resumed([job.path] * size, f"deepspeed-{stage}", place.replace("point-2", "point-4")):
                        self.same(began_with[:-1], whole[:-1])
                    for name in job.checkpoints()[2:]:
                        remove(job.file("checkpoints", name))


class TwoNodes(Common):
    """Each rank on the mount of its node; the third on that of the second."""

    @classmethod
    def setUpClass(cls):
        try:
            cls.nodes = cluster.Cluster(2)
        except SystemExit:
            raise unittest.SkipTest("no cluster here") from None
        cls.nodes.__enter__()
        cls.addClassCleanup(cls.nodes.__exit__)

    def paths(self, name):
        ptc.Job.create(self.nodes.path(0, name))
        self.nodes.wait_settled(name)
        return [self.nodes.path(node, name) for node in (0, 1, 1)]

    def test_ddp(self):
        paths = self.paths("ddp")
        self.goes_on(paths, "ddp", "checkpoints/checkpoint-2/layouts/tp1-pp1-dp1/rank/0")
        for path in paths:
            names = os.listdir(path + "/checkpoints/checkpoint-4/layouts/tp1-pp1-dp1/rank/0")
            self.assertEqual([name for name in sorted(names) if "rng" in name], [f"rng_state_{rank}.pth" for rank in range(3)])

    def test_sharded_state_of_fsdp(self):
        self.goes_on(self.paths("sharded"), "SHARDED_STATE_DICT", "checkpoints/checkpoint-2/dcp")


if __name__ == "__main__":
    mount.main()
