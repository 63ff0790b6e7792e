"""What a framework's processes saved together, each into the mount of its own node: committed as if one node had all of it.
PyTorch is needed, and no other framework."""
import os
import shutil
import tempfile
import time

import cluster
import cases
import mount
import ranks
import models
import test_deepspeed_trees as deepspeed  # as a module: its own tests are run there

torch = mount.require("torch")
RANKS = 4

BODY = """
mesh = init_device_mesh("cpu", (2, 2))
weights = torch.load(WEIGHTS)
cuts = {name: [Shard(0), Replicate() if tensor.dim() == 1 else Shard(1 if "down" in name else 0)] for name, tensor in weights.items()}
state = {"model": {name: distribute_tensor(tensor, mesh, cuts[name]) for name, tensor in weights.items()}, "epoch": 7}
dcp.save(state, checkpoint_id=f"{path}/incoming/base")
"""


class Saves(cases.TestCase):
    NODES = 2

    def setUp(self):
        super().setUp()
        self.scratch = tempfile.mkdtemp(prefix="ptcfs-scratch-")
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)
        self.model = models.Llama()
        self.new_job(self.name)

    def new_job(self, name):
        self.nodes.job(0, name)
        cluster.until(lambda: os.path.isdir(self.on(1, name).path), "the job is there")
        self.addCleanup(self.nodes.nodes[0].ptc, "rm", "--force", name, check=False)

    def on(self, node, name):
        return mount.Job(self.nodes.nodes[node], name)

    def save_by_ranks(self, first_node):
        """dcp.save of PyTorch's own; rank 0 writes `.metadata`, on that node."""
        weights, meet = os.path.join(self.scratch, "weights.pt"), os.path.join(self.scratch, f"meet-{time.monotonic_ns()}")
        torch.save({tensor.name: deepspeed.to_torch(tensor) for tensor in self.model.tensors}, weights)
        text = ranks.PROLOGUE.replace("PACKAGE", repr(ranks.PACKAGE)) + BODY.replace("WEIGHTS", repr(weights)) + ranks.EPILOGUE
        where = [(first_node + rank // 2) % 2 for rank in range(RANKS)]
        codes, said = ranks.SERVER.run(text, [[str(rank), str(RANKS), self.job(where[rank]).path, meet] for rank in range(RANKS)], self.scratch)
        self.assertEqual(codes, [0] * RANKS, said)

    def expect_saved(self):
        for node in range(self.NODES):
            job = self.job(node)
            found = models.read_hf(job.checkpoint("base", "hf"))
            self.assertEqual(found, {tensor.name: tensor for tensor in self.model.tensors})
            for tp in (1, 2):
                for rank in range(tp):
                    held = {tensor.name: tensor for tensor in self.model.rank_tensors(tp, 1, rank, 0)}
                    self.assertEqual(models.read_safetensors(job.rank_file("base", cases.layout_name(tp, 1), rank)), held)
            values = torch.load(job.rank_file("base", cases.layout_name(1, 1), 0, "values.pt"), weights_only=True)
            self.assertEqual(values, {"epoch": 7})
            self.nodes.nodes[node].ptc("verify", self.name)

    def test_dcp(self):
        for first_node, leader in ((0, 0), (1, 0), (0, 1)):
            with self.subTest(metadata_on=first_node, led_by=leader):
                self.save_by_ranks(first_node)
                names = [sorted(os.listdir(self.job(node).incoming("base"))) for node in range(self.NODES)]
                self.assertEqual(names[first_node], [".metadata", "__0_0.distcp", "__1_0.distcp"])
                self.assertEqual(names[1 - first_node], ["__2_0.distcp", "__3_0.distcp"])
                models.write_file(self.job(first_node).incoming("base") + "/config.json", self.model.config_text())
                self.job(leader).commit("base")
                cluster.until(lambda: os.path.exists(self.job(1 - leader).checkpoint("base")), "the checkpoint is there")
                self.expect_saved()
                if leader == 1:  # and so it is once its files are others
                    self.job(0).set_layout(tp=2)
                    self.nodes.wait_settled(self.name)
                    self.expect_saved()
                self.nodes.nodes[0].ptc("rm", "--force", self.name + "/base")
                cluster.until(lambda: all(os.listdir(self.job(node).file("checkpoints")) == [] for node in range(self.NODES)), "it is gone")

    def test_dcp_that_is_not_complete(self):
        self.save_by_ranks(0)
        lost = self.job(1).incoming("base") + "/__3_0.distcp"
        content = mount.read_bytes(lost)
        os.unlink(lost)
        for leader in (0, 1):
            self.assertEqual(mount.error_of(self.job(leader).commit, "base"), "ECANCELED")
            self.assertIn(".metadata names __3_0.distcp, which is missing", self.job(leader).commit_error("base"))
        with open(lost, "wb") as file:
            file.write(content[:700])
        self.assertEqual(mount.error_of(self.job(0).commit, "base"), "ECANCELED")
        self.assertIn("file '__3_0.distcp' has 700 bytes", self.job(0).commit_error("base"))
        with open(lost, "wb") as file:
            file.write(content)
        models.write_file(self.job(1).incoming("base") + "/config.json", self.model.config_text())
        self.job(1).commit("base")
        cluster.until(lambda: os.path.exists(self.job(0).checkpoint("base")), "the checkpoint is there")
        self.expect_saved()

    def expect_as_of_one_node(self, top):
        """Every second file on each node; all under several layouts is what it is where one node has all files."""
        alone = self.name + "-alone"
        self.new_job(alone)
        files = sorted(os.path.relpath(os.path.join(where, name), top) for where, _, names in os.walk(top) for name in names)
        for number, file in enumerate(files):
            for job in (self.on(0, alone), self.job(number % 2)):
                os.makedirs(os.path.dirname(os.path.join(job.incoming("base"), file)), exist_ok=True)
                shutil.copyfile(os.path.join(top, file), os.path.join(job.incoming("base"), file))
        self.on(0, alone).commit("base")
        self.job(0).commit("base")
        cluster.until(lambda: os.path.exists(self.job(1).checkpoint("base")), "the checkpoint is there")
        for node in range(self.NODES):
            for layout in (cases.layout_name(1, 1), cases.layout_name(2, 1), cases.layout_name(2, 3)):
                found, expected = (cases.tree(job.checkpoint("base", "layouts", layout)) for job in (self.job(node), self.on(0, alone)))
                self.assertEqual(sorted(found), sorted(expected))
                for path, content in expected.items():
                    self.assertTrue(found[path] == content, f"{layout}/{path} on node {node}")
            self.nodes.nodes[node].ptc("verify", self.name)
        for job in (self.job(0), self.on(0, alone)):
            self.nodes.nodes[0].ptc("rm", "--force", job.name)
        cluster.until(lambda: not os.path.exists(self.job(1).path), "the job is gone")
        self.new_job(self.name)

    def test_deepspeed(self):
        trained = deepspeed.Trained(self.model)
        for kind in ("flat", "stage-3", "universal"):
            with self.subTest(kind):
                top = os.path.join(self.scratch, kind)
                if kind == "flat":
                    trained.save_flat(lambda rank, top=top: top + "/global_step100", 5)
                elif kind == "stage-3":
                    trained.save_stage_3(top + "/global_step100", 3)
                else:
                    trained.save_universal(top + "/global_step100_universal")
                models.write_file(top + "/config.json", self.model.config_text())
                models.write_file(top + "/latest", "global_step100")
                self.expect_as_of_one_node(top)


if __name__ == "__main__":
    mount.main()
