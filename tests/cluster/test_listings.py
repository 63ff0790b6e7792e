"""What one node does shows on the others, whose kernels have listed and looked at all of it before."""
import json
import os
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import models
from cases import TestCase, read

SOON = 3  # seconds; as a rule it is so when the call that changes something returns


def write_shards(directory):
    os.makedirs(directory)
    models.write_file(os.path.join(directory, "a.jsonl"), "".join(f'{{"n": {i}}}\n' for i in range(64)))


class Listings(TestCase):
    NODES = 2

    def setUp(self):
        super().setUp()
        self.here = self.nodes.job(0, self.name)
        self.there = self.job(1)
        cluster.until(lambda: self.name in self.look("/"), "the job is there", SOON)

    def look(self, *parts):
        """Names in a directory as w1 lists it, after a look at each of them."""
        path = self.nodes.path(1) if parts == ("/",) else self.there.file(*parts)
        names = os.listdir(path)
        for name in names:
            try:
                os.lstat(os.path.join(path, name))
            except FileNotFoundError:  # gone meanwhile
                pass
        return sorted(names)

    def modified(self, *parts):
        path = self.nodes.path(1) if parts == ("/",) else self.there.file(*parts)
        return os.stat(path).st_mtime_ns

    def expect_change(self, change, listed, *parts):
        """`change`, made on w0, shows in the listing of w1, and in the time of the directory."""
        before = self.modified(*parts)
        self.assertFalse(listed(self.look(*parts)), "it was so before")
        change()
        cluster.until(lambda: listed(self.look(*parts)), f"w1 lists {parts} anew: {self.look(*parts)}", SOON)
        self.assertGreater(self.modified(*parts), before)

    def test_jobs(self):
        other = self.name + "-2"
        self.addCleanup(self.nodes.nodes[0].ptc, "rm", "--force", other, check=False)
        for _ in range(3):
            self.expect_change(lambda: os.mkdir(self.nodes.path(0, other)), lambda names: other in names, "/")
            self.assertIn("layout.json", os.listdir(self.nodes.path(1, other)))
            self.expect_change(lambda: os.rmdir(self.nodes.path(0, other)), lambda names: other not in names, "/")
            self.assertFalse(os.path.exists(self.nodes.path(1, other)))
        os.mkdir(self.nodes.path(0, other))
        self.expect_change(lambda: self.nodes.nodes[0].ptc("rm", other), lambda names: other not in names, "/")

    def test_layout_and_rules(self):
        def saved(name, text):
            models.write_file(self.here.file(name), text)

        def shows(name, text):
            path = self.there.file(name)
            return read(path).decode() == text and os.stat(path).st_size == len(text)

        rules = json.dumps({"format": "ptc-rules/1", "family": "mine",
                            "rules": [{"names": ["**"], "stage": "all"}]})
        first = self.modified("layout.json")
        self.expect_change(lambda: saved("rules.json", rules), lambda names: "rules.json" in names, ".")
        cluster.until(lambda: shows("rules.json", rules), "w1 reads the rules", SOON)
        before = self.modified("rules.json")
        saved("rules.json", rules + "\n\n")
        cluster.until(lambda: shows("rules.json", rules + "\n\n"), "w1 reads the new rules", SOON)
        self.assertGreater(self.modified("rules.json"), before)
        self.assertEqual(self.modified("layout.json"), first)
        self.expect_change(lambda: os.remove(self.here.file("rules.json")),
                           lambda names: "rules.json" not in names, ".")
        self.here.set_layout(dp=2, devices=["w0:0", "w0:1"])
        text = read(self.here.file("layout.json")).decode()
        cluster.until(lambda: shows("layout.json", text), "w1 reads the layout", SOON)
        self.assertGreater(self.modified("layout.json"), first)

    def test_checkpoints(self):
        def commit(name):
            models.Llama(1).write_hf(self.here.incoming(name) + "/rank/0")
            models.write_file(self.here.incoming(name) + "/layout.json", '{"tp": 1, "pp": 1, "dp": 1}')
            self.here.commit(name)

        self.look("incoming")
        self.assertEqual(self.look("checkpoints"), [])
        self.expect_change(lambda: commit("one"), lambda names: names == ["one"], "checkpoints")
        self.assertIn("current", self.look("."))
        whole = read(self.here.rank_file("one", "tp1-pp1-dp1", 0))
        self.assertEqual(read(self.there.rank_file("one", "tp1-pp1-dp1", 0)), whole)
        self.look("checkpoints", "one", "layouts")
        self.expect_change(lambda: self.here.set_layout(tp=2), lambda names: names == ["tp2-pp1-dp1"],
                           "checkpoints", "one", "layouts")
        self.nodes.wait_settled(self.name)
        self.assertEqual(os.readlink(self.there.file("current")), "checkpoints/one/layouts/tp2-pp1-dp1")
        self.nodes.nodes[0].ptc("pin", f"{self.name}/one")
        self.assertEqual(os.getxattr(self.there.checkpoint("one"), "user.ptc.pin"), b"1")
        self.nodes.nodes[0].ptc("pin", f"{self.name}/one", "--remove")
        self.assertEqual(os.listxattr(self.there.checkpoint("one")), [])
        self.expect_change(lambda: self.nodes.nodes[0].ptc("rm", f"{self.name}/one"), lambda names: names == [],
                           "checkpoints")
        self.assertFalse(os.path.exists(self.there.checkpoint("one")))
        cluster.until(lambda: "current" not in self.look("."), "there is no current", SOON)
        self.expect_change(lambda: commit("one"), lambda names: names == ["one"], "checkpoints")

    def test_what_is_staged_on_both(self):
        self.here.set_layout(dp=2)
        for job, rank in ((self.here, 0), (self.there, 1)):
            models.Llama(1).write_hf(job.incoming("base") + f"/rank/{rank}")
        models.write_file(os.path.join(self.there.incoming("base"), "rank", "1", "model.safetensors"), "spoiled")

        def refused():
            self.assertRaises(OSError, self.here.commit, "base")

        refused()
        self.assertEqual(self.look("incoming"), ["base"])
        self.assertEqual(self.look("incoming", "base", "rank"), ["1"])
        models.Llama(1).write_hf(self.there.incoming("base") + "/rank/1")
        self.look("incoming", "base", "rank", "1")
        self.expect_change(lambda: self.here.commit("base"), lambda names: names == [], "incoming")
        self.assertFalse(os.path.exists(self.there.incoming("base")))
        self.assertEqual(self.look("checkpoints"), ["base"])

    def test_data_set(self):
        shards = os.path.join(self.nodes.top, self.name + "-shards")
        write_shards(shards)
        source, order = json.dumps({"shards": shards}), json.dumps({"batch": 8, "seed": 1})
        self.look("dataset")
        self.expect_change(lambda: models.write_file(self.here.file("dataset/source.json"), source),
                           lambda names: "source.json" in names, "dataset")
        self.assertEqual(read(self.there.file("dataset/source.json")).decode(), source)
        self.assertEqual(self.look("dataset/gen"), [])
        self.expect_change(lambda: models.write_file(self.here.file("dataset/order.json"), order),
                           lambda names: "order.json" in names, "dataset")
        cluster.until(lambda: len(self.look("dataset/gen")) == 1, "w1 lists the generation", SOON)
        cluster.until(lambda: "head" in self.look("dataset"), "w1 lists head", SOON)
        before = self.modified("dataset/order.json")
        other = json.dumps({"batch": 16, "seed": 1})
        models.write_file(self.here.file("dataset/order.json"), other)
        cluster.until(lambda: read(self.there.file("dataset/order.json")).decode() == other, "w1 reads the order", SOON)
        self.assertGreater(self.modified("dataset/order.json"), before)
        before = self.modified("dataset/consumed")
        models.write_file(self.here.file("dataset/consumed"), "32\n")
        cluster.until(lambda: read(self.there.file("dataset/consumed")) == b"32\n", "w1 reads the count", SOON)
        self.assertGreater(self.modified("dataset/consumed"), before)
        self.nodes.nodes[0].ptc("rm", "--force", self.name)
        cluster.until(lambda: self.name not in self.look("/"), "w1 lists no job", SOON)
        self.assertFalse(os.path.exists(self.there.path))


if __name__ == "__main__":
    unittest.main(verbosity=2)
