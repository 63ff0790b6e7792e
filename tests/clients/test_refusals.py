"""Layouts that cannot be are refused when they are saved; the reason says what is wrong, and where."""
import json
import os
import re

import models
import mount

REST = '"pp": 1, "dp": 1'

# What is wrong → (text, reasons …). A § stands where the reason must point; no § where the text as a
# whole is wrong. NODE is the name of the node there is.
REFUSED = {
    "a comma too many": ('{"tp": 2,\n "pp": 1,§, "dp": 1}', "not valid JSON"),
    "a comma behind the last": ('{"tp": 2, "pp": 1,\n "dp": 1,\n§}', "not valid JSON: the comma before this '}' is one too many"),
    "a comment": ('{"tp": 2, "pp": 1, §// ranks\n "dp": 1}', "not valid JSON: JSON has no comments"),
    "a page": ('§<!DOCTYPE html><html><body>404</body></html>', "it is an HTML page"),
    "no quotes": ('§tp: 2', "not valid JSON"),
    "cut off": ('{"tp": 2, "pp": 1§', "ends too early"),
    "only a new line": ('\n§', "ends too early"),
    "more behind it": ('{"tp": 2, %s} §{}' % REST, "more text after the end"),
    "not UTF-8": ('{"tp": 2, "pp§\udcff": 1, "dp": 1}', "not valid JSON"),
    "nested without end": ('[' * 32 + '§' + '[' * 200, "nested deeper than 32"),
    "a list": ('§[2, 1, 1]', "a layout is a JSON object"),
    "a key twice": ('{"tp": 2, §"tp": 4, %s}' % REST, "'tp' is there twice"),
    "an unknown key": ('{§"tpp": 2, %s}' % REST, "unknown key 'tpp'", "did you mean 'tp'?"),
    "an unknown long key": ('{"tp": 2, %s,\n  §"optimiser": "replicated"}' % REST,
                            "did you mean 'optimizer'?"),
    "a key like no other": ('{"tp": 2, %s, §"quantisation": 4}' % REST,
                            "unknown key 'quantisation'"),
    "tp is missing": ('§{%s}' % REST, "'tp' is missing"),
    "dp is missing": ('§{"tp": 2, "pp": 1}', "'dp' is missing"),
    "zero": ('{"tp": §0, %s}' % REST, "'tp' must be a whole number from 1"),
    "negative": ('{"tp": 1, "pp": §-1, "dp": 1}', "'pp' must be a whole number from 1"),
    "a fraction": ('{"tp": 1, "pp": 1, "dp": §1.5}', "'dp' must be a whole number from 1"),
    "an exponent": ('{"tp": §1e1, %s}' % REST, "'tp' must be a whole number from 1"),
    "a number as text": ('{"tp": §"2", %s}' % REST, "'tp' must be a whole number from 1"),
    "null": ('{"tp": 1, %s, "ep": §null}' % REST, "'ep' must be a whole number from 1"),
    "a list as a size": ('{"tp": 1, %s, "cp": §[1]}' % REST, "'cp' must be a whole number from 1"),
    "too many for one size": ('{"tp": §2000000, %s}' % REST, "'tp' must be a whole number from 1"),
    "beyond 64 bits": ('{"tp": §18446744073709551617, %s}' % REST, "'tp' must be"),
    "too many ranks": ('{"tp": §4096, "pp": 4096, "dp": 4096}', "the sizes make more than"),
    "another format": ('{"format": §"ptc-layout/2", "tp": 2, %s}' % REST, "ptc-layout/1"),
    "format is no text": ('{"format": §1, "tp": 2, %s}' % REST, "'format' must be a text"),
    "an order of two": ('{"tp": 2, %s, "order": §"tp-pp"}' % REST, "order 'tp-pp' must name tp, cp"),
    "an order with a stranger": ('{"tp": 2, %s, "order": §"tp-cp-ep-dp-xp"}' % REST, "order 'tp-cp"),
    "an order with one twice": ('{"tp": 2, %s, "order": §"tp-tp-ep-dp-pp"}' % REST, "order 'tp-tp"),
    "order is no text": ('{"tp": 2, %s, "order": §["tp"]}' % REST, "'order' must be a text"),
    "an unknown naming": ('{"tp": 2, %s, "naming": §"local"}' % REST, '"global" or "stage"'),
    "naming is no text": ('{"tp": 2, %s, "naming": §true}' % REST, "'naming' must be a text"),
    "an unknown optimizer": ('{"tp": 2, %s, "optimizer": §"zero3"}' % REST,
                             '"replicated", "zero1" or "fsdp"'),
    "optimizer is no text": ('{"tp": 2, %s, "optimizer": §1}' % REST, "'optimizer' must be a text"),
    "negative replicas": ('{"tp": 2, %s, "replicas": §-1}' % REST, "whole number from 0 to 64"),
    "too many replicas": ('{"tp": 2, %s, "replicas": §65}' % REST, "whole number from 0 to 64"),
    "replicas as text": ('{"tp": 2, %s, "replicas": §"1"}' % REST, "'replicas' must be"),
    "negative keep": ('{"tp": 2, %s, "keep": §-2}' % REST, "'keep' must be a whole number from 0"),
    "half a checkpoint": ('{"tp": 2, %s, "keep": §0.5}' % REST, "'keep' must be a whole number"),
    "too many to keep": ('{"tp": 2, %s, "keep": §4294967296}' % REST, "'keep' must be"),
    "devices are no list": ('{"tp": 2, %s, "devices": §"NODE:0"}' % REST, "'devices' must be a list"),
    "too few devices": ('{"tp": 2, "pp": 2, "dp": 1, "devices": §["NODE:0", "NODE:1"]}',
                        "'devices' has 2 entries, but", "= 4 ranks"),
    "too many devices": ('{"tp": 1, %s, "devices": §["NODE:0", "NODE:1"]}' % REST,
                         "'devices' has 2 entries, but", "= 1 ranks"),
    "a device without index": ('{"tp": 1, %s, "devices": [§"NODE"]}' % REST, '"node:index"'),
    "a device of words": ('{"tp": 1, %s, "devices": [§"NODE:gpu0"]}' % REST, '"node:index"'),
    "a device as number": ('{"tp": 2, %s, "devices": ["NODE:0", §1]}' % REST, '"node:index"'),
    "a device twice": ('{"tp": 2, %s, "devices": ["NODE:0",\n §"NODE:0"]}' % REST,
                       "device 'NODE:0' is given to rank 0 already"),
    "an unknown node": ('{"tp": 2, %s, "devices": ["NODE:0",\n §"nowhere:1"]}' % REST,
                        "node 'nowhere' is not part of this cluster (nodes: NODE)"),
    "stages are no list": ('{"tp": 1, "pp": 2, "dp": 1, "stages": §5}', "'stages' must be a list"),
    "too few stages": ('{"tp": 1, "pp": 2, "dp": 1, "stages": §[5]}',
                       "'stages' has 1 entries, but pp is 2"),
    "a stage of less than none": ('{"tp": 1, "pp": 2, "dp": 1, "stages": [6, §-1]}', "must be a whole number"),
    "stages that do not add up": ('{"tp": 1, "pp": 2, "dp": 1,\n "stages": §[1, 1]}',
                                  "adds up to 2 layers, but the model has 5"),
    "stretches of one stage": ('{"tp": 1, "pp": 1, "dp": 1, "vpp": §2}', "'vpp' is 2", "pp must be more than 1"),
    "too few stages for stretches": ('{"tp": 1, "pp": 2, "dp": 1, "vpp": 2, "stages": §[3, 2]}',
                                     "'stages' has 2 entries, but pp·vpp is 4"),
    "stretches with numbers of a stage": ('{"tp": 1, "pp": 2, "dp": 1, "naming": "stage", "vpp": §2}', "no numbers of its own"),
    "more stretches than layers": ('{"tp": 1, "pp": 2, "dp": 1, "vpp": §3}', "pp·vpp is 6, and the model has 5 layers"),
    "a tensor that does not divide": ('{"tp": §3, %s}' % REST, "does not fit checkpoint base",
                                      "model.layers.", "3"),
}


