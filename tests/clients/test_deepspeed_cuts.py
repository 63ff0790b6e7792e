"""layouts/<layout>/deepspeed/: what its files say of how tensor-parallel ranks cut each parameter."""
import os

import models
import mount

torch = mount.require("torch")
from test_deepspeed_trees import bits, save, to_torch  # noqa: E402  pylint: disable=wrong-import-position


class ThreeWays(models.Llama):
    """Of which two ranks cannot have halves, as of SmolLM."""
    layers = 2
    hidden, heads, kv, dim, ffn, vocab = 72, 9, 3, 8, 177, 515

    def __init__(self, vocab=515, fused=False):
        self.vocab, self.fused = vocab, fused
        self.config = {**models.Llama.config, "model_type": "phi3" if fused else "llama", "hidden_size": self.hidden,
                       "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                       "num_key_value_heads": self.kv, "vocab_size": vocab}
        super().__init__()

    def build(self):
        super().build()
        if not self.fused:
            return
        gone = (".q_proj.", ".k_proj.", ".v_proj.", ".gate_proj.", ".up_proj.")
        self.tensors = [tensor for tensor in self.tensors if not any(word in tensor.name for word in gone)]
        for layer in range(self.layers):
            self.add(f"model.layers.{layer}.self_attn.qkv_proj.weight", (self.heads + 2 * self.kv) * self.dim, self.hidden)
            self.add(f"model.layers.{layer}.mlp.gate_up_proj.weight", 2 * self.ffn, self.hidden)


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
                    found = torch.cat([part.chunk(tp, dim=said["cat_dim"])[rank] for part in parts], dim=said["cat_dim"])
                if any(word in tensor.name for word in unsaid):
                    self.assertNotEqual(bits(found), bits(wanted), tensor.name)
                else:
                    self.assertEqual((found.shape, bits(found)), (wanted.shape, bits(wanted)), tensor.name)
        return mount.read_text(f"{top}/LEFT_OUT.txt")

    def test_heads_that_two_does_not_divide(self):
        said = self.expect_cut(ThreeWays(), 3)
        self.assertNotIn("tensor parallelism", said)

    def test_a_vocabulary_that_two_ranks_do_not_pad(self):
        for vocab in (256, 20):
            self.expect_cut(ThreeWays(vocab=vocab), 3, name=f"rows-{vocab}")

    def test_fused_parts(self):
        said = self.expect_cut(ThreeWays(fused=True), 3, unsaid=["qkv_proj"])
        self.assertIn("how ranks cut 2 tensors ('model.layers.0.self_attn.qkv_proj.weight' …): parts of different sizes", said)

    def test_heads_that_nobody_has_counted(self):
        """Without config.json: of what is not fused the rule says the axis."""
        job, model = self.new_job(), ThreeWays()
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
