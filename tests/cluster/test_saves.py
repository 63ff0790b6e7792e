"""What a framework's processes saved together, each into the mount of its own node: committed as if one node had all of it.
PyTorch is needed, and no other framework."""
import os
import shutil
import struct
import tempfile
import threading
import time

import cluster
import cases
import mount
import ranks
import models
import test_deepspeed_trees as deepspeed  # as a module: its own tests are run there

torch = mount.require("torch")
dcp = mount.require("torch.distributed.checkpoint")
RANKS = 4
MANY = 20_000  # tensors: what nodes tell each other of so many takes seconds over a slow link

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
        def refused(leader):
            """The other node lets go of what was refused a moment later: until then it is being committed there."""
            answers = []
            cluster.until(lambda: answers.append(mount.error_of(self.job(leader).commit, "base")) or answers[-1] != "EBUSY",
                          "nobody else commits it")
            return answers[-1]
        for leader in (0, 1):
            self.assertEqual(refused(leader), "ECANCELED")
            self.assertIn(".metadata names __3_0.distcp, which is missing", self.job(leader).commit_error("base"))
        with open(lost, "wb") as file:
            file.write(content[:700])
        self.assertEqual(refused(0), "ECANCELED")
        self.assertIn("file '__3_0.distcp' has 700 bytes", self.job(0).commit_error("base"))
        with open(lost, "wb") as file:
            file.write(content)
        models.write_file(self.job(1).incoming("base") + "/config.json", self.model.config_text())
        cluster.until(lambda: mount.error_of(self.job(1).commit, "base") != "EBUSY", "nobody else commits it")
        cluster.until(lambda: os.path.exists(self.job(0).checkpoint("base")), "the checkpoint is there")
        self.expect_saved()

    def save_many(self, top):
        """Small tensors in two files, by dcp.save."""
        state = {f"table.{number}": torch.full((4,), float(number)) for number in range(MANY)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(top, thread_count=2, sync_files=False), no_dist=True)
        return {name: mount.read_bytes(os.path.join(top, name)) for name in os.listdir(top)}

    def rename(self, node):
        job = self.job(node)
        return mount.error_of(os.rename, job.incoming("base"), job.checkpoint("base"))

    def kill_in_the_middle(self, phase, killed):
        """While w0, which leads the commit, has asked w1 and has no answer yet. What the mv said that waited."""
        self.nodes.shape(1, "1mbit")
        errors, over = [], threading.Event()

        def move():
            while not over.is_set() and (not errors or errors[-1] == "EAGAIN"):
                errors.append(self.rename(0))
        moving = threading.Thread(target=move)
        moving.start()

        def is_in_it():
            commits = self.job(0).status()["commits"]
            return [(one["phase"], one["bytes_total"] > 0) for one in commits] == [("hashing", phase == "hashing")]
        cluster.until(is_in_it, f"w1 is asked for the sake of {phase}", 60)
        before = self.nodes.bytes_received(1)
        cluster.until(lambda: self.nodes.bytes_received(1) > before + (150 << 10), "w1 has a part of the question", 60)
        self.assertTrue(is_in_it(), "that was too late")
        self.nodes.kill(killed)
        over.set()
        moving.join(60)
        self.nodes.shape(1, None)
        return errors

    def test_a_node_that_is_killed_while_its_files_are_read_or_hashed(self):
        """Whoever it is: all files are where they were, the mv may be tried again, and succeeds once all are back."""
        saved = self.save_many(os.path.join(self.scratch, "many"))
        self.assertEqual(sorted(saved), [".metadata", "__0_0.distcp", "__0_1.distcp"])
        where = {".metadata": 0, "__0_0.distcp": 0, "__0_1.distcp": 1}
        for phase, killed in (("reading", 1), ("hashing", 1), ("hashing", 0)):
            with self.subTest(phase, killed=killed):
                for name, node in where.items():
                    os.makedirs(self.job(node).incoming("base"), exist_ok=True)
                    with open(os.path.join(self.job(node).incoming("base"), name), "wb") as file:
                        file.write(saved[name])
                errors = self.kill_in_the_middle(phase, killed)
                if killed == 1:
                    self.assertEqual(set(errors), {"EAGAIN"})
                    self.nodes.wait_members()

                    def is_said():  # nothing is committed without what it has, whatever was under way when it went
                        self.assertEqual(self.rename(0), "EAGAIN")
                        return "w1 is away, and has written something into" in self.job(0).commit_error("base")
                    cluster.until(is_said, "that w1 is away is said", 30)
                else:
                    self.assertNotIn(errors[-1], ("", "EAGAIN"))  # the mount is gone
                self.nodes.start(killed)
                self.nodes.wait_members()
                for name, node in where.items():
                    cluster.until(lambda name=name, node=node: os.path.exists(self.job(node).incoming("base") + "/" + name), name)
                    self.assertEqual(mount.read_bytes(self.job(node).incoming("base") + "/" + name), saved[name], name)
                self.assertEqual([os.listdir(self.job(node).file("checkpoints")) for node in (0, 1)], [[], []])
                self.job(0).commit("base")
                for node in (0, 1):
                    cluster.until(lambda node=node: os.path.exists(self.job(node).checkpoint("base")), "the checkpoint is there")
                    found = models.read_safetensors(self.job(node).rank_file("base", cases.layout_name(1, 1), 0))
                    values = {name: tensor.data for name, tensor in found.items()}
                    self.assertEqual(values, {f"table.{number}": struct.pack("<4f", *[number] * 4) for number in range(MANY)})
                    self.nodes.nodes[node].ptc("verify", self.name)
                self.nodes.nodes[0].ptc("rm", "--force", self.name + "/base")
                cluster.until(lambda: all(os.listdir(self.job(node).file("checkpoints")) == [] for node in (0, 1)), "it is gone")

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
