"""What DeepSpeed's engine saved, and universal folders made of it, committed as they are: the whole is put together."""
import contextlib
import enum
import os
import random
import shutil
import sys
import types
from collections import OrderedDict
from dataclasses import dataclass

import models
import mount
import ranks
from models import Tensor, count

torch = mount.require("torch")
import test_megatron_trees as megatron  # noqa: E402  pylint: disable=wrong-import-position
sys.path.insert(0, ranks.PACKAGE)
import ptc  # noqa: E402  pylint: disable=wrong-import-position

TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
LAYOUTS = {"tp1-pp1-dp1": (1, 1), "tp2-pp1-dp1": (2, 1), "tp2-pp3-dp1": (2, 3)}
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


@dataclass
class FragmentAddress:
    """Where of a flat array a parameter is: DeepSpeed pickles objects of a class of its own."""
    numel: int
    start: int


class LossScaler:
    """The same of what is no tensor."""

    def __init__(self):
        self.cur_scale = 1.0


class Stage(enum.IntEnum):
    """And of the stage."""
    ONE = 1
    TWO = 2
    THREE = 3


def name_as(cls, module, name):
    """Pickles it as one of DeepSpeed's, which need not be here."""
    cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
    for end in range(1, module.count(".") + 2):
        part = ".".join(module.split(".")[:end])
        sys.modules.setdefault(part, types.ModuleType(part))
    setattr(sys.modules[module], name, cls)


name_as(FragmentAddress, "deepspeed.utils.tensor_fragment", "fragment_address")
name_as(LossScaler, "deepspeed.runtime.fp16.loss_scaler", "LossScaler")
name_as(Stage, "deepspeed.runtime.zero.config", "ZeroStageEnum")


