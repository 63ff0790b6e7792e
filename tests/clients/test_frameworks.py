"""The pages of tools/python/README.md: each block is run as it stands, on a real mount.

What a page does not say is here: a small model for it, in as many processes, and what must hold afterwards. Pages of
frameworks that are not installed are skipped.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap

import models
import mount
import ranks

HERE = os.path.dirname(os.path.abspath(__file__))
PYTHON = os.path.join(HERE, "../../tools/python")
torch = mount.require("torch")
sys.path.insert(0, PYTHON)
import ptc  # noqa: E402  pylint: disable=wrong-import-position

PROLOGUE = f"""
import os, sys
sys.path[:0] = [{PYTHON!r}, {HERE!r}]
import torch, torch.distributed as dist
import ptc
rank, size, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(1)
os.environ.update(HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu")
if size > 1 or NEEDS_GROUP:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method="file://" + meet, rank=rank, world_size=size)
def same(a, b):
    assert len(a) == len(b) and len(a) > 0, (len(a), len(b))
    for x, y in zip(a, b): assert torch.equal(x, y), (x, y)
"""
# At once, because threads of PyTorch's own can abort a process that is taken apart.
EPILOGUE = """
if dist.is_initialized():
    dist.barrier()
    if rank == 0:
        import time; time.sleep(0.2)  # the store of the group is here
os._exit(0)
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 7, bias=False))
for layer in model: fully_shard(layer)
fully_shard(model)
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 6)).square().sum().backward(); adam.step(); adam.zero_grad()
def everything():
    return [x.full_tensor() for p in model.parameters() for x in (p, adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])]
"""

MEGATRON = """
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
parallel_state.initialize_model_parallel(size, 1)
config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=4, normalization="RMSNorm",
                           gated_linear_unit=True, add_bias_linear=False, use_cpu_initialization=True,
                           tensor_model_parallel_size=size, pipeline_dtype=torch.float32)
model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=512, max_sequence_length=16,
                 position_embedding_type="rope", share_embeddings_and_output_weights=False)
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
def step():
    for number, parameter in enumerate(model.parameters()): parameter.grad = torch.full_like(parameter, 1 + number / 64)
    adam.step()
"""

DEEPSPEED_MODEL = """
import deepspeed, deepspeed.comm.torch
# Compiling this takes minutes, and what a build that was killed left is waited for.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 7, bias=False))
deepspeed.init_distributed("gloo", init_method="file://" + meet, rank=rank, world_size=size)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
          "zero_allow_untested_optimizer": True}
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
"""
DEEPSPEED_ENGINE = """
engine, adam, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config)
"""
DEEPSPEED_STEP = """
def step():
    loss = engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().sum(); engine.backward(loss); engine.step()
from deepspeed.utils import safe_get_full_fp32_param as full, safe_get_full_optimizer_state as moment
def everything():
    return [x for p in engine.module.parameters() if p.requires_grad
            for x in (full(p), moment(p, "exp_avg"), moment(p, "exp_avg_sq"))]
"""
DEEPSPEED = DEEPSPEED_MODEL + DEEPSPEED_ENGINE + DEEPSPEED_STEP

TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=256, tie_word_embeddings=False))
samples = [{"input_ids": torch.tensor([n % 7, 1, 2, 3]), "labels": torch.tensor([n % 7, 1, 2, 3])} for n in range(64)]
"""

ACCELERATE = """
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 7, bias=False))
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
def train(model, adam, accelerator):
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 6)).square().sum()); adam.step(); adam.zero_grad()
def everything():
    return [x.detach() for p in plain.parameters() for x in (p, adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])]
"""

LIGHTNING = """
import lightning.pytorch as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 7))
    def training_step(self, batch, index):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)
module = Module()
samples = torch.utils.data.DataLoader(torch.ones(40, 6), batch_size=4)
"""


