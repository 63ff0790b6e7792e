"""The safetensors library reads what each rank loads; the ranks' parts are the model."""
import models
import mount

numpy = mount.require("numpy")
safetensors = mount.require("safetensors")
safetensors_numpy = mount.require("safetensors.numpy")


def as_bytes(array):
    return numpy.ascontiguousarray(array).tobytes()


class Safetensors(mount.TestCase):
    def check_ranks(self, model, tp, pp):
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=tp, pp=pp)
        for rank in range(tp * pp):
            expected = {t.name: t for t in model.rank_tensors(tp, pp, rank % tp, rank // tp)}
            path = job.file("current", "rank", rank, "model.safetensors")
            with safetensors.safe_open(path, framework="numpy") as file:
                self.assertEqual(set(file.keys()), set(expected))
                for name, tensor in expected.items():
                    piece = file.get_slice(name)
                    self.assertEqual(tuple(piece.get_shape()), tensor.shape, name)
                    self.assertEqual(piece.get_dtype(), tensor.dtype, name)
            for name, tensor in models.read_safetensors(path).items():
                self.assertEqual(tensor.data, expected[name].data, f"rank {rank}: {name}")
        return job

    def test_gpt2(self):
        model = models.Gpt2()
        job = self.check_ranks(model, 2, 3)
        # Whole arrays and slices through the library, for the types that NumPy knows.
        path = job.file("current", "rank", 0, "model.safetensors")
        loaded = safetensors_numpy.load_file(path)
        with safetensors.safe_open(path, framework="numpy") as file:
            for tensor in model.rank_tensors(2, 3, 0, 0):
                self.assertEqual(as_bytes(loaded[tensor.name]), tensor.data, tensor.name)
                part = file.get_slice(tensor.name)[1:3]
                self.assertEqual(as_bytes(part), as_bytes(loaded[tensor.name][1:3]), tensor.name)

    def test_bert(self):
        self.check_ranks(models.Bert(), 4, 1)

    def test_llama_with_shared_key_value_heads(self):
        self.check_ranks(models.Llama(), 4, 2)

    def test_halves_are_the_whole(self):
        model = models.Gpt2()
        job = self.check_ranks(model, 2, 1)
        halves = [safetensors_numpy.load_file(job.file("current", "rank", r, "model.safetensors"))
                  for r in range(2)]
        original = {t.name: t for t in model.tensors}
        for name, axis in (("h.0.mlp.c_fc.weight", 1), ("h.2.mlp.c_proj.weight", 0)):
            whole = numpy.concatenate([half[name] for half in halves], axis=axis)
            self.assertEqual(as_bytes(whole), original[name].data, name)

    def test_hf_has_no_optimizer_state(self):
        """Whether or not its names are known: an adapter's, a model's of no family."""
        rng = models.random.Random(11)
        weight, *state = [models.random_tensor(rng, name, "F32", shape) for name, shape in (
            ("block.w", (4, 2)), ("optimizer.state.0.exp_avg", (4, 2)), ("state.0.step", ()), ("exp_avg_sq.block.w.default", (4, 2)))]
        for name, config, file in (("other", "config.json", "model.safetensors"),
                                   ("adapter", "adapter_config.json", "adapter_model.safetensors")):
            job = self.mount.job(name)
            rank = job.incoming("base") + "/rank/0"
            models.write_file(f"{rank}/{config}", "{}")
            models.write_safetensors(f"{rank}/{file}", [weight])
            models.write_safetensors(f"{rank}/optim.safetensors", state)
            job.commit("base")
            self.assertEqual(sorted(mount.os.listdir(job.checkpoint("base", "hf"))), sorted((config, file)))
            self.assertEqual(models.read_safetensors(job.checkpoint("base", "hf", file)), {weight.name: weight})

    def test_types(self):
        job = self.new_job()
        rng = models.random.Random(7)
        tensors = [models.random_tensor(rng, f"t.{dtype}", dtype, (3, 5))
                   for dtype in models.ITEM_BYTES]
        tensors.append(models.random_tensor(rng, "scalar", "I64", ()))
        tensors.append(models.random_tensor(rng, "empty", "F32", (0, 4)))
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors", tensors)
        job.commit("base")
        path = job.file("current/rank/0/model.safetensors")
        with safetensors.safe_open(path, framework="numpy") as file:
            self.assertEqual(set(file.keys()), {t.name for t in tensors})
        found = models.read_safetensors(path)
        for tensor in tensors:
            self.assertEqual(found[tensor.name], tensor)

    def test_hugging_face_files(self):
        model = models.Bert()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2, pp=2)
        with safetensors.safe_open(job.checkpoint("base", "hf/model.safetensors"), "numpy") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}
        for tensor in model.tensors:
            self.assertEqual(as_bytes(found.pop(tensor.name)), tensor.data, tensor.name)
        self.assertEqual(found, {})


if __name__ == "__main__":
    mount.main()
