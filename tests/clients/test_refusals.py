"""Layouts that cannot be are refused when they are saved; the reason names what is wrong."""
import json
import os

import models
import mount


class Refusals(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()
        models.Llama().write_hf(self.job.incoming("base") + "/rank/0")
        self.job.commit("base")
        self.path = self.job.file("layout.json")
        self.job.set_layout(tp=2)
        self.before = self.job.status()
        self.text = mount.read_text(self.path)

    def save(self, text):
        """Saves in place; the error is what close says."""
        fd = os.open(self.path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, text.encode())
        finally:
            error = mount.error_of(os.close, fd)
        return error

    def save_by_rename(self, text):
        with open(self.path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        return mount.error_of(os.rename, self.path + ".new", self.path)

    def check_refused(self, text, *reasons):
        for save in (self.save, self.save_by_rename):
            self.assertEqual(save(text), "EINVAL", text)
            for reason in reasons:
                self.assertIn(reason, self.job.error())
            status = self.job.status()
            self.assertEqual(status["layout"], self.before["layout"])
            self.assertEqual(status["revision"], self.before["revision"])
            self.assertEqual(mount.read_text(self.path), self.text, "the old content again")

    def test_not_json(self):
        self.check_refused('{"tp": 2,\n "pp": 1,,\n "dp": 1}', "line 2", "column")
        self.check_refused("\n", "line 2")
        self.check_refused("tp: 2", "line 1")

    def test_an_empty_file(self):
        # Emptied and closed is half of an editor's work, not an edit; moved over it, it is one.
        self.assertEqual(self.save(""), "")
        self.assertEqual(mount.read_text(self.path), self.text)
        self.assertEqual(self.job.status()["revision"], self.before["revision"])
        self.assertEqual(self.save_by_rename(""), "EINVAL")
        self.assertEqual(mount.read_text(self.path), self.text)

    def test_unknown_key(self):
        self.check_refused('{"tpp": 2, "pp": 1, "dp": 1}', "tpp", "'tp'", "line 1", "column")

    def test_missing_key(self):
        self.check_refused('{"tp": 2, "pp": 1}', "dp")

    def test_bad_values(self):
        self.check_refused('{"tp": 0, "pp": 1, "dp": 1}', "tp")
        self.check_refused('{"tp": "2", "pp": 1, "dp": 1}', "tp")
        self.check_refused('{"tp": 1.5, "pp": 1, "dp": 1}', "tp")
        self.check_refused('{"tp": 4000000000, "pp": 4000000000, "dp": 4000000000}')
        self.check_refused('{"tp": 2, "pp": 1, "dp": 1, "order": "tp-pp"}', "order")

    def test_duplicate_key(self):
        self.check_refused('{"tp": 2, "tp": 4, "pp": 1, "dp": 1}', "tp")

    def test_devices_do_not_fit_the_sizes(self):
        node = self.before["nodes"][0]["name"]
        layout = {"tp": 2, "pp": 2, "dp": 1, "devices": [f"{node}:0", f"{node}:1"]}
        self.check_refused(json.dumps(layout), "devices", "4")

    def test_unknown_node(self):
        layout = {"tp": 2, "pp": 1, "dp": 1, "devices": ["nowhere:0", "nowhere:1"]}
        self.check_refused(json.dumps(layout), "nowhere")

    def test_stages_do_not_add_up(self):
        self.check_refused('{"tp": 1, "pp": 2, "dp": 1, "stages": [1, 1]}', "stages")
        self.check_refused('{"tp": 1, "pp": 2, "dp": 1, "stages": [5]}', "stages")

    def test_a_tensor_that_does_not_divide(self):
        self.check_refused('{"tp": 3, "pp": 1, "dp": 1}', "model.layers.", "3")

    def test_a_parameter_without_a_rule(self):
        job = self.mount.job("uncovered")
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors",
                                 [models.Tensor("odd.thing", "F32", (4,), bytes(16))])
        job.commit("base")
        with open(job.file("new"), "w", encoding="utf-8") as file:
            file.write('{"tp": 2, "pp": 1, "dp": 1}')
        self.assertEqual(mount.error_of(os.rename, job.file("new"), job.file("layout.json")),
                         "EINVAL")
        self.assertIn("odd.thing", job.error())

    def test_a_good_edit_after_a_refused_one(self):
        self.check_refused('{"tp": 3, "pp": 1, "dp": 1}')
        self.assertEqual(self.save('{"tp": 4, "pp": 1, "dp": 1}'), "")
        status = self.job.wait()
        self.assertEqual(status["layout"], "tp4-pp1-dp1")
        self.assertIsNone(status["last_error"])


if __name__ == "__main__":
    mount.main()