def pages():
    """title → its blocks."""
    text = mount.read_text(os.path.join(PYTHON, "README.md"))
    found = {}
    for title, body in re.findall(r"^### (.+?)$\n(.*?)(?=^##)", text, re.M | re.S):
        found[title] = re.findall(r"^```python\n(.*?)^```$", body, re.M | re.S)
    return found


class Frameworks(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.pages = pages()

    def need(self, *modules):
        for module in modules:
            if importlib.util.find_spec(module) is None:
                self.skipTest(f"Python has no {module} here")

    @classmethod
    def tearDownClass(cls):
        print("pages:", "; ".join(f"{title} {cls.came_out.get(name, 'not asked for')}" for title, name in cls.tests_of_pages()))

    @staticmethod
    def tests_of_pages():
        return [(title, "test_" + title.lower().replace("-", "_")) for title in sorted(pages())]

    came_out = {}  # by test: whether a page was run, or why not

    def run(self, result=None):
        skipped = len(result.skipped)
        failed = len(result.failures) + len(result.errors)
        super().run(result)
        self.came_out[self._testMethodName] = (
            f"skipped ({result.skipped[-1][1]})" if len(result.skipped) > skipped
            else "failed" if len(result.failures) + len(result.errors) > failed else "run")
        return result

    def run_ranks(self, size, *parts, group=False):
        """Runs the parts, one behind the other, in each of `size` processes."""
        body = "\n".join(parts).replace("/mnt/ptc", self.mount.path)
        meet = self.temporary(f"meet-{len(os.listdir(self.scratch))}")
        text = PROLOGUE.replace("NEEDS_GROUP", str(group)) + body + EPILOGUE
        codes, said = ranks.SERVER.run(text, [[str(rank), str(size), meet] for rank in range(size)], self.scratch, seconds=200)
        self.assertEqual(codes, [0] * size, said)

    def job(self, name, **layout):
        return ptc.Job.create(os.path.join(self.mount.path, name), **layout)

    def test_every_page_is_run(self):
        self.assertEqual(sorted(self.pages), ["DeepSpeed", "FSDP2", "Lightning", "Megatron-LM", "PEFT", "Trainer", "accelerate", "vLLM"])
        tested = {name for name in dir(self) if name.startswith("test_")}
        for _, name in self.tests_of_pages():
            self.assertIn(name, tested)
        for title, blocks in self.pages.items():
            for block in blocks:
                self.assertLessEqual(len([line for line in block.splitlines() if line]), 10, title)

    def test_fsdp2(self):
        save, load, dcp = self.pages["FSDP2"]
        job = self.job("fsdp", dp=4, optimizer="fsdp")
        keep = f"torch.save(everything(), {self.temporary('whole.pt')!r})\n"
        check = f"same(everything(), torch.load({self.temporary('whole.pt')!r}))\n"
        self.run_ranks(4, FSDP2, "step(); step()", save, "whole = everything()", "if rank == 0: " + keep.replace("everything()", "whole"))
        job.set_layout(dp=3)
        self.run_ranks(3, FSDP2, load, check)
        self.run_ranks(2, FSDP2, dcp, check)
        self.assertEqual(job.checkpoints(), ["step100", "step101"])
        self.run_ranks(3, FSDP2, load, check)

    def test_megatron_lm(self):
        self.need("megatron.core" if importlib.util.find_spec("megatron") else "megatron")
        save, load = self.pages["Megatron-LM"]
        job = self.job("gpt", tp=2, naming="stage")
        self.run_ranks(2, MEGATRON, "step()", save, group=True)
        for tp in (1, 4):
            job.set_layout(tp=tp)
            self.run_ranks(tp, MEGATRON, load, """
checkpoint = ptc.Checkpoint("/mnt/ptc/gpt")
for name, parameter in model.named_parameters():
    whole = checkpoint.read(name)
    part = {"fc1": lambda: torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)]),
            "fc2": lambda: whole.chunk(size, 1)[rank], "proj": lambda: whole.chunk(size, 1)[rank], "norm": lambda: whole,
            }.get(next((key for key in ("fc1", "fc2", "proj", "norm") if key in name), ""), lambda: whole.chunk(size)[rank])()
    assert torch.equal(parameter, part), name
    assert adam.state[parameter]["exp_avg"].shape == parameter.shape, name
    assert adam.state[parameter]["step"] == 1
""", group=True)

        job.set_layout(tp=1)
        self.run_ranks(1, MEGATRON, """
def without(path, load=ptc.load):
    state = load(path)
    del state["model"]["output_layer.weight"]
    return state
ptc.load = without
try:
""" + "\n".join("    " + line for line in load.splitlines()), """
    raise SystemExit("loaded")
except AssertionError as error:
    assert "output_layer.weight" in str(error), error
""", group=True)

    def test_deepspeed(self):
        """A new engine, on other numbers of ranks, has all that the one had that saved, and takes the same step next."""
        self.need("deepspeed")
        save, load = self.pages["DeepSpeed"]
        weights = """
def weights():
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [p.detach().clone() for p in engine.module.parameters()]
"""
        for stage in (1, 2, 3):
            for frozen in (False, True):
                name, keep = f"zero{stage}-{frozen}", self.temporary(f"whole{stage}-{frozen}.pt")
                job = self.job(name)
                model = DEEPSPEED_MODEL.replace('"stage": 1', f'"stage": {stage}, "stage3_param_persistence_threshold": 0')
                if stage == 3:  # which DeepSpeed can cut
                    model = model.replace("(6, 9)", "(6, 8)").replace("(9, 7, ", "(8, 6, ")
                if frozen:
                    model = model.replace("deepspeed.init", "model[0].bias.requires_grad = False\ndeepspeed.init", 1)
                self.run_ranks(2, "meet += '.deepspeed'", model, DEEPSPEED_ENGINE, DEEPSPEED_STEP, weights, "step(); step()",
                               save.replace("/mnt/ptc/zero", f"/mnt/ptc/{name}"), f"""
found = [*weights(), *everything()]
step()
after = [*weights(), *everything()]
if rank == 0: torch.save([found, after], {keep!r})""", group=True)
                self.assertEqual(job.checkpoints(), ["step100"])
                for size in (1, 4):
                    with self.subTest(stage=stage, frozen=frozen, size=size):
                        self.run_ranks(size, "meet += '.deepspeed'", model, load.replace("/mnt/ptc/zero", f"/mnt/ptc/{name}"),
                                       DEEPSPEED_STEP, weights, f"""
found, after = torch.load({keep!r})
same([*weights(), *everything()], found)
step()
same([*weights(), *everything()], after)""", group=True)

    def test_accelerate(self):
        self.need("accelerate")
        page, = self.pages["accelerate"]
        job, whole = self.job("accelerate", dp=2), self.temporary("whole.pt")
        self.run_ranks(2, ACCELERATE, "resumes, name = False, 'step2'", page, f"if rank == 0: torch.save(everything(), {whole!r})")
        for size in (2, 1):
            job.set_layout(dp=size)
            resumed = f"def train(*_): same(everything(), torch.load({whole!r}))"
            self.run_ranks(size, ACCELERATE, f"resumes, name = True, 'step4-{size}'", resumed, page, group=True)

    def test_deepspeed_universal(self):
        """Its engine loads a layout's deepspeed/, whoever saved it, under any stage and on any number of ranks."""
        self.need("deepspeed")
        engine = DEEPSPEED.replace("(6, 9)", "(6, 8)").replace("(9, 7, ", "(8, 6, ")  # which stage 3 can cut

        def of_stage(stage):
            return engine.replace('"stage": 1', f'"stage": {stage}, "stage3_param_persistence_threshold": 0')
        for saved in (1, 2, 3, "dcp"):
            name, keep = f"universal-{saved}", self.temporary(f"universal-{saved}.pt")
            job = mount.Job(self.mount, name)
            self.job(name, dp=2)
            save = 'engine.save_checkpoint(incoming, tag="global_step2", client_state={"seen": 7})' if saved != "dcp" else """
names = [name for name, _ in engine.module.named_parameters()]
model = dict(zip(names, whole[::3]))
state = {name: {"step": torch.tensor(2.), "exp_avg": a, "exp_avg_sq": b} for name, a, b in zip(names, whole[1::3], whole[2::3])}
import torch.distributed.checkpoint as dcp
dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=incoming, no_dist=True)"""
            stage = of_stage(saved if saved != "dcp" else 1)
            self.run_ranks(1 if saved == "dcp" else 2, "meet += '.deepspeed'", stage, "step(); step()", f"""
whole, incoming = everything(), "/mnt/ptc/{name}/incoming/step2"
{save}
step()
after = everything()
if rank == 0: torch.save([whole, after], {keep!r})""", group=True)
            job.commit("step2")
            for stage, size in ((1, 1), (2, 4), (3, 2)):
                with self.subTest(saved=saved, stage=stage, size=size):
                    load = of_stage(stage).replace('"bf16"', '"checkpoint": {"load_universal": True}, "bf16"')
                    self.run_ranks(size, "meet += '.deepspeed'", load, f"""
path, said = engine.load_checkpoint("/mnt/ptc/{name}/current/deepspeed")
assert path and (said.get("seen") == 7) == ({saved!r} != "dcp"), (path, said)
assert engine.global_steps == (2 if {saved!r} != "dcp" else 0), engine.global_steps
whole, after = torch.load({keep!r})
same(everything(), whole)
step()
same(everything(), after)""", group=True)

    def test_deepspeed_universal_as_a_module_alone(self):
        """With load_module_only=True an engine begins with these weights and its own count of steps, also where there is no more
        of a checkpoint than a model."""
        self.need("deepspeed")
        engine = DEEPSPEED.replace("(6, 9)", "(6, 8)").replace("(9, 7, ", "(8, 6, ")
        for saved in ("trained", "model"):
            name, keep = f"module-{saved}", self.temporary(f"module-{saved}.pt")
            job = mount.Job(self.mount, name)
            self.job(name)
            self.run_ranks(1, "meet += '.deepspeed'", engine, "step(); step()", f"""
whole, incoming = everything(), "/mnt/ptc/{name}/incoming/step2"
if {saved!r} == "trained":
    engine.save_checkpoint(incoming, tag="global_step2")
else:
    from safetensors.torch import save_file
    names = [name for name, _ in engine.module.named_parameters()]
    os.mkdir(incoming)
    save_file(dict(zip(names, whole[::3])), incoming + "/model.safetensors")
torch.save(whole, {keep!r})""", group=True)
            job.commit("step2")
            for stage, size in ((1, 2), (3, 2)):
                with self.subTest(saved=saved, stage=stage, size=size):
                    load = engine.replace('"stage": 1', f'"stage": {stage}, "stage3_param_persistence_threshold": 0')
                    load = load.replace('"bf16"', '"checkpoint": {"load_universal": True}, "bf16"')
                    self.run_ranks(size, "meet += '.deepspeed'", load, f"""
path, _ = engine.load_checkpoint("/mnt/ptc/{name}/current/deepspeed", load_module_only=True)
assert path and engine.global_steps == 0, (path, engine.global_steps)
from deepspeed.utils import safe_get_full_fp32_param
def weights(): return [safe_get_full_fp32_param(parameter).clone() for parameter in engine.module.parameters()]
whole = torch.load({keep!r})[::3]
same(weights(), whole)
step()
assert not any(torch.equal(a, b) for a, b in zip(weights(), whole))""", group=True)

    def test_deepspeed_under_tensor_parallelism(self):
        """Its engine, with an mpu of two tensor-parallel ranks, has just what ptcfs gives these: also of grouped queries that are
        fused with their keys, and of a vocabulary that ranks pad."""
        self.need("deepspeed")
        model = models.ThreeWays(fused=True, heads=4, kv=2, dim=16, hidden=64, ffn=48)
        job, keep = mount.Job(self.mount, "tensor-parallel"), self.temporary("whole.safetensors")
        self.job("tensor-parallel", tp=2)
        models.write_safetensors(keep, model.tensors)
        self.run_ranks(1, f"""
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
model = {{name: whole.float() for name, whole in load_file({keep!r}).items() if whole.dim() > 0}}
state = {{name: {{"step": torch.tensor(2.), "exp_avg": whole * 2, "exp_avg_sq": whole * whole}} for name, whole in model.items()}}
dcp.save({{"model": model, "optim": {{"state": state}}}}, checkpoint_id="/mnt/ptc/tensor-parallel/incoming/step2", no_dist=True)
""")
        models.write_file(job.incoming("step2") + "/config.json", model.config_text())
        job.commit("step2")
        job.wait()
        load = DEEPSPEED_MODEL[:DEEPSPEED_MODEL.index("model = ")] + """
from safetensors.torch import load_file
held = load_file(f"/mnt/ptc/tensor-parallel/checkpoints/step2/layouts/tp2-pp1-dp1/rank/{rank}/model.safetensors")
held = {name: tensor for name, tensor in held.items() if not name.startswith("optim.")}
class Holder(torch.nn.Module): pass
model = Holder()
for name, tensor in held.items():
    at, *rest = model, *name.split(".")
    for part in rest[:-1]:
        if not hasattr(at, part): at.add_module(part, Holder())
        at = getattr(at, part)
    at.register_parameter(rest[-1], torch.nn.Parameter(torch.zeros_like(tensor)))
deepspeed.init_distributed("gloo", init_method="file://" + meet, rank=rank, world_size=size)
alone = [dist.new_group([one]) for one in range(size)][rank]
class Mpu:
    get_model_parallel_rank = get_tensor_model_parallel_rank = staticmethod(lambda: rank)
    get_model_parallel_world_size = get_tensor_model_parallel_world_size = staticmethod(lambda: size)
    get_model_parallel_group = get_tensor_model_parallel_group = staticmethod(lambda: dist.group.WORLD)
    get_data_parallel_rank, get_data_parallel_world_size = staticmethod(lambda: 0), staticmethod(lambda: 1)
    get_data_parallel_group = staticmethod(lambda: alone)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": STAGE}, "bf16": {"enabled": True},
          "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": True}}
adam = torch.optim.AdamW(model.parameters(), lr=0.1)
engine, adam, _, _ = deepspeed.initialize(model=model, optimizer=adam, config=config, mpu=Mpu)
path, _ = engine.load_checkpoint("/mnt/ptc/tensor-parallel/current/deepspeed")
assert path
from deepspeed.utils import safe_get_full_fp32_param as full, safe_get_full_optimizer_state as moment
for name, parameter in engine.module.named_parameters():
    wanted = held[name]
    loaded = full(parameter), moment(parameter, "exp_avg"), moment(parameter, "exp_avg_sq")
    for found, expected in zip(loaded, (wanted, wanted * 2, wanted * wanted)):
        assert found.shape == expected.shape and torch.equal(found, expected), name
assert any("qkv_proj" in name for name in held)
"""
        for stage in (1, 2):
            with self.subTest(stage=stage):
                self.run_ranks(2, "meet += '.deepspeed'", load.replace("STAGE", str(stage)), group=True)

    def test_trainer(self):
        self.need("transformers", "accelerate")
        page, = self.pages["Trainer"]
        job = self.job("hf")
        os.makedirs(job.file("incoming/trainer"))
        whole = self.temporary("whole")
        self.run_ranks(1, TRAINER, "max_steps = 8", page, f"torch.save(model.state_dict(), {whole!r})")
        self.assertEqual(job.checkpoints(), [f"checkpoint-{step}" for step in (2, 4, 6, 8)])
        self.assertEqual(os.listdir(job.file("incoming")), ["trainer"])
        self.assertEqual(os.listdir(job.file("incoming/trainer")), [])
        for step in (6, 8):
            shutil.rmtree(job.file(f"checkpoints/checkpoint-{step}"))
        job.set_layout(tp=2)
        halves = [ptc.load(job.path, rank=rank) for rank in range(2)]
        name = "model.layers.0.mlp.up_proj.weight"
        self.assertEqual([half["optim"]["state"][name]["exp_avg"].shape for half in halves], [(24, 32)] * 2)
        # What goes on from the fourth step comes out as what was never interrupted.
        self.run_ranks(1, TRAINER, "max_steps = 8", page, f"resumed = torch.load({whole!r})",
                       "for key, value in model.state_dict().items(): assert torch.equal(value, resumed[key]), key")
        self.assertEqual(job.checkpoints(), [f"checkpoint-{step}" for step in (2, 4, 6, 8)])

    def test_trainer_loads_the_best_and_keeps_few(self):
        """Also when it is resumed in between: the best is where it was committed."""
        self.need("transformers", "accelerate")
        page, = self.pages["Trainer"]
        page = page.replace("/mnt/ptc/hf", "/mnt/ptc/hf-best").replace("train_dataset=samples, callbacks=[callback]",
                                                                       "train_dataset=samples, eval_dataset=samples[:4], callbacks=[spoils, callback]")
        page = page.replace("save_steps=2,", "save_steps=2, eval_steps=2, eval_strategy='steps', load_best_model_at_end=True, "
                            "save_total_limit=1, learning_rate=0.01,")
        job = self.job("hf-best")
        spoils = """
from transformers import TrainerCallback
class Spoils(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        for parameter in model.parameters() if state.global_step == 5 else ():
            parameter.data.mul_(30)
spoils = Spoils()
"""
        check = """
losses = {one["step"]: one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one}
assert losses[4] == min(losses.values()) < losses[max(losses)] - 1, losses
assert trainer.state.best_model_checkpoint == callback.job.file("checkpoints/checkpoint-4/layouts/tp1-pp1-dp1/rank/0")
assert abs(trainer.evaluate()["eval_loss"] - losses[4]) < 1e-4, losses
"""
        self.run_ranks(1, TRAINER, spoils, "max_steps = 6", page, check)
        self.assertEqual(job.checkpoints(), ["checkpoint-4", "checkpoint-6"])
        self.run_ranks(1, TRAINER, spoils, "max_steps = 8", page, check)
        self.assertEqual(job.checkpoints(), ["checkpoint-4", "checkpoint-8"])

    def test_trainer_leaves_what_is_pinned(self):
        """It goes on, and what it may keep is counted without it. What has a name that is pinned is not replaced."""
        self.need("transformers", "accelerate")
        page, = self.pages["Trainer"]
        page = page.replace("/mnt/ptc/hf", "/mnt/ptc/hf-pinned")
        few = page.replace("save_steps=2,", "save_steps=2, save_total_limit=2,")
        job = self.job("hf-pinned")
        self.run_ranks(1, TRAINER, "max_steps = 4", page)
        os.setxattr(job.file("checkpoints/checkpoint-2"), "user.ptc.pin", b"1")
        self.run_ranks(1, TRAINER, "max_steps = 10", few)
        self.assertEqual(job.checkpoints(), ["checkpoint-2", "checkpoint-8", "checkpoint-10"])
        anew = page.replace('-pinned")', '-pinned", overwrite=True)').replace("resume_from_checkpoint=callback.latest", "")
        self.run_ranks(1, TRAINER, "max_steps = 2", "try:", "\n".join("    " + line for line in anew.splitlines()), """
    raise SystemExit("replaced")
except ptc.CommitError as error:
    assert "checkpoint-2 is pinned" in str(error) and "ptc pin hf-pinned/checkpoint-2 --remove" in str(error), error
""")
        self.assertEqual(job.checkpoints(), ["checkpoint-2", "checkpoint-8", "checkpoint-10"])
        os.removexattr(job.file("checkpoints/checkpoint-2"), "user.ptc.pin")
        self.run_ranks(1, TRAINER, "max_steps = 2", anew)
        self.assertEqual(job.checkpoints(), ["checkpoint-8", "checkpoint-10", "checkpoint-2"])

    def test_trainer_goes_on_from_its_own(self):
        """Of what else is in the job it takes nothing; of its own the one of most steps."""
        self.need("transformers", "accelerate")
        job = self.job("hf-others")
        latest = """
from ptc.trainer import Callback
assert Callback("/mnt/ptc/hf-others").latest == (WANTED and f"/mnt/ptc/hf-others/checkpoints/{WANTED}/layouts/tp1-pp1-dp1/rank/0")
"""
        for name, wanted in (("step900", None), ("checkpoint-x", None), ("checkpoint-10", "checkpoint-10"),
                             ("checkpoint-9", "checkpoint-10"), ("last", "checkpoint-10")):
            job.save({"model": {"w": torch.ones(2)}}, name)
            self.run_ranks(1, latest.replace("WANTED", repr(wanted)))

    def test_trainer_with_a_rank_that_fails(self):
        """In the callback, where only the first works: the others learn it, and do not wait."""
        self.need("transformers", "accelerate")
        page, = self.pages["Trainer"]
        self.job("hf-fails")
        fails = """
import ptc.trainer
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, though there is a group
def fail(*_): raise PermissionError("not today")
ptc.trainer.optimizer_state = fail
try:
"""
        page = page.replace("/mnt/ptc/hf", "/mnt/ptc/hf-fails")
        self.run_ranks(2, TRAINER, "max_steps = 4", fails + "\n".join("    " + line for line in page.splitlines()), """
    raise SystemExit("trained")
except OSError as error:
    assert ("not today" in str(error)) and (rank == 0 or "rank 0: not today" in str(error)), error
assert ptc.Job("/mnt/ptc/hf-fails").checkpoints() == []
arguments.output_dir = "/mnt/ptc/hf-fails/incoming"
try:
    callback.on_train_begin(arguments, trainer.state, trainer.control)
    raise SystemExit("begun")
except ValueError as error:
    assert "incoming/trainer" in str(error), error
""", group=True)

    def test_lightning_runs_no_code(self):
        self.need("lightning")
        page, = self.pages["Lightning"]
        page = page.replace("/mnt/ptc/lightning", "/mnt/ptc/lightning-code")
        self.job("lightning-code")
        ran = self.temporary("ran")
        body = f"""
class Runs:
    def __reduce__(self): return os.makedirs, ({ran!r},)
Module.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(what=Runs())
path, max_steps = None, 2
"""
        self.run_ranks(1, LIGHTNING, body, page, f"assert not os.path.exists({ran!r})")
        load = "path, max_steps = '/mnt/ptc/lightning-code/checkpoints/epoch=0-step=2.ckpt', 4"
        self.run_ranks(1, LIGHTNING, load, "try:", "\n".join("    " + line for line in page.splitlines()), f"""
    raise SystemExit("loaded")
except ValueError as error:
    assert "CheckpointIO(job, weights_only=False)" in str(error) and "makedirs" in str(error), error
assert not os.path.exists({ran!r})
""")
        self.run_ranks(1, LIGHTNING, load, page.replace('-code")', '-code", weights_only=False)'),
                       f"assert os.path.exists({ran!r}) and trainer.global_step == 4")

    def test_lightning(self):
        self.need("lightning")
        page, = self.pages["Lightning"]
        job = self.job("lightning")
        whole, first = self.temporary("whole"), "epoch=0-step=2.ckpt"
        self.run_ranks(1, LIGHTNING, "path, max_steps = None, 4", page, f"torch.save(module.state_dict(), {whole!r})")
        self.assertEqual(job.checkpoints(), [first, "epoch=0-step=4.ckpt"])
        self.run_ranks(1, LIGHTNING, "path, max_steps = '/mnt/ptc/lightning/checkpoints/" + first + "', 4",
                       page.replace("every_n_train_steps=2", "every_n_train_steps=100"),
                       f"resumed = torch.load({whole!r})",
                       "assert trainer.global_step == 4\n"
                       "for key, value in module.state_dict().items(): assert torch.equal(value, resumed[key]), key")
        self.assertIn("optim", ptc.load(job.path))

    def test_lightning_removes_its_own(self):
        """Of save_top_k. What another has removed is gone already; what is pinned stays."""
        self.need("lightning")
        page, = self.pages["Lightning"]
        page = page.replace("/mnt/ptc/lightning", "/mnt/ptc/lightning-few").replace("save_top_k=-1", "save_top_k=1")
        job = self.job("lightning-few")
        meddles = """
class Meddles(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        at = "/mnt/ptc/lightning-few/checkpoints/epoch=0-step=%d.ckpt" % trainer.global_step
        if trainer.global_step == 2: __import__("shutil").rmtree(at)
        if trainer.global_step == 4: os.setxattr(at, "user.ptc.pin", b"1")
path, max_steps = None, 8
"""
        self.run_ranks(1, LIGHTNING, meddles, page.replace("callbacks=[saves,", "callbacks=[Meddles(), saves,"))
        self.assertEqual(job.checkpoints(), ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"])

    def test_lightning_saves_a_name_again(self):
        self.need("lightning")
        page, = self.pages["Lightning"]
        job = self.job("lightning-last")
        page = page.replace("/mnt/ptc/lightning", "/mnt/ptc/lightning-last").replace("save_top_k=-1", "save_last=True")
        self.run_ranks(1, LIGHTNING, "path, max_steps = None, 6", page,
                       "last = ptc.load('/mnt/ptc/lightning-last/checkpoints/last.ckpt')['model']",
                       "for key, value in module.state_dict().items(): assert torch.equal(value, last[key]), key")
        self.assertEqual(sorted(job.checkpoints()), ["epoch=0-step=6.ckpt", "last.ckpt"])

    def test_peft(self):
        self.need("transformers", "peft")
        page, = self.pages["PEFT"]
        self.job("lora")
        self.run_ranks(1, TRAINER, """
import copy
from peft import LoraConfig, get_peft_model
base = copy.deepcopy(model)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
""", page, """
for name, parameter in model.named_parameters():
    if "lora" in name: assert torch.equal(parameter, dict(again.named_parameters())[name]), name
""")

    def test_vllm(self):
        self.need("vllm")
        page, = self.pages["vLLM"]
        job = self.job("hf-serve")
        os.makedirs(job.file("incoming/checkpoint-4/rank"))
        self.run_ranks(1, TRAINER.replace("vocab_size", "head_dim=32, vocab_size"), """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
path = '/mnt/ptc/hf-serve/incoming/checkpoint-4/rank/0'
model.save_pretrained(path)
words = models.WordLevel({"t%d" % i: i for i in range(model.config.vocab_size)}, unk_token="t0")
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="t0").save_pretrained(path)
""")
        ptc.commit(job.file("incoming/checkpoint-4"))
        # A program of its own: the engine's processes begin as it does.
        script = self.temporary("serve.py")
        with open(script, "w", encoding="utf-8") as file:
            file.write("if __name__ == '__main__':\n" + textwrap.indent(page + """
import torch, transformers
from vllm import SamplingParams
prompt = list(range(2, 12))
served = model.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
whole = transformers.AutoModelForCausalLM.from_pretrained("/mnt/ptc/hf/checkpoints/checkpoint-4/hf", dtype="auto")
expected = whole.generate(torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(prompt):].tolist()
assert list(served[0].outputs[0].token_ids) == expected, (served[0].outputs[0].token_ids, expected)
""", "    ").replace("/mnt/ptc/hf/", self.mount.path + "/hf-serve/"))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=300,
                              env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                                   "HF_HUB_OFFLINE": "1"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    mount.main()
