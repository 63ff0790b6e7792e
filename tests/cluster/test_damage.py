"""Bytes that change where they lie: they are found, mended from a copy, and read by nobody any more, whoever had them open,
mapped or cached."""
import errno
import json
import mmap
import os
import subprocess
import time
import unittest

import cluster
from cluster import mount
import models
from cases import BigLlama, TestCase, layout_name, read


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


class Reader:
    """Has a file open, mapped, or only read, since it was made."""

    def __init__(self, how, path):
        self.how, self.path = how, path
        self.file = self.mapping = None
        if how != "cached":
            self.file = open(path, "rb", buffering=0)
        if how == "mapped":
            self.mapping = mmap.mmap(self.file.fileno(), 0, prot=mmap.PROT_READ)
            self.file.close()  # the mapping alone is left
        self.content()

    def content(self):
        if self.how == "mapped":
            return self.mapping[:]
        if self.how == "open":
            return os.pread(self.file.fileno(), os.fstat(self.file.fileno()).st_size, 0)
        return read(self.path)

    def close(self):
        if self.mapping is not None:
            self.mapping.close()
        if self.file is not None:
            self.file.close()


class DamageCase(TestCase):
    def image(self, node):
        """The largest file that the node holds for jobs: that of the rank."""
        images = os.path.join(self.nodes.nodes[node].store, "images")
        return max((os.path.join(images, name) for name in os.listdir(images)), key=lambda path: os.stat(path).st_size)

    def holders(self):
        return [node for node in self.alive() if self.nodes.nodes[node].image_bytes() > 0]

    def paths(self, node, name):
        """A stored file, one of another layout, and a parameter of each size."""
        job = self.job(node)
        return [job.rank_file(name, layout_name(1, 1), 0), job.rank_file(name, layout_name(2, 1), 0),
                job.checkpoint(name, "model/model/embed_tokens/weight.npy"),
                job.checkpoint(name, "model/model/layers/0/mlp/up_proj/weight.npy")]

    def commit_two(self, model, name):
        job = self.nodes.job(0, self.name)
        model.write_hf(job.incoming(name) + "/rank/0")
        job.commit(name)
        job.set_layout(replicas=1, devices=["w0:0"])
        self.nodes.wait_settled(self.name)
        cluster.until(lambda: len(self.holders()) == 2, "there are two copies")


