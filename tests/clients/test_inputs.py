"""What a checkpoint may be made of: one file or shards, .npy files, and anything else beside."""
import os

import models
import mount


class Inputs(mount.TestCase):
    def test_shards_with_an_index_count_as_one_file(self):
        model = models.Llama()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0", sharded=True)
        job.commit("base")
        job.set_layout(tp=2)
        for rank in range(2):
            held = {t.name: t for t in model.rank_tensors(2, 1, rank, 0)}
            self.assertEqual(models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", rank)),
                             held)
            names = os.listdir(job.checkpoint("base", "layouts/tp2-pp1-dp1/rank", rank))
            self.assertEqual(sorted(names), ["config.json", "model.safetensors", "tensors"])
        whole = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(whole, {t.name: t for t in model.tensors})

    def test_npy_files(self):
        model = models.Bert()
        job = self.new_job()
        for tensor in model.tensors:
            models.write_file(job.incoming("base") + f"/rank/0/{tensor.name}.npy",
                              models.npy_bytes(tensor))
        models.write_file(job.incoming("base") + "/rank/0/config.json", model.config_text())
        job.commit("base")
        for tensor in model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)

    def test_other_files_byte_for_byte(self):
        model = models.Gpt2()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        others = {"tokenizer.json": '{"model": "ü"}'.encode(), "empty": b"",
                  "rng.bin": os.urandom(70001), "nested/dir/scheduler.json": b"{}",
                  "not json.json": b"{{{", "with space \xc3\xa9": b"x"}
        for name, data in others.items():
            models.write_file(job.incoming("base") + "/rank/0/" + name, data)
        others["config.json"] = model.config_text().encode()
        job.commit("base")
        job.set_layout(tp=2, pp=2)
        for top in (job.checkpoint("base", "layouts/tp2-pp2-dp1/rank/0"),
                    job.checkpoint("base", "layouts/tp1-pp1-dp1/rank/0"),
                    job.checkpoint("base", "hf"), job.file("current/rank/0")):
            for name, data in others.items():
                with open(os.path.join(top, name), "rb") as file:
                    self.assertEqual(file.read(), data, os.path.join(top, name))

    def test_optimizer_state_follows_its_parameters(self):
        model = models.Gpt2()
        rng = models.random.Random(3)
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        state = []
        for tensor in model.tensors:
            for name, shape in (("exp_avg", tensor.shape), ("step", ())):
                state.append(
                    models.random_tensor(rng, f"state.{tensor.name}.{name}", "F32", shape))
        models.write_safetensors(job.incoming("base") + "/rank/0/optim.safetensors", state)
        job.commit("base")
        job.set_layout(tp=2, pp=3)
        for rank in range(6):
            parameters = {t.name for t in model.rank_tensors(2, 3, rank % 2, rank // 2)}
            held = models.read_safetensors(job.rank_file("base", "tp2-pp3-dp1", rank,
                                                         "optim.safetensors"))
            self.assertEqual({name[len("state."):].rsplit(".", 1)[0] for name in held}, parameters)
            for tensor in state:
                parameter = tensor.name[len("state."):].rsplit(".", 1)[0]
                if parameter not in parameters:
                    continue
                expected = tensor
                if tensor.name.endswith("exp_avg"):
                    expected = model.cut(
                        models.Tensor(parameter, "F32", tensor.shape, tensor.data), rank % 2, 2)
                self.assertEqual(held[tensor.name].data, expected.data, tensor.name)

    def test_names_that_need_care_in_a_path(self):
        names = ["a..b", ".hidden", "with/slash", "per%cent", "x.npy.y", "ü.weight", "a"]
        tensors = [models.random_tensor(models.random.Random(i), name, "U8", (i + 1,))
                   for i, name in enumerate(names)]
        job = self.new_job()
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors", tensors)
        job.commit("base")
        meta = mount.json.loads(mount.read_text(job.checkpoint("base", "meta.json")))
        paths = {entry["name"]: entry["path"] for entry in meta["tensors"]}
        self.assertEqual(set(paths), set(names))
        for tensor in tensors:
            path = job.checkpoint("base", paths[tensor.name])
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)

    def test_several_checkpoints(self):
        job = self.new_job()
        for seed in (1, 2, 3):
            models.Bert(seed).write_hf(job.incoming(f"step{seed}") + "/rank/0")
            job.commit(f"step{seed}")
        self.assertEqual(sorted(os.listdir(job.file("checkpoints"))), ["step1", "step2", "step3"])
        self.assertEqual(job.status()["checkpoint"], "step3")
        for seed in (1, 2, 3):
            found = models.read_safetensors(job.rank_file(f"step{seed}", "tp1-pp1-dp1", 0))
            self.assertEqual(found, {t.name: t for t in models.Bert(seed).tensors})


if __name__ == "__main__":
    mount.main()
