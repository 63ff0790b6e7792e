"""NumPy: model/**.npy loads and maps like any .npy, and holds what was written."""
import os

import models
import mount

numpy = mount.require("numpy")

# What NumPy has no name for comes as raw bytes ("|V2"); its true type is in user.ptc.dtype.
TYPES = {"F16": "<f2", "F32": "<f4", "I64": "<i8", "BF16": "|V2"}


class Numpy(mount.TestCase):
    def import_model(self, model):
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        return job

    def check_model(self, model):
        job = self.import_model(model)
        for tensor in model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            for mode in ("r", None):
                array = numpy.load(path, mmap_mode=mode)
                self.assertEqual(array.shape, tensor.shape, tensor.name)
                self.assertEqual(array.dtype, numpy.dtype(TYPES[tensor.dtype]), tensor.name)
                self.assertEqual(array.tobytes(), tensor.data, tensor.name)
        return job

    def test_llama(self):
        job = self.check_model(models.Llama())
        path = job.checkpoint("base", "model/model/norm/weight.npy")
        self.assertEqual(os.getxattr(path, "user.ptc.dtype"), b"BF16")

    def test_gpt2(self):
        self.check_model(models.Gpt2())

    def test_bert(self):
        self.check_model(models.Bert())

    def test_arrays_of_a_rank(self):
        model = models.Gpt2()
        job = self.import_model(model)
        job.set_layout(tp=2, pp=2)
        for rank in range(4):
            for tensor in model.rank_tensors(2, 2, rank % 2, rank // 2):
                path = job.checkpoint("base", "layouts/tp2-pp2-dp1/rank", rank, "tensors",
                                      tensor.name.replace(".", "/") + ".npy")
                array = numpy.load(path, mmap_mode="r")
                self.assertEqual((array.shape, array.tobytes()), (tensor.shape, tensor.data),
                                 tensor.name)

    def test_maps_stay_readable_over_a_reshard(self):
        model = models.Gpt2()
        job = self.import_model(model)
        tensor = model.tensors[0]
        array = numpy.load(job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy"),
                           mmap_mode="r")
        job.set_layout(tp=4)
        self.assertEqual(array.tobytes(), tensor.data)


if __name__ == "__main__":
    mount.main()