class Damage(DamageCase):
    OPTIONS = ("--scrub", "off")

    def test_readers_see_what_was_mended(self):
        """Each way to have a file, on the node where it is damaged and on others; one copy damaged, then the other."""
        seen = set()
        for turn in range(2):
            self.check_readers(turn, seen)
        missing = {(how, where) for how in ("open", "mapped", "cached") for where in ("here", "elsewhere")} - seen
        self.assertFalse(missing, "nobody read the damaged bytes that way")

    def check_readers(self, turn, seen):
        name = f"base{turn}"
        model = BigLlama(40 + turn)
        job = self.nodes.job(0, self.name)
        if turn:
            job.save_layout(keep=1, replicas=1, devices=["w0:0"])
        self.commit_two(model, name)
        if turn:
            cluster.until(lambda: os.listdir(job.file("checkpoints")) == [name], "the one before is gone")
            cluster.until(lambda: len(self.holders()) == 2, "there are two copies")
        damaged = self.holders()[turn]
        image = self.image(damaged)
        size = os.stat(image).st_size
        flip(image, size // 2)                     # of the largest tensor
        small = models.read_safetensors(image)["model.layers.0.mlp.up_proj.weight"].data
        flip(image, read(image).find(small[:64]) + 5)
        readers = {}
        for node in self.alive():
            for path in self.paths(node, name):
                for how in ("open", "mapped", "cached"):
                    readers[node, path, how] = Reader(how, path)
        before = {key: reader.content() for key, reader in readers.items()}
        done = self.nodes.nodes[2].ptc("verify", self.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn(f"image {os.path.basename(image)} on w{damaged}", done.stdout)
        done = self.nodes.nodes[2].ptc("verify", "--repair", self.name, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertIn("good", done.stdout)
        expected = {tensor.name: tensor for tensor in model.rank_tensors(1, 1, 0, 0)}
        good = read(self.job(self.holders()[1 - turn]).rank_file(name, layout_name(1, 1), 0))
        self.assertEqual(models.read_safetensors(self.job(0).rank_file(name, layout_name(1, 1), 0)), expected)
        for (node, path, how), reader in readers.items():
            after = reader.content()
            if after != before[node, path, how]:
                seen.add((how, "here" if node == damaged else "elsewhere"))
            fresh = Reader("cached", path)
            self.assertTrue(after == fresh.content(), (node, path, how, "differs from what is read now"))
            if path.endswith(layout_name(1, 1) + "/rank/0/model.safetensors"):
                self.assertTrue(after == good, (node, path, how))
            reader.close()
        for path in range(4):  # the same on all nodes
            contents = {read(self.paths(node, name)[path]) for node in self.alive()}
            self.assertEqual(len(contents), 1)
        for node in self.alive():
            self.assertIn("good", self.nodes.nodes[node].ptc("verify", self.name).stdout)

    def test_a_flipped_byte_and_a_cut_file(self):
        model = models.Llama(25)
        self.commit(0, model, pp=3, replicas=1)
        self.assertIn("good", self.nodes.nodes[1].ptc("verify", self.name).stdout)
        images = os.path.join(self.nodes.nodes[1].store, "images")
        names = sorted(os.listdir(images))
        first, second = names[:2]
        flip(os.path.join(images, first), os.stat(os.path.join(images, first)).st_size - 1)
        os.truncate(os.path.join(images, second), 100)
        done = self.nodes.nodes[2].ptc("verify", "--repair", self.name)
        for image in (first, second):
            self.assertIn(f"image {image} on w1", done.stdout)
        self.assertEqual(done.stdout.count("made anew from another copy"), 2)
        self.nodes.wait_settled(self.name)
        self.assertEqual(sorted(os.listdir(images)), names)  # mended where they are
        self.expect_everywhere(model, 1, 3)
        for node in self.alive():
            self.nodes.nodes[node].ptc("verify", self.name)
        self.nodes.kill(0)
        self.nodes.wait_members()
        self.expect_everywhere(model, 1, 3)

    def test_a_node_that_was_away_when_it_was_mended(self):
        """It has read the damaged bytes, and hears of it when it is back."""
        model = BigLlama(26)
        self.commit_two(model, "base")
        reader, = set(self.alive()) - set(self.holders())
        damaged = None
        for node in self.holders():
            flip(self.image(node), os.stat(self.image(node)).st_size // 2)
            path = self.paths(reader, "base")[2]
            wrong = Reader("open", path)
            if not wrong.content().endswith(self.right(model)):
                damaged = node
                break
            wrong.close()
            flip(self.image(node), os.stat(self.image(node)).st_size // 2)
        self.assertIsNotNone(damaged, "the reader reads of one of them")
        self.nodes.partition(reader)
        cluster.until(lambda: self.nodes.nodes[damaged].members() == [f"w{node}" for node in self.holders()], "it is gone")
        self.nodes.nodes[damaged].ptc("verify", "--repair", self.name)
        self.nodes.heal(reader)
        self.nodes.wait_members()
        cluster.until(lambda: wrong.content().endswith(self.right(model)), "it reads the right bytes")
        wrong.close()

    def test_what_cannot_be_checked_is_not_called_bad(self):
        model = BigLlama(28)
        self.commit(0, model, pp=2, devices=["w0:0", "w1:0"])
        self.nodes.kill(1)
        for wait in (False, True):  # nobody knows yet that it is away, and then all do
            if wait:
                self.nodes.wait_members()
            done = self.nodes.nodes[0].ptc("verify", self.name, check=False)
            self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
            self.assertIn(f"{self.name}/base: NOT CHECKED:", done.stdout)
            self.assertRegex(done.stdout, r"(?s)stored bytes: not checked: .*w1")
            self.assertNotIn("BAD", done.stdout)
        report = json.loads(self.nodes.nodes[0].ptc("verify", "--json", self.name, check=False).stdout)
        self.assertEqual((report["good"], report["checked"], report["bad"]), (False, False, []))
        self.assertIn("model.norm.weight", [one["name"] for one in report["unread"]])
        image = self.image(0)
        flip(image, os.stat(image).st_size // 2)  # what is wrong is said, whatever else is away
        done = self.nodes.nodes[2].ptc("verify", self.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(f"{self.name}/base: BAD:", done.stdout)
        flip(image, os.stat(image).st_size // 2)
        self.nodes.start(1)
        self.nodes.wait_members()
        cluster.until(lambda: self.nodes.nodes[0].ptc("verify", self.name, check=False).returncode == 0, "all is good")

    @staticmethod
    def right(model):
        tensor, = [one for one in model.rank_tensors(1, 1, 0, 0) if one.name == "model.embed_tokens.weight"]
        return tensor.data

    def test_what_cannot_be_mended_is_made_anew(self):
        """A file that nobody can write: it is taken out, and read by nobody, though it is there."""
        model = BigLlama(27)
        self.commit_two(model, "base")
        damaged = self.holders()[0]
        image = self.image(damaged)
        flip(image, os.stat(image).st_size // 2)
        if subprocess.run(["chattr", "+i", image], capture_output=True, check=False).returncode != 0:
            self.skipTest("files of this tmpfs cannot be made immutable")
        self.addCleanup(subprocess.run, ["chattr", "-i", image], check=False)
        done = self.nodes.nodes[2].ptc("verify", "--repair", self.name)
        self.assertIn("made anew from another copy", done.stdout)
        expected = {tensor.name: tensor for tensor in model.rank_tensors(1, 1, 0, 0)}
        for node in self.alive():
            self.assertEqual(models.read_safetensors(self.job(node).rank_file("base", layout_name(1, 1), 0)), expected)
        self.nodes.wait_settled(self.name)
        self.assertIn("good", self.nodes.nodes[damaged].ptc("verify", self.name).stdout)


class Known(DamageCase):
    """With what is the default, a round a day."""

    def test_what_verify_found_is_not_read_any_more(self):
        model = BigLlama(47)
        self.commit_two(model, "base")
        damaged = self.holders()[1]
        image = self.image(damaged)
        good = read(image)
        flip(image, os.stat(image).st_size // 2)
        readers = {(node, how): Reader(how, self.paths(node, "base")[0]) for node in (2, damaged)
                   for how in ("open", "mapped", "cached")}
        done = self.nodes.nodes[2].ptc("verify", self.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        cluster.until(lambda: read(image) == good, "it is mended, though nobody said --repair")
        for key, reader in readers.items():
            cluster.until(lambda reader=reader: reader.content() == good, f"{key} reads it right")
            reader.close()
        self.assertIn("good", self.nodes.nodes[2].ptc("verify", self.name).stdout)


class SlowScrub(DamageCase):
    """A look takes minutes: a MiB in a minute."""
    OPTIONS = ("--scrub", "17K")

    def test_what_verify_found_does_not_wait_for_it(self):
        self.commit_two(BigLlama(48), "base")
        looks, damaged = self.holders()  # the first of them looks it over
        self.assertGreater(os.stat(self.image(looks)).st_size, 4 << 20)
        time.sleep(4)  # it has begun
        image = self.image(damaged)
        good = read(image)
        flip(image, os.stat(image).st_size // 2)
        done = self.nodes.nodes[looks].ptc("verify", self.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        cluster.until(lambda: read(image) == good, "it is mended while the look goes on")


class Scrub(DamageCase):
    OPTIONS = ("--scrub", "1G")

    def looked_over(self, node):
        return self.job(node).status()["checkpoints"][0]["looked_over"]

    def test_finds_and_mends(self):
        model = BigLlama(45)
        self.commit_two(model, "base")
        cluster.until(lambda: all(self.looked_over(node) for node in self.alive()), "all say when it was looked over")
        self.assertEqual(self.looked_over(2)["damaged"], [])
        damaged = self.holders()[0]
        image = self.image(damaged)
        reader = Reader("open", self.paths(2, "base")[0])
        flip(image, os.stat(image).st_size // 2)
        cluster.until(lambda: self.damaged_copies("mended") == 1, "it is found and mended")
        expected = {tensor.name: tensor for tensor in model.rank_tensors(1, 1, 0, 0)}
        self.assertEqual(models.read_safetensors(image), expected)
        cluster.until(lambda: reader.content() == read(image), "who had it open reads it right")
        reader.close()
        self.assertIn("good", self.nodes.nodes[2].ptc("verify", self.name).stdout)

    def damaged_copies(self, outcome):
        """By all nodes' metrics."""
        count = 0
        for node in self.alive():
            for line in mount.read_text(self.nodes.path(node, ".ptc/metrics")).splitlines():
                if line.startswith("ptcfs_job_damaged_copies_total{") and f'"{self.name}"' in line and f'"{outcome}"' in line:
                    count += int(float(line.split()[-1]))
        return count

    def test_says_what_no_copy_has_right(self):
        self.commit(0, BigLlama(46), devices=["w0:0"])
        image = self.image(0)
        flip(image, os.stat(image).st_size // 2)
        cluster.until(lambda: all(self.looked_over(node) and self.looked_over(node)["damaged"] for node in self.alive()),
                      "all nodes say that it is damaged")
        status = self.job(2).status()
        self.assertIn("do not have the checksum they had", status["checkpoints"][0]["looked_over"]["damaged"][0])
        self.assertIn("no other copy has it right", " ".join(status["warnings"]))
        for node in self.alive():  # and is not read any more, in whatever form
            for path in (self.paths(node, "base")[0], self.job(node).checkpoint("base", "hf/model.safetensors")):
                with self.assertRaises(OSError, msg=path) as caught:
                    read(path)
                self.assertEqual(caught.exception.errno, errno.EIO)
        flip(image, os.stat(image).st_size // 2)
        cluster.until(lambda: not self.looked_over(2)["damaged"], "it is good again")
        for node in self.alive():
            for path in self.paths(node, "base"):
                read(path)


if __name__ == "__main__":
    unittest.main(verbosity=2)
