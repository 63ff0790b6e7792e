"""layouts/<layout>/deepspeed/: what its files say of how tensor-parallel ranks cut each parameter."""
import os
from dataclasses import dataclass

import models
import mount

torch = mount.require("torch")
from test_deepspeed_trees import bits, name_as, save, to_torch  # noqa: E402  pylint: disable=wrong-import-position


@dataclass
class SubparamShape:
    """DeepSpeed pickles objects of a class of its own, which need not be here."""
    patterns: list
    shape: tuple
    partition_dim: int


name_as(SubparamShape, "deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
torch.serialization.add_safe_globals([SubparamShape])


class Copied(models.ThreeWays):
    """With one group of keys, which all ranks have."""
    kv = 1

    def __init__(self):
        super().__init__(fused=True)


class Cuts(mount.TestCase):
    def expect_cut(self, model, tp, unsaid=(), name=None):
        """As DeepSpeed cuts each parameter for `tp` ranks by what its file says, it is what these ranks have, but of `unsaid`."""
        job = self.mount.job(name) if name else self.new_job()
        model.write_hf(job.incoming("base"))
        job.commit("base")
        layout = f"tp{tp}-pp1-dp1"
        top = job.checkpoint("base", "layouts", layout, "deepspeed")
        for rank in range(tp):
            held = models.read_safetensors(job.rank_file("base", layout, rank, "model.safetensors"))
            for tensor in model.tensors:
                said = torch.load(f"{top}/global_step0/zero/{tensor.name}/fp32.pt", weights_only=True)
                wanted = to_torch(held[tensor.name])
                found = said["param"]
                if said.get("vocab_tensor"):
                    found = torch.nn.functional.pad(found, (0, 0, 0, len(wanted) * tp - len(found)))
                if found.shape != wanted.shape:
                    parts = found.chunk(said.get("param_n_sub_params", 1), dim=said["cat_dim"])
                    if "sub_param_shape" in said:
                        shape = said["sub_param_shape"]
                        self.assertNotIn("param_n_sub_params", said)
                        self.assertEqual((shape.patterns, shape.partition_dim), ([], said["cat_dim"]))
                        whole = [sum(one) if isinstance(one, tuple) else one for one in shape.shape]
                        self.assertEqual(whole, list(found.shape))
                        parts = found.split(list(shape.shape[shape.partition_dim]), dim=shape.partition_dim)
                    found = torch.cat([part.chunk(tp, dim=said["cat_dim"])[rank] for part in parts], dim=said["cat_dim"])
                if any(word in tensor.name for word in unsaid):
                    self.assertNotEqual(bits(found), bits(wanted), tensor.name)
                else:
                    self.assertEqual((found.shape, bits(found)), (wanted.shape, bits(wanted)), tensor.name)
        return mount.read_text(f"{top}/LEFT_OUT.txt")

    def test_heads_that_two_does_not_divide(self):
        said = self.expect_cut(models.ThreeWays(), 3)
        self.assertNotIn("tensor parallelism", said)

    def test_a_vocabulary_that_two_ranks_do_not_pad(self):
        for vocab in (256, 20):
            self.expect_cut(models.ThreeWays(vocab=vocab), 3, name=f"rows-{vocab}")

    def test_fused_parts(self):
        """Of the same sizes, and of others, as those of grouped queries."""
        said = self.expect_cut(models.ThreeWays(fused=True), 3)
        self.assertNotIn("tensor parallelism", said)

    def test_fused_parts_of_which_ranks_have_more_than_a_share(self):
        """One group of keys: each rank has all of it."""
        said = self.expect_cut(Copied(), 3, unsaid=["qkv_proj"])
        self.assertIn("how ranks cut 2 tensors ('model.layers.0.self_attn.qkv_proj.weight' …): ranks have more of it than their", said)

    def test_heads_that_nobody_has_counted(self):
        """Without config.json: of what is not fused the rule says the axis."""
        job, model = self.new_job(), models.ThreeWays()
        models.write_safetensors(job.incoming("base") + "/model.safetensors", model.tensors)
        job.commit("base")
        top = job.checkpoint("base", "layouts/tp1-pp1-dp1/deepspeed/global_step0/zero/model.layers.0.")
        self.assertEqual([torch.load(f"{top}{name}.weight/fp32.pt", weights_only=True)["cat_dim"]
                          for name in ("self_attn.o_proj", "self_attn.q_proj", "mlp.down_proj")], [1, 0, 1])

    def test_of_very_many_that_no_rules_know(self):
        job = self.new_job()
        save({f"part{number}.weight": torch.zeros(2, 2) for number in range(4000)}, job.incoming("base") + "/pytorch_model.bin")
        job.commit("base")

        def cpu_seconds():
            fields = mount.read_text(f"/proc/{self.mount.process.pid}/stat").rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        begin = cpu_seconds()
        self.assertEqual(len(os.listdir(job.checkpoint("base", "layouts/tp1-pp1-dp1/deepspeed/global_step0/zero"))), 4001)
        self.assertLess(cpu_seconds() - begin, 4)


if __name__ == "__main__":
    mount.main()
