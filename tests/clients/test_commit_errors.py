"""A checkpoint that is wrong is not committed, loses nothing, and is told why."""
import json
import os
import struct

import models
import mount


class CommitErrors(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()
        self.model = models.Gpt2()

    def check_refused(self, name, *reasons):
        before = sorted(os.walk(self.job.incoming(name)))
        self.assertEqual(mount.error_of(self.job.commit, name), "EINVAL")
        text = self.job.commit_error(name)
        for reason in reasons:
            self.assertIn(reason, text)
        self.assertEqual(sorted(os.walk(self.job.incoming(name))), before, "nothing is lost")
        self.assertEqual(os.listdir(self.job.file("checkpoints")), [])

    def check_accepted_after(self, name):
        self.job.commit(name)
        self.assertEqual(os.listdir(self.job.file("checkpoints")), [name])
        self.assertFalse(os.path.exists(self.job.incoming(name)))
        self.assertFalse(os.path.exists(self.job.incoming(name) + ".error"))

    def rank_path(self, rank, file="model.safetensors"):
        return os.path.join(self.job.incoming("base"), "rank", str(rank), file)

    def write_header(self, header, data=b""):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        models.write_file(self.rank_path(0), struct.pack("<Q", len(text)) + text + data)

    def test_a_missing_rank(self):
        self.job.set_layout(tp=2, pp=3)
        self.model.write_ranks(self.job.incoming("base"), 2, 3)
        content = open(self.rank_path(3), "rb").read()
        os.unlink(self.rank_path(3))
        os.rmdir(os.path.dirname(self.rank_path(3)))
        self.check_refused("base", "rank", "3")
        models.write_file(self.rank_path(3), content)
        self.check_accepted_after("base")

    def test_a_tensor_missing_on_one_rank(self):
        self.job.set_layout(tp=2)
        self.model.write_ranks(self.job.incoming("base"), 2, 1)
        held = self.model.rank_tensors(2, 1, 1, 0)
        models.write_safetensors(self.rank_path(1), [t for t in held if t.name != "h.1.ln_1.bias"])
        self.check_refused("base", "h.1.ln_1.bias")
        models.write_safetensors(self.rank_path(1), held)
        self.check_accepted_after("base")

    def test_a_wrong_shape(self):
        self.job.set_layout(tp=2)
        self.model.write_ranks(self.job.incoming("base"), 2, 1)
        held = self.model.rank_tensors(2, 1, 1, 0)
        whole = next(t for t in self.model.tensors if t.name == "h.0.mlp.c_fc.weight")
        models.write_safetensors(self.rank_path(1),
                                 [whole if t.name == whole.name else t for t in held])
        self.check_refused("base", whole.name, "rank")
        models.write_safetensors(self.rank_path(1), held)
        self.check_accepted_after("base")

    def test_a_truncated_header(self):
        content = models.safetensors_bytes(self.model.tensors)
        models.write_file(self.rank_path(0), content[:100])
        self.check_refused("base", "model.safetensors")
        models.write_file(self.rank_path(0), content[:5])
        self.check_refused("base", "model.safetensors")
        models.write_file(self.rank_path(0), content)
        self.check_accepted_after("base")

    def test_truncated_data(self):
        content = models.safetensors_bytes(self.model.tensors)
        models.write_file(self.rank_path(0), content[:-1])
        self.check_refused("base", "model.safetensors")
        models.write_file(self.rank_path(0), content + b"x")
        self.check_refused("base", "model.safetensors")

    def test_an_unknown_dtype(self):
        self.write_header({"w": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}},
                          bytes(16))
        self.check_refused("base", "F128", "w")

    def test_headers_that_lie(self):
        for header in (
                b"{", b"[]", b"\xff\xfe{}",
                {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}},
                {"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}},
                {"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
                {"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}},
                {"w": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}},
                {"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
                 "v": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}):
            self.write_header(header, bytes(16))
            self.check_refused("base", "model.safetensors")
        models.write_file(self.rank_path(0), struct.pack("<Q", 2**63) + b"{}")
        self.check_refused("base", "model.safetensors")

    def test_an_empty_directory(self):
        os.mkdir(self.job.incoming("base"))
        self.check_refused("base")

    def test_a_layout_of_the_writer_that_is_wrong(self):
        self.model.write_hf(self.job.incoming("base") + "/rank/0")
        models.write_file(self.job.incoming("base") + "/layout.json", '{"tp": 2, "pp": 1, "dp": 1}')
        self.check_refused("base", "rank")
        models.write_file(self.job.incoming("base") + "/layout.json", '{"tpp": 2}')
        self.check_refused("base", "tpp")

    def test_an_existing_name(self):
        for seed in (1, 2):
            models.Gpt2(seed).write_hf(self.job.incoming("base") + "/rank/0")
            if seed == 1:
                self.job.commit("base")
        self.assertIn(mount.error_of(self.job.commit, "base"), ("EEXIST", "ENOTEMPTY"))
        found = models.read_safetensors(self.job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in models.Gpt2(1).tensors})
        self.assertTrue(os.path.exists(self.rank_path(0)))

    def test_a_file_still_open_for_writing(self):
        self.model.write_hf(self.job.incoming("base") + "/rank/0")
        with open(self.rank_path(0, "late.bin"), "wb") as file:
            file.write(b"begun")
            file.flush()
            self.assertEqual(mount.error_of(self.job.commit, "base"), "EBUSY")
            file.write(b" and ended")
        self.check_accepted_after("base")
        text = mount.read_text(self.job.file("current/rank/0/late.bin"))
        self.assertEqual(text, "begun and ended")


if __name__ == "__main__":
    mount.main()