def to_torch(tensor):
    return torch.frombuffer(bytearray(tensor.data), dtype=TYPES[tensor.dtype]).view(tensor.shape)


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def save(value, path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    torch.save(value, path)


class Trained:
    """A model with its optimizer's state, whole; cut and saved as DeepSpeed's ranks have it."""

    def __init__(self, model):
        rng = random.Random(5)
        self.model = model
        self.whole = {key: {} for key in KEYS}
        for key in KEYS:
            for tensor in model.tensors:
                self.whole[key][tensor.name] = models.random_tensor(rng, tensor.name, "F32", tensor.shape)
        decayed = [tensor.name for tensor in model.tensors if len(tensor.shape) > 1]
        self.groups = [decayed, [tensor.name for tensor in model.tensors if len(tensor.shape) == 1]]
        self.mapped = self.groups
        self.shapes = {tensor.name: tensor.shape for tensor in model.tensors}

    def deal(self, dp):
        """As with "round_robin_gradients": the flat arrays have another order, of which param_slice_mappings know nothing."""
        self.mapped = self.groups
        self.groups = [[name for hand in range(dp) for name in group[hand::dp]] for group in self.groups]

    def gaps(self, group, aligned):
        """Behind each parameter, so that the next begins at a multiple of so many elements."""
        gaps, at = [], 0
        for name in self.groups[group]:
            at += count(self.shapes[name])
            gaps.append(0 if name == self.groups[group][-1] else -at % aligned)
            at += gaps[-1]
        return gaps

    def flat(self, key, group, aligned=1):
        parts = []
        for name, gap in zip(self.groups[group], self.gaps(group, aligned)):
            parts += [to_torch(self.whole[key][name]).flatten(), torch.zeros(gap)]
        return torch.cat(parts)

    def model_state(self, dp, **changes):
        return {"module": OrderedDict((tensor.name, to_torch(tensor)) for tensor in self.model.tensors),
                "buffer_names": [], "optimizer": None, "frozen_param_shapes": None, "shared_params": {}, "frozen_param_fragments": None,
                "param_shapes": [OrderedDict((name, torch.Size(self.shapes[name])) for name in group) for group in self.groups],
                "lr_scheduler": {"last_batch_iteration": 99}, "sparse_tensor_module_names": set(), "global_steps": 100,
                "dp_world_size": dp, "mp_world_size": 1, "ds_config": {"zero_optimization": {"stage": 2}}, "ds_version": "0.19.0", **changes}

    def optimizer_state(self, rank, dp, saved_padded=False, elastic=False, aligned=1):
        """Of stages 1 and 2; padded as the optimizer of bf16 saves it."""
        masters, states, paddings, mappings = [], [], [], []
        for group, names in enumerate(self.groups):
            gaps = self.gaps(group, aligned)
            elements = sum(count(self.shapes[name]) for name in names) + sum(gaps)
            part = -(-elements // (2 * dp)) * 2
            begin, end = min(rank * part, elements), min((rank + 1) * part, elements)
            padding = part - (end - begin)
            paddings.append(padding if not saved_padded else part * dp - elements if rank == dp - 1 else 0)
            padded = {key: torch.cat([self.flat(key, group, aligned)[begin:end], torch.zeros(padding)]) for key in KEYS}
            masters.append(padded["fp32"] if saved_padded else padded["fp32"][:part - padding])
            states.append({"step": torch.tensor(7.), **{key: padded[key][:part - padding if elastic else part] for key in KEYS[1:]}})
            mapping, at = OrderedDict(), 0
            for name, gap in zip(self.mapped[group], gaps):
                first, last = max(at, begin), min(at + count(self.shapes[name]), end)
                if first < last:
                    mapping[name] = FragmentAddress(last - first, first - begin)
                at += count(self.shapes[name]) + gap
            mappings.append(mapping)
        groups = [{"lr": 0.25, "betas": (0.9, 0.95), "params": [group]} for group in range(len(self.groups))]
        state = {"loss_scaler": LossScaler(), "overflow": False, "clip_grad": 1.0, "zero_stage": Stage.TWO,
                 "base_optimizer_state": states if elastic else {"state": dict(enumerate(states)), "param_groups": groups},
                 "single_partition_of_fp32_groups": masters, "group_paddings": paddings, "partition_count": [dp] * len(self.groups),
                 "ds_version": "0.19.0", "param_slice_mappings": mappings}
        if aligned > 1:
            state["param_alignment_paddings"] = [self.gaps(group, aligned) for group in range(len(self.groups))]
        return {"optimizer_state_dict": state, "ds_config": {"zero_optimization": {"stage": 2}}, "ds_version": "0.19.0"}

    def save_flat(self, folder, dp, prefix="", **how):
        """ZeRO 1 and 2. `folder`: of each rank."""
        save(self.model_state(dp), folder(0) + "/mp_rank_00_model_states.pt")
        for rank in range(dp):
            save(self.optimizer_state(rank, dp, **how), folder(rank) + f"/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def slices(self, tensor, rank, dp):
        part = -(-tensor.numel() // dp)
        return torch.cat([tensor.flatten(), torch.zeros(part * dp - tensor.numel(), dtype=tensor.dtype)])[rank * part:(rank + 1) * part]

    def save_stage_3(self, folder, dp, buffers=(), frozen=()):
        def all_of(key, group, rank):
            return torch.cat([self.slices(to_torch(self.whole[key][name]), rank, dp) for name in self.groups[group]])
        for rank in range(dp):
            module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in [*self.shapes, *(t.name for t in frozen)])
            module.update((tensor.name, to_torch(tensor)) for tensor in buffers)
            save(self.model_state(dp, module=module, buffer_names=[tensor.name for tensor in buffers],
                                  frozen_param_shapes={tensor.name: torch.Size(tensor.shape) for tensor in frozen},
                                  frozen_param_fragments={tensor.name: self.slices(to_torch(tensor), rank, dp) for tensor in frozen}),
                 f"{folder}/zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            states = {group: {"step": 7, **{key: all_of(key, group, rank) for key in KEYS[1:]}} for group in range(len(self.groups))}
            state = {"zero_stage": Stage.THREE, "loss_scaler": LossScaler(), "overflow": False, "partition_count": dp,
                     "optimizer_state_dict": {"state": states, "param_groups": [{"lr": 0.25, "params": list(states)}]},
                     "fp32_flat_groups": [all_of("fp32", group, rank) for group in range(len(self.groups))]}
            save({"optimizer_state_dict": state, "ds_config": {}, "ds_version": "0.19.0"},
                 f"{folder}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def save_universal(self, folder, model=True, flat=False):
        if model:
            save(self.model_state(4), folder + "/mp_rank_00_model_states.pt")
        for name in self.shapes:
            for key in KEYS:
                value = to_torch(self.whole[key][name])
                save(value.flatten() if flat else {"cat_dim": 0, "param": value}, f"{folder}/zero/{name}/{key}.pt")
            save(torch.tensor(7.), f"{folder}/zero/{name}/step.pt")
        save({"param_groups": [{"lr": 0.25}]}, folder + "/zero/optimizer_state.pt")


class Trees(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.model = models.Llama()
        self.trained = Trained(self.model)

    def beside(self, top):
        """What DeepSpeed, and who calls it, puts beside its folder."""
        models.write_file(top + "/latest", "global_step100")
        models.write_file(top + "/zero_to_fp32.py", "#!/usr/bin/env python\n")
        models.write_file(top + "/config.json", self.model.config_text())

    def expect_hf(self, job, weights):
        self.assertEqual(models.read_hf(job.checkpoint("base", "hf")), {tensor.name: tensor for tensor in weights})
        done = self.mount.ptc("verify", job.path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def held(self, weights, layout, rank):
        """Of whole tensors what a rank of a layout has of them."""
        tp, pp = LAYOUTS[layout]
        return {tensor.name: self.model.cut(tensor, rank % tp, tp) for tensor in weights if rank // tp in self.model.stages(tensor.name, pp)}

    def expect_state(self, job, name="optim.safetensors", master=".fp32", layouts=tuple(LAYOUTS), more=(), step=False):
        """Masters and moments under several layouts, as the oracle cuts them."""
        for layout in layouts:
            for rank in range(count(LAYOUTS[layout])):
                expected = {}
                for key in KEYS:
                    for tensor in self.held(self.trained.whole[key].values(), layout, rank).values():
                        named = tensor.name + (master if key == "fp32" else "." + key)
                        expected[named] = Tensor(named, tensor.dtype, tensor.shape, tensor.data)
                expected.update(self.held(more, layout, rank))
                found = models.read_safetensors(job.rank_file("base", layout, rank, name))
                if step:
                    steps = {key: found.pop(key) for key in list(found) if key.endswith(".step")}
                    self.assertTrue(steps and all(tensor.data == bits(torch.tensor(7.)) for tensor in steps.values()))
                self.assertEqual(found, expected)

    def expect_model(self, job):
        """The model's own file, loaded by torch."""
        for layout in LAYOUTS:
            for rank in range(count(LAYOUTS[layout])):
                loaded = torch.load(job.rank_file("base", layout, rank, "model_states.pt"), mmap=True, weights_only=True)
                held = self.held(self.model.tensors, layout, rank)
                self.assertEqual(sorted(loaded["module"]), sorted(held))
                for name, tensor in held.items():
                    found = loaded["module"][name]
                    self.assertEqual((found.dtype, tuple(found.shape)), (TYPES[tensor.dtype], tensor.shape), name)
                    self.assertEqual(bits(found), tensor.data, name)
                self.assertEqual((loaded["global_steps"], loaded["lr_scheduler"]), (100, {"last_batch_iteration": 99}))

    def test_universal_folders(self):
        job = self.new_job()
        self.trained.save_universal(job.incoming("base") + "/global_step100_universal")
        self.beside(job.incoming("base"))
        job.commit("base")
        self.expect_hf(job, self.model.tensors)
        self.expect_model(job)
        self.expect_state(job, step=True)
        job.set_layout(tp=2)
        self.expect_state(job, step=True)
        self.expect_model(job)
        self.expect_hf(job, self.model.tensors)
        values = torch.load(job.rank_file("base", "tp2-pp1-dp1", 1, "zero/values.pt"), weights_only=True)
        self.assertEqual(values["model.norm.weight"], {key: {"cat_dim": 0} for key in KEYS})
        self.assertEqual(mount.read_text(job.rank_file("base", "tp2-pp1-dp1", 1, "latest")), "global_step100")

    def test_universal_folders_of_several_ranks(self):
        """The parameters are whole there, whoever held what; so they are the model."""
        job = self.new_job()
        top = job.incoming("base")
        self.trained.save_universal(top, model=False)
        for rank in range(2):
            save(self.trained.model_state(2, module=None, mp_world_size=2), f"{top}/mp_rank_{rank:02}_model_states.pt")
        self.beside(top)
        before = mount.read_bytes(top + "/mp_rank_01_model_states.pt")
        job.commit("base")
        whole = list(self.trained.whole["fp32"].values())
        self.expect_hf(job, whole)
        self.expect_state(job, "model.safetensors", master="", step=True)
        self.assertEqual(mount.read_bytes(job.rank_file("base", "tp1-pp1-dp1", 0, "mp_rank_01_model_states.pt")), before)

    def test_stages_1_and_2(self):
        for number, (dp, prefix, how) in enumerate([(2, "", {}), (3, "bf16_", {"saved_padded": True}), (5, "fp16_", {"elastic": True}), (1, "", {}), (2, "", {"aligned": 48})]):
            with self.subTest(dp=dp, how=how):
                job = self.mount.job(f"flat-{number}")
                top = job.incoming("base")
                self.trained.save_flat(lambda rank, top=top: top + "/global_step100", dp, prefix, **how)
                self.beside(top)
                job.commit("base")
                self.expect_hf(job, self.model.tensors)
                self.expect_state(job)
                if number > 0:
                    continue
                self.expect_model(job)
                job.set_layout(tp=2)
                self.expect_state(job)
                self.expect_model(job)
                self.expect_hf(job, self.model.tensors)
                values = torch.load(job.rank_file("base", "tp2-pp1-dp1", 1, "values.pt"), weights_only=False)["optimizer_state_dict"]
                self.assertEqual([group["lr"] for group in values["base_optimizer_state"]["param_groups"]], [0.25, 0.25])
                self.assertEqual((values["loss_scaler"].cur_scale, values["zero_stage"]), (1.0, Stage.TWO))
                self.assertEqual(values["base_optimizer_state"]["state"][1]["step"], 7)

    def test_loaded_by_python(self):
        """By tools/python, without running code: what is of DeepSpeed's own classes is left out."""
        for kind in ("flat", "stage-3", "universal"):
            with self.subTest(kind):
                job = self.mount.job(f"python-{kind}")
                top = job.incoming("base") + "/global_step100"
                if kind == "flat":
                    self.trained.save_flat(lambda rank, top=top: top, 2)
                elif kind == "stage-3":
                    self.trained.save_stage_3(top, 2)
                else:
                    self.trained.save_universal(top)
                self.beside(job.incoming("base"))
                job.commit("base")
                with contextlib.ExitStack() as stack:
                    if kind != "universal":
                        stack.enter_context(self.assertWarnsRegex(UserWarning, "zero_stage .*ZeroStageEnum"))
                    state = ptc.load(job.checkpoint("base"), rank=0)
                tensors = state["model" if kind == "stage-3" else "optim"]
                for name, tensor in self.trained.whole["exp_avg"].items():
                    self.assertEqual(bits(tensors[f"{name}.exp_avg"]), tensor.data, name)
                of_model = state if kind == "stage-3" else state["model_states"]
                self.assertEqual(of_model["global_steps"], 100)
                if kind != "universal":
                    self.assertIs(state["optimizer_state_dict"]["overflow"], False)

    def test_beside_files_of_safetensors(self):
        """As the Trainer leaves it: those have the model, DeepSpeed's the state of its parameters."""
        for number, (below, stage_3) in enumerate((("", False), ("/rank/0", False), ("", True))):
            job = self.mount.job(f"trainer-{number}")
            top = job.incoming("base") + below
            self.model.write_hf(top)
            if stage_3:
                self.trained.save_stage_3(top + "/global_step100", 2)
            else:
                self.trained.save_flat(lambda rank, top=top: top + "/global_step100", 2)
            self.beside(top)
            of_model = "global_step100/mp_rank_00_model_states.pt"
            kept = {} if stage_3 else {of_model: mount.digests(top)[of_model]}
            job.commit("base")
            self.expect_hf(job, self.model.tensors)
            self.expect_state(job)
            found = mount.digests(job.rank_file("base", "tp1-pp1-dp1", 0, ""))
            self.assertEqual({name: found.get(name) for name in kept}, kept)
            job.set_layout(tp=2)
            self.assertEqual(job.status()["warnings"], [])
            self.expect_state(job)
            self.expect_hf(job, self.model.tensors)
            self.assertEqual(len(mount.read_json(job.checkpoint("base", "meta.json"))["tensors"]), 4 * len(self.model.tensors))

    def test_beside_another_model_s_files(self):
        """Whose parameters have other names, or which are not all there: kept as they are, which is said."""
        def drop_rank(top):
            os.unlink(top + "/global_step100/zero_pp_rank_1_mp_rank_00_optim_states.pt")

        def rename(top):
            shapes = [OrderedDict(("base." + name, torch.Size(self.trained.shapes[name])) for name in names) for names in self.trained.groups]
            save(self.trained.model_state(2, param_shapes=shapes), top + "/global_step100/mp_rank_00_model_states.pt")

        for number, spoil in enumerate((drop_rank, rename)):
            job = self.mount.job(f"other-{number}")
            top = job.incoming("base")
            self.model.write_hf(top)
            self.trained.save_flat(lambda rank, top=top: top + "/global_step100", 2)
            spoil(top)
            self.beside(top)
            job.commit("base")
            self.expect_hf(job, self.model.tensors)
            job.set_layout(tp=2)
            warning, = job.status()["warnings"]
            for words in ("files of DeepSpeed's (global_step100/zero_pp_rank_0_mp_rank_00_optim_states.pt", "no layout cuts what is in them"):
                self.assertIn(words, warning)

    def test_round_robin_gradients(self):
        for dp in (2, 3):
            job = self.mount.job(f"dealt-{dp}")
            self.trained = Trained(self.model)
            self.trained.deal(dp)
            self.assertNotEqual(self.trained.groups, self.trained.mapped)
            self.trained.save_flat(lambda rank, job=job: job.incoming("base") + "/global_step100", dp)
            self.beside(job.incoming("base"))
            job.commit("base")
            self.expect_hf(job, self.model.tensors)
            self.expect_state(job)
        # In another order than one that is dealt from it, they are of two checkpoints.
        self.trained.mapped = [group[::-1] for group in self.trained.mapped]
        job = self.mount.job("mixed")
        self.trained.save_flat(lambda rank: job.incoming("base") + "/global_step100", 3)
        self.beside(job.incoming("base"))
        self.assertEqual(mount.error_of(os.rename, job.incoming("base"), job.checkpoint("base")), "ECANCELED")
        self.assertIn("they are of two checkpoints", mount.read_text(job.incoming("base") + ".error"))

    def test_of_each_rank_in_its_own_directory(self):
        job = self.new_job()
        top = job.incoming("base")
        job.set_layout(dp=2)
        self.trained.save_flat(lambda rank: f"{top}/rank/{rank}/global_step100", 2)
        for rank in range(2):
            models.write_file(f"{top}/rank/{rank}/seed.txt", f"of {rank}")
        self.beside(top + "/rank/0")
        job.commit("base")
        self.expect_hf(job, self.model.tensors)
        self.expect_state(job)
        for rank in range(2):
            self.assertEqual(mount.read_text(job.rank_file("base", "tp1-pp1-dp2", rank, "seed.txt")), f"of {rank}")

    def test_stage_3(self):
        job = self.new_job()
        top = job.incoming("base")
        rng = random.Random(9)
        buffer = models.random_tensor(rng, "model.rotary.inv_freq", "F32", (8,))
        frozen = models.random_tensor(rng, "model.layers.0.self_attn.q_norm.weight", "BF16", (7,))
        self.trained.save_stage_3(top + "/global_step100", 3, [buffer], [frozen])
        self.beside(top)
        job.commit("base")
        whole = [*self.trained.whole["fp32"].values(), buffer, frozen]
        found = models.read_hf(job.checkpoint("base", "hf"))
        self.assertEqual(found, {tensor.name: tensor for tensor in whole})
        self.expect_state(job, "model.safetensors", master="", layouts=["tp1-pp1-dp1"], more=[buffer, frozen])
        values = torch.load(job.rank_file("base", "tp1-pp1-dp1", 0, "values.pt"), weights_only=False)
        self.assertEqual(values["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][0]["lr"], 0.25)
        self.assertEqual(values["global_steps"], 100)

    def test_stage_3_made_universal(self):
        """Its parameters are flat there, and the model's file says their shapes."""
        job = self.new_job()
        top = job.incoming("base") + "/tag_universal"
        self.trained.save_stage_3(top, 2)
        for rank in range(2):
            os.unlink(f"{top}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        self.trained.save_universal(top, model=False, flat=True)
        self.beside(job.incoming("base"))
        job.commit("base")
        self.expect_hf(job, list(self.trained.whole["fp32"].values()))
        self.expect_state(job, "model.safetensors", master="", step=True)

    def test_import(self):
        top = self.temporary("run")
        self.trained.save_flat(lambda rank: top + "/global_step100", 2)
        self.beside(top)
        done = self.mount.ptc("import", "imported", top)
        self.assertEqual(done.returncode, 0, done.stderr)
        job = mount.Job(self.mount, "imported")
        self.expect_hf(job, self.model.tensors)
        self.expect_state(job, layouts=["tp2-pp1-dp1"])

    def test_import_of_the_latest(self):
        top = self.temporary("run")
        save({}, top + "/global_step50/mp_rank_00_model_states.pt")
        self.trained.save_flat(lambda rank: top + "/global_step100", 2)
        self.beside(top)
        os.unlink(top + "/latest")
        done = self.mount.ptc("import", "unsaid", top, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("no file 'latest'", done.stderr)
        models.write_file(top + "/latest", "global_step100\n")
        done = self.mount.ptc("import", "latest", top)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("left out: global_step50", done.stderr)
        self.expect_hf(mount.Job(self.mount, "latest"), self.model.tensors)

    def refused(self, spoil, *reasons, write=None):
        """Refused with these reasons, and every file is still there."""
        job = self.mount.job(f"{self.id().rsplit('.', 1)[-1]}-{self.refusals}")
        self.refusals += 1
        top = job.incoming("base") + "/global_step100"
        (write or (lambda at: self.trained.save_flat(lambda rank: at, 2)))(top)
        spoil(top)
        before = mount.digests(job.incoming("base"))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in reasons:
            self.assertIn(reason, job.commit_error("base"))
        self.assertEqual(mount.digests(job.incoming("base")), before)

    refusals = 0
    OPTIM = "/zero_pp_rank_1_mp_rank_00_optim_states.pt"

    def change(self, change, file=OPTIM):
        def spoil(top):
            value = torch.load(top + file, weights_only=False)
            change(value.get("optimizer_state_dict", value))
            torch.save(value, top + file)
        return spoil

    def test_refusals(self):
        def shorten(state, key="single_partition_of_fp32_groups"):
            state[key][0] = state[key][0][:-3].clone()

        def shorten_moment(state):
            moments = state["base_optimizer_state"]["state"][0]
            moments["exp_avg"] = moments["exp_avg"][:-30].clone()

        def shift(state):
            next(iter(state["param_slice_mappings"][1].values())).start += 1

        def pad(state, by=2):
            state["group_paddings"][0] += by

        def transpose(state):
            shapes = state["param_shapes"][0]
            shapes["lm_head.weight"] = torch.Size(reversed(shapes["lm_head.weight"]))
        model = "/mp_rank_00_model_states.pt"
        self.refused(lambda top: os.unlink(top + self.OPTIM), "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing", "2 data-parallel ranks")
        self.refused(lambda top: os.unlink(top + "/zero_pp_rank_0_mp_rank_00_optim_states.pt"), "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing")
        self.refused(lambda top: os.unlink(top + model), "there is no global_step100/mp_rank_00_model_states.pt")
        self.refused(self.change(pad), "group 0", "of padding by group_paddings, which does not fit")
        self.refused(self.change(lambda state: pad(state, 1 << 62)), "group 0", "which does not fit")
        self.refused(self.change(shorten), "group 0", "one is cut short")
        self.refused(self.change(shorten_moment), "zero_pp_rank_1", "'exp_avg'", "cannot be cut")
        self.refused(self.change(shift), "param_slice_mappings", "two checkpoints")
        self.refused(self.change(lambda state: state.update(partition_count=[2, 4])), "zero_pp_rank_2_mp_rank_00_optim_states.pt is missing")
        self.refused(self.change(lambda state: state["base_optimizer_state"]["state"][0].pop("exp_avg")), "another state")
        self.refused(self.change(lambda state: state["base_optimizer_state"]["state"][0].update({f"s{n}": torch.zeros(1) for n in range(70)})), "kinds of state")
        self.refused(self.change(transpose, model), "'lm_head.weight' is [515, 64] in the module, and [64, 515] in param_shapes")
        self.refused(self.change(lambda state: state["param_shapes"].pop(), model), "has 2 groups of parameters, and param_shapes of the model 1")
        self.refused(self.change(lambda state: state["param_shapes"][1].popitem(), model), "group 1", "does not fit")
        self.refused(self.change(lambda state: state.update(mp_world_size=2), model), "cut over several ranks", "ds_to_universal.py")
        self.refused(lambda top: os.rename(top + self.OPTIM, top + "/zero_pp_rank_0_mp_rank_01_optim_states.pt"), "ds_to_universal.py")
        self.refused(lambda top: save({}, top + "/layer_0_expert_3_mp_rank_00_model_states.pt"), "layer_0_expert_3", "MoE")
        self.refused(lambda top: save({}, top + "/../global_step200/mp_rank_00_model_states.pt"), "two checkpoints", "move one away")
        self.refused(lambda top: os.truncate(top + self.OPTIM, os.path.getsize(top + self.OPTIM) - 100), "zero_pp_rank_1_mp_rank_00_optim_states.pt: ")

    def test_refusals_of_universal_folders(self):
        universal = self.trained.save_universal
        self.refused(lambda top: os.unlink(top + "/zero/model.norm.weight/exp_avg.pt"), "zero/model.norm.weight/exp_avg.pt is missing", write=universal)
        self.refused(lambda top: [os.unlink(f"{top}/zero/model.norm.weight/{key}.pt") for key in (*KEYS, "step")],
                     "zero/model.norm.weight/ is missing", write=universal)
        self.refused(lambda top: save(torch.zeros(5), top + "/zero/model.norm.weight/fp32.pt"), "zero/model.norm.weight/fp32.pt", "[5]", write=universal)
        self.refused(lambda top: save({"param": torch.zeros(64), "more": torch.zeros(2)}, top + "/zero/model.norm.weight/fp32.pt"), "'more'", write=universal)

    def test_refusals_of_stage_3(self):
        def write(top):
            self.trained.save_stage_3(top, 2)

        def shorten(state):
            state["fp32_flat_groups"][0] = state["fp32_flat_groups"][0][:-1].clone()
        self.refused(self.change(shorten), "'fp32'", "cannot be cut", write=write)
        self.refused(lambda top: os.unlink(top + "/zero_pp_rank_1_mp_rank_00_model_states.pt"), "zero_pp_rank_1_mp_rank_00_model_states.pt", write=write)
        self.refused(self.change(lambda state: state.update(mp_world_size=2), "/zero_pp_rank_0_mp_rank_00_model_states.pt"),
                     "cut over several ranks", "ds_to_universal.py", write=write)


class Universal(mount.TestCase):
    """layouts/<layout>/deepspeed/: what DeepSpeed's engine loads with "load_universal", of whatever was committed."""

    def setUp(self):
        super().setUp()
        self.model = models.Llama()
        self.trained = Trained(self.model)

    def tree(self, job, layout="tp1-pp1-dp1"):
        """Every file of it, as torch reads it without running code."""
        top = job.checkpoint("base", "layouts", layout, "deepspeed")
        found = {}
        with torch.serialization.safe_globals([LossScaler]):
            for path in mount.digests(top):
                if path.endswith(".pt"):
                    with open(f"{top}/{path}", "rb") as file:
                        found[path] = torch.load(file, weights_only=True)
                        file.seek(0)
                        self.assertEqual(len(file.read()), os.path.getsize(f"{top}/{path}"))
                else:
                    found[path] = mount.read_text(f"{top}/{path}")
        return found

    def expect(self, tree, states, tag="global_step100", ranks=1, step=7., left_out=(), universal="cat_dim"):
        """`states`: tensors by name and kind."""
        self.assertEqual(tree.pop("latest_universal"), tag)
        for words in left_out:
            self.assertIn(words, tree["LEFT_OUT.txt"])
        self.assertEqual(bool(left_out), tree.pop("LEFT_OUT.txt", "") != "")
        for key, name in [(key, name) for name, kinds in states.items() for key in kinds]:
            found = tree.pop(f"{tag}/zero/{name}/{key}.pt")
            self.assertIsInstance(found.pop(universal), int)
            self.assertEqual(set(found) - {"vocab_tensor", "param_n_sub_params"}, {"param"})
            wanted = states[name][key]
            self.assertEqual((found["param"].dtype, found["param"].shape), (wanted.dtype, wanted.shape), name)
            self.assertEqual(bits(found["param"]), bits(wanted), (name, key))
        steps = {path: tree.pop(path) for path in list(tree) if path.endswith("/step.pt")}
        self.assertEqual(set(steps), set() if step is None else {f"{tag}/zero/{name}/step.pt" for name in states})
        self.assertEqual([step] * len(steps), list(steps.values()))
        model_states = [tree.pop(f"{tag}/{stage}mp_rank_{rank:02}_model_states.pt") for stage in ("", "zero_pp_rank_0_") for rank in range(ranks)]
        for state in model_states:
            self.assertEqual((state["mp_world_size"], state["module"]), (ranks, {}))
        optimizer = tree.pop(f"{tag}/zero/optimizer_state.pt")
        self.assertEqual(tree, {})
        return model_states[0], optimizer

    def whole(self):
        return {name: {key: to_torch(self.trained.whole[key][name]) for key in KEYS} for name in self.trained.shapes}

    def expect_said(self, state, optimizer):
        """Beside tensors, of what DeepSpeed itself saved."""
        self.assertEqual((state["global_steps"], state["lr_scheduler"], state["ds_version"]), (100, {"last_batch_iteration": 99}, "0.19.0"))
        self.assertEqual([group["lr"] for group in optimizer["param_groups"]], [0.25] * len(optimizer["param_groups"]))
        self.assertEqual(optimizer["optimizer_state_dict"]["param_groups"][0]["lr"], 0.25)
        self.assertEqual(optimizer["optimizer_state_dict"]["state"][0]["step"], 7)
        self.assertEqual((optimizer["loss_scaler"].cur_scale, optimizer["overflow"]), (1.0, False))
        self.assertNotIn("zero_stage", optimizer)
        self.assertTrue(optimizer["ds_version"])

    def test_of_stages_1_and_2(self):
        job = self.new_job()
        self.trained.save_flat(lambda rank: job.incoming("base") + "/global_step100", 2)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        for layout, ranks in (("tp1-pp1-dp1", 1), ("tp2-pp1-dp2", 2), ("tp2-pp3-dp1", 6)):
            state, optimizer = self.expect(self.tree(job, layout), self.whole(), ranks=ranks)
            self.expect_said(state, optimizer)
            self.assertEqual(optimizer["clip_grad"], 1.0)
            self.assertEqual(state["dp_world_size"], int(layout[-1]))
        before = mount.digests(job.checkpoint("base", "layouts/tp1-pp1-dp1/deepspeed"))
        job.set_layout(tp=2)
        self.assertEqual(mount.digests(job.checkpoint("base", "layouts/tp1-pp1-dp1/deepspeed")), before)
        self.assertEqual(sorted(os.listdir(job.file("current"))), ["deepspeed", "rank"])

    def test_of_stage_3(self):
        job = self.new_job()
        self.trained.save_stage_3(job.incoming("base") + "/global_step100", 3)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.expect_said(*self.expect(self.tree(job), self.whole()))

    def test_of_a_model_that_no_rules_know(self):
        job = self.new_job()
        for number, tensor in enumerate(self.model.tensors):
            tensor.name = f"{number}.weight"
        self.trained = Trained(self.model)
        self.trained.save_flat(lambda rank: job.incoming("base") + "/global_step100", 2)
        job.commit("base")
        self.expect_said(*self.expect(self.tree(job), self.whole(), left_out=[f"cat_dim of {len(self.whole())} tensors ('0.weight' …): no rule"]))

    def test_how_a_rank_cuts_each(self):
        """In DeepSpeed's words, for a model that is cut over tensor-parallel ranks."""
        job = self.new_job()
        self.trained.save_flat(lambda rank: job.incoming("base") + "/global_step100", 1)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        top = job.checkpoint("base", "layouts/tp2-pp1-dp1/deepspeed/global_step100/zero")
        cut = {name: torch.load(f"{top}/{name}/exp_avg.pt", weights_only=True) for name in self.trained.shapes}
        for name, said in cut.items():
            rows = 1 if "o_proj" in name or "down_proj" in name else 0
            self.assertEqual(said["cat_dim"], rows, name)

    def test_universal_folders(self):
        """Come out as they came in, but for who wrote them."""
        job = self.new_job()
        top = job.incoming("base")
        self.trained.save_universal(top + "/global_step100_universal")
        models.write_file(top + "/config.json", self.model.config_text())
        before = mount.read_bytes(top + "/global_step100_universal/zero/optimizer_state.pt")
        job.commit("base")
        state, _ = self.expect(self.tree(job), self.whole(), tag="global_step100_universal")
        self.assertEqual(state["global_steps"], 100)
        self.assertEqual(mount.read_bytes(job.file("current/deepspeed/global_step100_universal/zero/optimizer_state.pt")), before)

    def test_a_copy_comes_in_again(self):
        job = self.new_job()
        self.trained.save_flat(lambda rank: job.incoming("base") + "/global_step100", 2)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        for layout, ranks in (("tp1-pp1-dp1", 1), ("tp2-pp1-dp1", 2)):
            again = self.mount.job(f"again-{ranks}")
            shutil.copytree(job.checkpoint("base", "layouts", layout, "deepspeed"), again.incoming("base"), dirs_exist_ok=True)
            again.commit("base")
            self.assertEqual(models.read_hf(again.checkpoint("base", "hf")), self.trained.whole["fp32"])
            self.expect_said(*self.expect(self.tree(again), self.whole(), ranks=ranks))

    def test_of_the_trainer_s(self):
        job = self.new_job()
        top = job.incoming("base")
        self.model.write_hf(top)
        self.trained.save_flat(lambda rank: top + "/global_step100", 2)
        job.commit("base")
        tree = self.tree(job, "tp2-pp1-dp1")
        for stage in ("", "zero_pp_rank_0_"):
            state = tree[f"global_step100/{stage}mp_rank_00_model_states.pt"]
            self.assertEqual(sorted(state["module"]), sorted(self.trained.shapes))
            state["module"] = {}
        self.expect_said(*self.expect(tree, self.whole()))

    def test_of_fully_sharded(self):
        """dcp.save's, as FSDP2's state has it: names of the optimizer's state are its own there."""
        dcp = mount.require("torch.distributed.checkpoint")
        job = self.new_job()
        weights = {name: to_torch(self.trained.whole["fp32"][name]) for name in self.trained.shapes}
        moments = {name: {"step": torch.tensor(7.), **{key: to_torch(self.trained.whole[key][name]) for key in KEYS[1:]}} for name in weights}
        dcp.save({"model": weights, "optim": {"state": moments, "param_groups": [{"lr": 0.5, "params": list(weights)}]}},
                 checkpoint_id=job.incoming("base"), no_dist=True)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        tree = self.tree(job)
        state, optimizer = self.expect(tree, self.whole(), tag="global_step0",
                                       left_out=["lr_scheduler", "load_lr_scheduler_states=False", "global_steps"])
        self.assertEqual((state["global_steps"], state["skipped_steps"], state["lr_scheduler"]), (0, 0, None))
        self.assertEqual(optimizer["optimizer_state_dict"]["state"][0]["step"], 7)
        # As many groups as anybody has, and none of them says anything.
        self.assertGreater(len(optimizer["param_groups"]), 100)
        self.assertFalse(any(optimizer["param_groups"]))

    def test_of_megatron_s(self):
        job = self.new_job()
        model = megatron.Model(dtype=torch.bfloat16)
        megatron.save_tree(job.incoming("base"), model, 2, 2, mixed=True)
        job.commit("base")
        kinds = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        states = {name: {key: megatron.fill(kind + name, *shape) for key, kind in kinds.items()} for _, name, shape in model.stage(0, 1) if shape}
        state, _ = self.expect(self.tree(job, "tp2-pp1-dp1"), states, ranks=2, step=100.,
                               left_out=["lr_scheduler", "optimizer.grad_scaler.scale"])
        self.assertEqual(state["global_steps"], 100)

    def test_of_megatron_s_distributed_optimizer(self):
        job = self.new_job()
        model = megatron.Model(dtype=torch.bfloat16)
        megatron.save_tree(job.incoming("base"), model, 1, 2, distributed={"dp": 2})
        job.commit("base")
        kinds = {"fp32": "", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
        states = {name: {key: megatron.fill(kind + name, *shape) for key, kind in kinds.items()} for _, name, shape in model.stage(0, 1) if shape}
        _, optimizer = self.expect(self.tree(job), states, step=100., left_out=["lr_scheduler"])
        self.assertEqual(optimizer["optimizer_state_dict"]["state"][0]["step"], 100.)
        self.assertEqual(optimizer["optimizer_state_dict"]["state"][0]["step"].dtype, torch.float32)

    def test_of_a_model_alone(self):
        job = self.new_job()
        self.model.write_hf(job.incoming("base"))
        job.commit("base")
        states = {tensor.name: {"fp32": to_torch(tensor)} for tensor in self.model.tensors}
        self.expect(self.tree(job), states, tag="global_step0", step=None,
                    left_out=["fp32 copies of", "widens", "exp_avg.pt and exp_avg_sq.pt of", "only with load_module_only=True\n"])

    def save_with_moments(self, job, state_of):
        """As FSDP2's state; `state_of`: of a parameter's number, what there is of the optimizer's beside its name."""
        dcp = mount.require("torch.distributed.checkpoint")
        weights = {name: to_torch(self.trained.whole["fp32"][name]) for name in self.trained.shapes}
        states = {name: state_of(number, {key: to_torch(self.trained.whole[key][name]) for key in KEYS[1:]})
                  for number, name in enumerate(weights)}
        dcp.save({"model": weights, "optim": {"state": states}}, checkpoint_id=job.incoming("base"), no_dist=True)
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        return weights, states

    def test_moments_of_which_nobody_knows_the_steps(self):
        job = self.new_job()
        weights, _ = self.save_with_moments(job, lambda number, moments: moments)
        self.expect(self.tree(job), {name: {"fp32": weight} for name, weight in weights.items()}, tag="global_step0", step=None,
                    left_out=[f"moments of {len(weights)} tensors ('model.embed_tokens.weight' …)", "after how many steps",
                              "only with load_module_only=True\n"])

    def test_moments_of_some(self):
        job = self.new_job()
        weights, states = self.save_with_moments(job, lambda number, moments: {"step": torch.tensor(7.), **moments} if number % 2 else {})
        tree = self.tree(job)
        self.assertEqual({path.split("/")[2] for path in tree if path.endswith(("/step.pt", "/exp_avg.pt"))},
                         {name for name in weights if states[name]})
        self.assertIn("only with load_module_only=True, stages 1 and 2 only where no other of its group has moments\n", tree["LEFT_OUT.txt"])

    def test_steps_that_differ(self):
        job = self.new_job()
        top = job.incoming("base") + "/global_step100_universal"
        self.trained.save_universal(top)
        for number, name in enumerate(self.trained.shapes):
            save(7 + number // 40, f"{top}/zero/{name}/step.pt")
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.assertIn("parameters have different ones. Stages 1 and 2 do not load", self.tree(job)["LEFT_OUT.txt"])


if __name__ == "__main__":
    mount.main()
