"""Data sets: what cannot be a shard, and what is not thrown away unasked."""
import json
import os
import shutil

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
        self.assertFalse(os.path.exists(self.at("source.json")))
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
        os.mkdir(self.job.path)
        self.save("order.json", '{"batch": 4}')
        self.mount.ptc("rm", "--force", self.job.name)
        self.assertFalse(os.path.exists(self.job.path))


if __name__ == "__main__":
    mount.main()
