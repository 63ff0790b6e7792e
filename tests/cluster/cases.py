"""What the tests of clusters have in common."""
import os
import shutil
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import models

LEASE = 3
MIB = 1 << 20


def layout_name(tp, pp, dp=1):
    return f"tp{tp}-pp{pp}-dp{dp}"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def tree(directory):
    """Path below → content of every file."""
    return {os.path.relpath(os.path.join(where, name), directory): read(os.path.join(where, name))
            for where, _, names in os.walk(directory) for name in names}


class BigLlama(models.Llama):
    vocab = 64 * 1024  # 16 MiB


class TestCase(unittest.TestCase):
    """One cluster for the tests of a class; every test makes a job of its own name."""
    NODES = 3
    LEASE = LEASE
    OPTIONS = ()
    TLS = None  # as PTC_CLUSTER_TLS says

    @classmethod
    def setUpClass(cls):
        cls.nodes = cluster.Cluster(cls.NODES, "--lease", str(cls.LEASE), *cls.OPTIONS, tls=cls.TLS)
        cls.nodes.__enter__()
        cls.addClassCleanup(cls.nodes.__exit__)

    def setUp(self):
        self.name = self.id().rsplit(".", 1)[-1]
        self.addCleanup(self.clean)

    def clean(self):
        """The next test finds all nodes, and no files of this one."""
        self.nodes.lose_nothing()
        for number, node in enumerate(self.nodes.nodes):
            self.nodes.heal(number)
            self.nodes.shape(number, None)
            if node.paused:
                self.nodes.resume(number)
            if node.process is None:
                self.nodes.start(number)
        self.nodes.wait_members()
        self.nodes.nodes[0].ptc("rm", "--force", self.name, check=False)

    def job(self, node):
        return mount.Job(self.nodes.nodes[node], self.name)

    def commit(self, node, model, **layout):
        """A checkpoint `base` of one rank, and then the layout."""
        job = self.nodes.job(node, self.name)
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        if layout:
            job.set_layout(**layout)
        self.nodes.wait_settled(self.name)

    def lose_store(self, node, within_its_lease=False):
        """It is killed, and is back with an empty store."""
        self.nodes.kill(node)
        if not within_its_lease:
            self.nodes.wait_members()
        for name in os.listdir(self.nodes.nodes[node].store):
            path = os.path.join(self.nodes.nodes[node].store, name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)
        self.nodes.start(node)
        self.nodes.wait_members()

    def alive(self):
        return [number for number, node in enumerate(self.nodes.nodes) if node in self.nodes.alive()]

    def expect_everywhere(self, model, tp, pp, dp=1):
        """Every living node shows every rank's file as it should be, and the same model/."""
        layout, trees = layout_name(tp, pp, dp), []
        for node in self.alive():
            job = self.job(node)
            self.assertEqual(os.readlink(job.file("current")), f"checkpoints/base/layouts/{layout}")
            for rank in range(tp * dp * pp):
                held = models.read_safetensors(job.rank_file("base", layout, rank))
                wanted = model.rank_tensors(tp, pp, rank % tp, rank // (tp * dp))
                self.assertEqual(held, {tensor.name: tensor for tensor in wanted}, (node, rank))
            trees.append(tree(job.checkpoint("base", "model")))
        for other in trees[1:]:
            self.assertEqual(other, trees[0])