class Saving(mount.TestCase):
    """Both ways of saving, and what must hold after each that was refused."""

    def save(self, text):
        """Saves in place; the error is what close says."""
        fd = os.open(self.path, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, text.encode(errors="surrogateescape"))
        finally:
            error = mount.error_of(os.close, fd)
        return error

    def save_by_rename(self, text):
        with open(self.path + ".new", "wb") as file:
            file.write(text.encode(errors="surrogateescape"))
        return mount.error_of(os.rename, self.path + ".new", self.path)

    def begin(self, job):
        self.job, self.path = job, job.file("layout.json")
        self.before, self.text = job.status(), mount.read_text(self.path)

    def check_told(self, *reasons):
        """status.json and `ptc status` have all of the reason."""
        what = self.job.error()
        for reason in reasons:
            self.assertIn(reason, what)
        told = self.job.mount.ptc("status", self.job.name).stdout
        self.assertIn("".join(what.split()), "".join(told.split()))

    def check_refused(self, text, *reasons):
        for save, error in ((self.save, "EINVAL"), (self.save_by_rename, "ECANCELED")):
            self.assertEqual(save(text), error, text)
            self.check_told(os.path.basename(self.path) + " refused: ", *reasons)
            if not any(re.match(r"line \d+, column \d+$", reason) for reason in reasons):
                self.assertNotRegex(self.job.error(), r"line \d")
            status = self.job.status()
            for key in ("layout", "wanted", "revision", "state", "checkpoints"):
                self.assertEqual(status[key], self.before[key])
            self.assertEqual(mount.read_text(self.path), self.text, "the old content again")
        with open(self.path + ".new", "rb") as file:  # what was not taken is still there
            self.assertEqual(file.read(), text.encode(errors="surrogateescape"))

    def check_accepted(self, text):
        self.assertEqual(self.save_by_rename(text), "")
        status = self.job.wait()
        self.assertIsNone(status["last_error"])
        self.assertEqual(status["revision"], self.before["revision"] + 1)
        self.assertEqual(mount.read_text(self.path), text)
        self.begin(self.job)


