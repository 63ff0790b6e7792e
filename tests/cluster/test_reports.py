"""What each node says of the cluster: all nodes, also those that are away, and no byte counted twice."""
import unittest

import cluster
from cluster import mount
import models
import prometheus
from cases import BigLlama, TestCase


class Reports(TestCase):
    def nodes_of(self, node):
        return mount.read_json(self.nodes.path(node, ".ptc/nodes.json"))

    def by_name(self, node):
        return {one["name"]: one for one in self.nodes_of(node)["nodes"]}

    def metrics(self, node):
        return prometheus.check(mount.read_text(self.nodes.path(node, ".ptc/metrics")))

    def agreed(self):
        """What nodes.json says of all nodes that all know; once all say the same."""
        keys = ("state", "materialised_bytes", "drain")

        def said(node):
            return {name: [one.get(key) for key in keys] for name, one in self.by_name(node).items()}
        cluster.until(lambda: len({str(said(node)) for node in self.alive()}) == 1,
                      f"all nodes say the same: {[said(node) for node in self.alive()]}", 20)
        return {name: dict(zip(keys, values)) for name, values in said(self.alive()[0]).items()}

    def test_all_nodes_are_known_everywhere(self):
        self.commit(0, BigLlama(1), pp=2, devices=["w0:0", "w2:0"])
        agreed = self.agreed()
        self.assertEqual(sorted(agreed), ["w0", "w1", "w2"])
        for node in range(3):
            self.assertEqual(agreed[f"w{node}"]["materialised_bytes"], self.nodes.nodes[node].image_bytes())
            own = self.by_name(node)[f"w{node}"]
            self.assertGreater(own["memory_total_bytes"], own["memory_used_bytes"])
            self.assertEqual(self.nodes_of(node)["cluster"]["materialised_bytes"],
                             sum(one.image_bytes() for one in self.nodes.nodes))
        self.assertIn("w2 up", self.nodes.nodes[1].ptc("top", "--once").stdout)
        self.nodes.kill(2)
        self.nodes.wait_members()
        agreed = self.agreed()
        self.assertEqual([agreed[name]["state"] for name in ("w0", "w1", "w2")], ["up", "up", "away"])
        self.assertGreater(agreed["w2"]["materialised_bytes"], 0)
        self.assertRegex("".join(self.nodes.nodes[0].ptc("top", "--once").stdout.split()), "w2away.*incheckpoints")
        metrics = self.metrics(1)
        self.assertEqual([metrics[("ptcfs_cluster_node_up", (("node", f"w{node}"),))] for node in range(3)], [1, 1, 0])
        self.nodes.start(2)
        self.nodes.wait_members()
        self.assertEqual(self.agreed()["w2"]["state"], "up")

    def test_nothing_is_counted_on_several_nodes(self):
        self.commit(0, BigLlama(2), pp=3, devices=["w0:0", "w1:0", "w2:0"])
        images = [node.image_bytes() for node in self.nodes.nodes]
        self.assertTrue(all(images), images)
        for node in range(3):
            metrics = self.metrics(node)
            self.assertEqual(metrics[("ptcfs_store_materialised_bytes", ())], images[node])
            self.assertEqual(metrics[("ptcfs_job_checkpoint_bytes", (("job", self.name),))], images[node])
            for other in range(3):
                self.assertEqual(metrics[("ptcfs_cluster_node_materialised_bytes", (("node", f"w{other}"),))], images[other])
        self.assertEqual(self.job(1).status()["checkpoints"][0]["bytes"], sum(images))

    def test_missing_copies(self):
        self.commit(0, models.Llama(3), pp=3, replicas=1)

        def missing(node):
            return self.nodes_of(node)["missing_copies"]["bytes"]
        cluster.until(lambda: not any(missing(node) for node in range(3)), "all copies are there")
        self.nodes.kill(1)
        self.nodes.kill(2)
        self.nodes.wait_members()
        self.assertGreater(missing(0), 0)
        self.assertIn(self.name, [one["job"] for one in self.nodes_of(0)["missing_copies"]["jobs"]])
        self.assertIn("are missing", self.nodes.nodes[0].ptc("top", "--once").stdout)
        self.assertGreater(self.metrics(0)[("ptcfs_job_missing_copy_bytes", (("job", self.name),))], 0)
        for node in (1, 2):
            self.nodes.start(node)
        self.nodes.wait_members()
        cluster.until(lambda: not any(missing(node) for node in range(3)), "they are made anew")

    def test_the_last_reshard_is_the_same_everywhere(self):
        self.commit(0, models.Llama(4))
        self.job(1).set_layout(tp=2, devices=["w1:0", "w2:0"])
        self.nodes.wait_settled(self.name)

        def last():
            return [self.job(node).status()["last_reshard"] for node in self.alive()]
        cluster.until(lambda: all(one and one == last()[0] for one in last()), f"last_reshard: {last()}")
        before = last()[0]
        self.assertEqual(before["to"], "tp2-pp1-dp1")
        self.nodes.stop(0)
        self.nodes.start(0)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.assertEqual(self.job(0).status()["last_reshard"], before)


if __name__ == "__main__":
    unittest.main(verbosity=2)
