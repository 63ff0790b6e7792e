"""PyTorch: loads the ranks' files, bit for bit, and saves through the mount."""
import models
import mount

torch = mount.require("torch")
mount.require("safetensors")
safetensors_torch = mount.require("safetensors.torch")


def bits(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes()


class Torch(mount.TestCase):
    def test_ranks_load_equal(self):
        model = models.Llama()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        original = safetensors_torch.load_file(job.file("current/rank/0/model.safetensors"))
        for tensor in model.tensors:
            self.assertEqual(bits(original[tensor.name]), tensor.data, tensor.name)
        job.set_layout(tp=2, pp=2)
        for rank in range(4):
            loaded = safetensors_torch.load_file(
                job.file("current", "rank", rank, "model.safetensors"))
            for tensor in model.rank_tensors(2, 2, rank % 2, rank // 2):
                self.assertEqual(bits(loaded[tensor.name]), tensor.data, tensor.name)
        files = [job.file("current", "rank", rank, "model.safetensors") for rank in (0, 1)]
        halves = [safetensors_torch.load_file(file) for file in files]
        name = "model.layers.0.mlp.down_proj.weight"
        self.assertTrue(torch.equal(torch.cat([half[name] for half in halves], 1), original[name]))

    def test_mapped_arrays(self):
        numpy = mount.require("numpy")
        model = models.Bert()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        for tensor in model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            array = torch.from_numpy(numpy.load(path, mmap_mode="c"))
            self.assertEqual(bits(array), tensor.data, tensor.name)

    def test_safetensors_written_into_the_mount(self):
        job = self.new_job()
        tensors = {"a.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
                   "b.bias": torch.randn(5)}
        mount.os.makedirs(job.incoming("base") + "/rank/0")
        safetensors_torch.save_file(tensors, job.incoming("base") + "/rank/0/model.safetensors")
        job.commit("base")
        loaded = safetensors_torch.load_file(job.file("current/rank/0/model.safetensors"))
        for name, tensor in tensors.items():
            self.assertTrue(torch.equal(loaded[name], tensor), name)


if __name__ == "__main__":
    mount.main()