class Refusals(Saving):
    def setUp(self):
        super().setUp()
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2)
        self.begin(job)

    def test_every_refusal(self):
        node = self.before["nodes"][0]["name"]
        for number, (what, (marked, *reasons)) in enumerate(REFUSED.items()):
            with self.subTest(what):
                marked = marked.replace("NODE", node)
                before, mark, after = marked.partition("§")
                reasons = [reason.replace("NODE", node) for reason in reasons]
                if mark:
                    lines = before.split("\n")
                    reasons.append(f"line {len(lines)}, column {len(lines[-1]) + 1}")
                self.check_refused(before + after, *reasons)
                self.check_accepted('{"tp": 2, %s, "keep": %d}' % (REST, number))

    def test_an_empty_file(self):
        # Emptied and closed is half of an editor's work, not an edit; moved over it, it is one.
        self.assertEqual(self.save(""), "")
        self.assertEqual(mount.read_text(self.path), self.text)
        self.assertEqual(self.job.status()["revision"], self.before["revision"])
        self.assertEqual(self.save_by_rename(""), "ECANCELED")
        self.check_told("line 1, column 1", "ends too early")
        self.assertEqual(mount.read_text(self.path), self.text)

    def test_a_parameter_without_a_rule(self):
        job = self.mount.job("uncovered")
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors",
                                 [models.Tensor("odd.thing", "F32", (4,), bytes(16))])
        job.commit("base")
        self.begin(job)
        self.check_refused('{"tp": 2, %s}' % REST, "line 1, column 8", "odd.thing")
        self.check_accepted('{"tp": 1, "pp": 1, "dp": 2}')

    def test_more_parts_than_are_computed_at_once(self):
        """Of a layout by name one rank is looked at after the other."""
        tensors = [models.Tensor(f"layers.{i}.weight", "F32", (4096,), i.to_bytes(4, "little") * 4096) for i in range(1000)]
        job = self.mount.job("large")
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors", tensors)
        job.commit("base")
        self.begin(job)
        self.check_refused('{"tp": 1, "pp": 1, "dp": 16384, "optimizer": "fsdp"}', "line 1, column 46", "16384000 parts", "8000000", "dp_shard")
        found = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp16384-fsdp", 4000))
        self.assertEqual(len(found), 1000)
        self.assertEqual((found["layers.7.weight"].shape, found["layers.7.weight"].data), ((1,), b"\7\0\0\0"))

    def test_a_checkpoint_that_lost_tensors(self):
        images = os.path.join(self.mount.store, "images")
        self.mount.stop()
        sizes = {os.path.getsize(os.path.join(images, name)): name for name in os.listdir(images)}
        os.rename(os.path.join(images, sizes[max(sizes)]), self.temporary("image"))
        self.mount.start()
        self.assertEqual(self.job.status()["layout"], "tp2-pp1-dp1")
        lost = self.job.status()["checkpoints"][0]["lost"]
        self.begin(self.job)
        self.check_refused('{"tp": 4, %s}' % REST, "has lost", lost[0])
        self.check_accepted('{"tp": 2, "pp": 1, "dp": 2}')


