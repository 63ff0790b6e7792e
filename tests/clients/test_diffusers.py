#!/usr/bin/env python3
"""Diffusion transformers of diffusers, each cut as its own tensor-parallel plan does, on a real mount."""
import inspect
import json
import os

import mount

torch = mount.require("torch")
diffusers = mount.require("diffusers")
resolve_tp_shard_specs = mount.require("diffusers.hooks.tensor_parallel").resolve_tp_shard_specs
from safetensors.torch import load_file, save_file  # noqa: E402  pylint: disable=wrong-import-position

TP = 2
SMALL = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "joint_attention_dim": 32,
         "pooled_projection_dim": 16, "caption_projection_dim": 64, "in_channels": 4, "out_channels": 4, "text_dim": 32,
         "freq_dim": 16, "ffn_dim": 128, "axes_dims_rope": (4, 6, 6), "sample_size": 8, "pos_embed_max_size": 8,
         "cross_attention_dim": 64, "caption_channels": 32, "timestep_guidance_channels": 16, "num_embeds_ada_norm": 10,
         "norm_num_groups": 4}
#: Of diffusers' transformers, the set of rules that is to know each.
FAMILIES = {"FluxTransformer2DModel": "flux", "Flux2Transformer2DModel": "flux", "SD3Transformer2DModel": "flux",
            "QwenImageTransformer2DModel": "flux", "WanTransformer3DModel": "flux", "DiTTransformer2DModel": "dit",
            "PixArtTransformer2DModel": "dit", "OvisImageTransformer2DModel": "ovis_image"}


def tiny(name):
    """The model, without memory, and its tensors, of small numbers."""
    cls = getattr(diffusers, name)
    known = inspect.signature(cls.__init__).parameters
    config = {key: value for key, value in SMALL.items() if key in known}
    if name == "Flux2Transformer2DModel":
        config["axes_dims_rope"] = (4, 4, 4, 4)
    with torch.device("meta"):
        model = cls(**config)
    generator = torch.Generator().manual_seed(len(name))
    return model, {key: torch.randint(0, 1 << 15, value.shape, generator=generator).to(torch.int16)
                   for key, value in model.state_dict().items()}


def parts(model, tensors, rank):
    """What the model's own plan gives this rank; a tensor that it does not name is whole."""
    specs = resolve_tp_shard_specs(model, model._tp_plan, TP) if getattr(model, "_tp_plan", None) else {}
    cut = {}
    for name, tensor in tensors.items():
        spec = specs.get(name)
        if spec is None or spec.dim is None:
            cut[name] = tensor
            continue
        blocks = tensor.split(spec.block_sizes, dim=spec.dim)
        cut[name] = torch.cat([block.chunk(TP, dim=spec.dim)[rank] for block in blocks], dim=spec.dim)
    return specs, cut


class Diffusers(mount.TestCase):
    def test_each_is_cut_as_its_plan_does(self):
        planned = 0
        for name, family in FAMILIES.items():
            if not hasattr(diffusers, name):
                continue
            with self.subTest(name):
                model, tensors = tiny(name)
                job = self.mount.job(name.lower())
                target = job.incoming("base") + "/rank/0"
                os.makedirs(target)
                with open(target + "/config.json", "w", encoding="utf-8") as file:
                    json.dump(dict(model.config) | {"_class_name": name}, file, default=list)
                save_file(tensors, target + "/diffusion_pytorch_model.safetensors")
                job.commit("base")
                layout = f"tp{TP}-pp1-dp1"
                report = json.loads(self.mount.ptc("rules", "check", f"{job.name}/base", "--layout", layout, "--json", check=False).stdout)
                self.assertEqual((report["family"], report["fits"]), (family, True))
                for rank in range(TP):
                    specs, plan = parts(model, tensors, rank)
                    planned += bool(specs)
                    ours = load_file(job.rank_file("base", layout, rank, "diffusion_pytorch_model.safetensors"))
                    self.assertEqual(ours.keys(), plan.keys())
                    for tensor in specs:
                        self.assertTrue(torch.equal(ours[tensor], plan[tensor]), tensor)
                    if specs:  # where there is a plan, it is all that is cut
                        self.assertEqual([tensor for tensor in ours if ours[tensor].shape != plan[tensor].shape], [])
                pipeline = json.loads(self.mount.ptc("rules", "check", f"{job.name}/base", "--layout", "tp1-pp2-dp1", "--json",
                                                     check=False).stdout)
                self.assertIs(pipeline["fits"], True)
        self.assertGreaterEqual(planned, 2 * TP)


if __name__ == "__main__":
    mount.main()
