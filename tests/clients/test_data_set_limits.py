"""Data sets: what cannot be a shard, and what is not thrown away unasked."""
import glob
import io
import json
import os
import shutil
import tarfile

import models
import mount
from test_dataset import wait_for, write_shards


class Limits(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()

    def at(self, *parts):
        return self.job.file("dataset", *parts)

    def save(self, name, text):
        with open(self.at(name), "w", encoding="utf-8") as file:
            file.write(text)

    def status(self):
        return mount.read_json(self.at("status.json"))

    def refused_source(self, *shards):
        self.assertEqual(mount.error_of(self.save, "source.json", json.dumps({"shards": shards})), "EINVAL", shards)
        # The kernel says that it is closed for good (RELEASE) after close() has returned; until then it may be mended.
        wait_for(lambda: not os.path.exists(self.at("source.json")), "what was refused is gone")
        return self.status()["error"]

    def test_shards_in_a_mount_of_ptcfs(self):
        """Reading them would wait for ptcfs itself."""
        inside = self.job.file("shards")
        write_shards(inside)
        outside = self.temporary("outside")
        write_shards(outside)
        link, chain = self.temporary("link"), self.temporary("chain")
        os.symlink(inside, link)
        os.symlink("link/../shards", chain)
        above = os.path.dirname(self.mount.path)
        for path in (inside, inside + "/00000.tar", link, chain, inside + "/*.tar", above + "/*/*/shards/0*.tar",
                     link + "/0000[01].tar", f"{outside}/../../../{inside}", self.at("gen")):
            why = self.refused_source(outside, path)
            self.assertIn(f"lies in '{self.mount.path}', which ptcfs shows itself", why)
        with mount.Mount() as other:
            shards = os.path.join(other.job("other").path, "shards")
            write_shards(shards)
            self.assertIn(f"lies in '{other.path}'", self.refused_source(shards))
        # A link among good shards is found when they are listed.
        os.symlink(inside + "/00000.tar", outside + "/00009.tar")
        self.save("source.json", json.dumps({"shards": outside}))
        wait_for(lambda: self.status()["state"] == "refused", "a shard in the mount is found")
        self.assertIn("00009.tar", self.status()["error"])
        self.assertIn("which ptcfs shows itself", self.status()["error"])
        os.unlink(outside + "/00009.tar")
        self.save("source.json", json.dumps({"shards": outside}))
        wait_for(lambda: self.status()["state"] == "no order.json", "the others are good")

    def test_a_folder_with_links_into_the_mount(self):
        folder = self.temporary("folder")
        os.makedirs(folder + "/below")
        for name in ("a.txt", "below/b.txt"):
            with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                file.write(name)
        with open(self.job.file("c.txt"), "w", encoding="utf-8") as file:
            file.write("c")
        os.symlink(self.job.file("c.txt"), folder + "/below/c.txt")
        self.save("source.json", json.dumps({"shards": folder, "format": "files"}))
        wait_for(lambda: self.status()["state"] == "refused", "a link into the mount is found")
        self.assertIn("below/c.txt", self.status()["error"])

    def test_a_job_with_a_data_set_is_not_empty(self):
        self.save("source.json", json.dumps({"shards": self.temporary("none yet")}))
        self.assertEqual(mount.error_of(os.rmdir, self.job.path), "ENOTEMPTY")
        done = self.mount.ptc("rm", self.job.name, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("holds a data set", done.stderr)
        self.assertTrue(os.path.exists(self.at("source.json")))
        shutil.rmtree(self.at())
        os.rmdir(self.job.path)
        os.mkdir(self.job.path)
        self.assertFalse(os.path.exists(self.at("source.json")))
        self.save("order.json", '{"batch": 4}')
        self.assertEqual(mount.error_of(os.rmdir, self.job.path), "ENOTEMPTY")
        shutil.rmtree(self.job.path)
        for _ in range(10):
            os.mkdir(self.job.path)
            self.save("order.json", '{"batch": 4}')
            self.mount.ptc("rm", "--force", self.job.name)
            self.assertFalse(os.path.exists(self.job.path))

    def test_shards_that_number_their_samples_alike(self):
        """No tar has a key twice, by which a reader would take two samples for one."""
        data = self.temporary("alike")
        os.makedirs(data)
        for shard in range(20):
            with tarfile.open(f"{data}/{shard:03}.tar", "w") as tar:
                for i in range(4):
                    content = f"{shard} {i}".encode()
                    info = tarfile.TarInfo(f"{i:04}.seg.txt")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        self.save("source.json", json.dumps({"shards": data}))
        self.save("order.json", '{"batch": 8, "epochs": 2}')
        wait_for(lambda: os.path.lexists(self.at("head")), "an index")
        for epoch in range(2):
            found = []
            for path in sorted(glob.glob(self.at(f"head/rank-000/tar/e{epoch:03}/*.tar"))):
                with tarfile.open(path) as tar:
                    names = tar.getnames()
                    self.assertEqual(len(set(names)), len(names), path)
                    self.assertTrue(all(name.split(".", 1)[1] == "seg.txt" for name in names), names)
                    found += [tar.extractfile(member).read().decode() for member in tar]
            self.assertEqual(sorted(found), sorted(f"{shard} {i}" for shard in range(20) for i in range(4)))

    def commit(self, name, **files):
        """A checkpoint of one rank; `files`: what else is in incoming/<name>/."""
        models.Llama(1).write_hf(self.job.incoming(name) + "/rank/0")
        for path, text in files.items():
            models.write_file(os.path.join(self.job.incoming(name), path.replace("__", "/")), text)
        self.job.commit(name)

    def test_consumed_beside_the_ranks(self):
        self.commit("none")
        self.assertEqual(os.listdir(self.job.checkpoint("none")), ["meta.json", "model", "hf", "dcp", "layouts"])
        self.commit("top", consumed="0012\n")
        path = self.job.checkpoint("top", "consumed")
        self.assertEqual(mount.read_text(path), "12\n")
        self.assertEqual(os.stat(path).st_size, 3)
        self.assertEqual(mount.error_of(open, path, "w"), "EROFS")
        self.assertEqual(os.listdir(self.job.checkpoint("top")), ["meta.json", "model", "hf", "dcp", "layouts", "consumed"])
        self.assertEqual(mount.read_json(self.job.checkpoint("top", "meta.json"))["consumed"], 12)
        self.commit("both", consumed="7", rank__0__consumed="7\n")
        self.assertEqual(mount.read_text(self.job.checkpoint("both", "consumed")), "7\n")
        self.assertEqual(mount.read_text(self.job.checkpoint("both", "layouts/tp1-pp1-dp1/rank/0/consumed")), "7\n")
        self.commit("own", rank__0__consumed="a file of the writer's own")
        self.assertFalse(os.path.exists(self.job.checkpoint("own", "consumed")))
        for name, files, why in (("two", {"consumed": "8", "rank__0__consumed": "7"},
                                  "consumed says that 8 samples are consumed, and rank/0/consumed that 7 are"),
                                 ("text", {"consumed": "eight"}, "consumed: 'eight' is not a count of samples")):
            self.assertEqual(mount.error_of(lambda: self.commit(name, **files)), "ECANCELED")
            self.assertIn(why, self.job.commit_error(name))
            self.assertTrue(os.path.exists(self.job.incoming(name) + "/consumed"))
        self.job.set_layout(tp=2)
        self.mount.stop(kill=True)
        self.mount.start()
        self.assertEqual(mount.read_text(path), "12\n")
        shutil.rmtree(self.job.checkpoint("top"))
        shutil.rmtree(self.job.checkpoint("none"))
        self.assertEqual(sorted(os.listdir(self.job.file("checkpoints"))), ["both", "own"])

    def test_weights_and_data_go_back_together(self):
        data = self.temporary("data")
        write_shards(data)
        self.save("source.json", json.dumps({"shards": data}))
        self.save("order.json", '{"batch": 4}')
        wait_for(lambda: os.path.lexists(self.at("head")), "an index")
        self.save("consumed", "8")
        models.Llama(1).write_hf(self.job.incoming("step2") + "/rank/0")
        shutil.copy(self.at("consumed"), self.job.incoming("step2"))
        self.job.commit("step2")
        self.save("consumed", "20")
        self.assertEqual(mount.error_of(self.save, "consumed", "12"), "EINVAL")
        shutil.copyfile(self.job.checkpoint("step2", "consumed"), self.at("consumed"))
        self.assertEqual(mount.read_text(self.at("consumed")), "8\n")


if __name__ == "__main__":
    mount.main()