class LostSecrets(mount.TestCase):
    def test_names_that_are_not_for_all_are_not_in_status(self):
        job = self.new_job()
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors",
                                 [models.Tensor("secret.weight", "F32", (4096,), bytes(4 * 4096))])
        os.chmod(job.incoming("base") + "/rank/0/model.safetensors", 0o600)
        job.commit("base")
        images = os.path.join(self.mount.store, "images")
        self.mount.stop()
        sizes = {os.path.getsize(os.path.join(images, name)): name for name in os.listdir(images)}
        os.rename(os.path.join(images, sizes[max(sizes)]), self.temporary("image"))
        self.mount.start()
        status = job.status()
        self.assertEqual(status["checkpoints"][0]["lost"], ["1 of names that are not for all"])
        self.assertIn("has lost 1 tensor", " ".join(status["warnings"]))
        self.assertNotIn("secret", json.dumps(status))


class NamesOfTensors(mount.TestCase):
    def test_a_terminal_is_told_no_more_than_text(self):
        job = self.new_job()
        llama = models.Llama()
        llama.tensors.append(models.Tensor("a\n\x1b[31mx/base: good", "F32", (4,), bytes(16)))
        llama.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        images = os.path.join(self.mount.store, "images")
        for name in os.listdir(images):  # each byte of them
            os.chmod(os.path.join(images, name), 0o600)
            with open(os.path.join(images, name), "r+b") as file:
                content = file.read()
                file.seek(0)
                file.write(bytes(byte ^ 1 for byte in content))
        for command in (("verify", job.name + "/base"), ("rules", "check", job.name + "/base")):
            told = self.mount.ptc(*command, check=False).stdout
            self.assertIn("x/base: good", told, command)
            self.assertNotIn("\x1b", told, command)
            self.assertNotIn("\nx/base", told, command)


class AFailedReshard(Saving):
    def test_saving_the_same_text_again_tries_again(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        images = os.path.join(self.mount.store, "images")
        sizes = {os.path.getsize(os.path.join(images, name)): name for name in os.listdir(images)}
        image = os.path.join(images, sizes[max(sizes)])

        def flip():
            os.chmod(image, 0o600)
            with open(image, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 4]))

        flip()
        wanted = '{"tp": 2, %s}' % REST
        self.begin(job)
        self.assertEqual(self.save(wanted), "")
        with self.assertRaises(mount.Failed):
            job.wait()
        self.check_told("reshard to tp2-pp1-dp1 failed", "save layout.json again")
        self.assertEqual(job.status()["layout"], "tp1-pp1-dp1")
        self.assertEqual(self.save(wanted), "")  # as wrong as before
        with self.assertRaises(mount.Failed):
            job.wait()
        flip()
        self.assertEqual(self.save_by_rename(wanted), "")
        status = job.wait()
        self.assertEqual((status["layout"], status["revision"]),
                         ("tp2-pp1-dp1", self.before["revision"] + 1))
        self.assertIsNone(status["last_error"])


class WideLlama(models.Llama):
    """Some 8 MiB."""
    vocab = 32768
    config = {**models.Llama.config, "vocab_size": vocab}


class NoRoom(Saving):
    """A store of its own size."""
    mount_options = ("--memory", "24M")
    only_root = "can mount a tmpfs for the store"

    def test_not_enough_memory(self):
        job = self.new_job()
        WideLlama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        filler = job.file("filler")
        models.write_file(filler, bytes(10 << 20))
        self.begin(job)
        node = self.before["nodes"][0]["name"]
        self.check_refused('{"tp": 2, %s}' % REST, f"not enough memory on node {node}",
                           "tp2-pp1-dp1 of checkpoint base needs 8", "of 24.0 MiB are free")
        os.unlink(filler)
        self.check_accepted('{"tp": 2, %s}' % REST)


if __name__ == "__main__":
    mount.main()
