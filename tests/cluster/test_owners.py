"""Whose a job and its files are: the same on every node, and so who may read and write them."""
import concurrent.futures
import itertools
import json
import os
import stat
import subprocess
import tempfile
import time

import cluster
from cluster import mount
import models
from cases import TestCase
from users import ANN, BOB, ROOT, read_text, run_as, write_text


def facts(path):
    found = os.stat(path)
    return (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))


class Owners(TestCase):
    OPTIONS = ("-o", "allow_other")

    def setUp(self):
        super().setUp()
        for node in self.nodes.nodes:
            os.chmod(node.path, 0o777)

    def everywhere(self, *parts):
        return [os.path.join(node.path, self.name, *parts) for node in self.nodes.nodes]

    def expect(self, wanted, *parts):
        for path in self.everywhere(*parts):
            cluster.until(lambda path=path: facts(path) == wanted, f"{path} is {wanted}: {facts(path)}", 10)

    def test_a_job_is_its_owners_on_all_nodes(self):
        first = self.everywhere()[0]
        self.assertEqual(run_as(ANN, os.mkdir, first, 0o700), "")
        for parts in ([], ["incoming"], ["dataset"]):
            self.expect((*ANN, 0o700), *parts)
        self.expect((*ANN, 0o644), "layout.json")
        for path in self.everywhere():
            self.assertEqual(run_as(BOB, os.listdir, path), "EACCES")
            self.assertEqual(run_as(BOB, read_text, path + "/status.json"), "EACCES")
            self.assertEqual(run_as(ANN, os.makedirs, path + "/incoming/x/rank/0"), "")
            self.assertEqual(run_as(ANN, write_text, path + "/layout.json", '{"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1}'), "")
            self.assertEqual(run_as(ANN, write_text, path + "/note", "Ann's"), "")

    def test_who_may_not_read_verifies_nothing(self):
        """That is not said to be bad."""
        job = self.nodes.job(0, self.name)
        models.Llama(31).write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        self.nodes.wait_settled(self.name)
        node = self.nodes.nodes[0]
        command = [os.path.join(node.bin, "ptc"), "-C", node.path, "verify", self.name]

        def verify():
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return f"{done.returncode}: {done.stdout}{done.stderr}"
        self.assertRegex(run_as(ANN, verify), r"(?s)\A0: .*: good:")
        os.chmod(job.path, 0o700)
        self.assertRegex(run_as(ANN, verify), r"(?s)\A3: .*: NOT CHECKED: .*Permission denied")
        self.assertRegex(run_as(ROOT, verify), r"(?s)\A0: .*: good:")

    def test_who_may_not_read_a_checkpoint_asks_nothing_of_it(self):
        """Its meta.json says what its tensors are called, and so do answers; also of a file that was 0600."""
        job = self.nodes.job(0, self.name)
        for name, mode, file_mode in (("closed", 0o700, 0o644), ("secret", 0o755, 0o600), ("open", 0o755, 0o644)):
            models.Llama(31).write_hf(job.incoming(name) + "/rank/0")
            os.chmod(job.incoming(name) + "/rank/0/model.safetensors", file_mode)
            os.chmod(job.incoming(name), mode)
            job.commit(name)
        self.nodes.wait_settled(self.name)
        node = self.nodes.nodes[1]

        def ask(*words):
            done = subprocess.run([os.path.join(node.bin, "ptc"), "-C", node.path, *words], capture_output=True, text=True, check=False)
            return f"{done.returncode}: {done.stdout}{done.stderr}"
        for name, may in (("closed", False), ("secret", False), ("open", True)):
            for words in (("rules", "check", f"{self.name}/{name}"), ("verify", f"{self.name}/{name}")):
                answer = run_as(ANN, ask, *words)
                self.assertEqual("self_attn" in answer or ": good" in answer, may, (words, answer))
                if not may:
                    self.assertRegex(answer, "(?i)permission denied|may not read")
                self.assertTrue(run_as(ROOT, ask, *words).startswith("0: "), words)

    def test_changes_are_seen_on_all_nodes(self):
        self.nodes.job(0, self.name)
        paths = self.everywhere()
        self.expect((0, 0, 0o755))
        os.chown(paths[1], *ANN)
        self.expect((ANN[0], ANN[1], 0o755))
        self.expect((ANN[0], ANN[1], 0o644), "layout.json")
        self.assertEqual(run_as(ANN, os.chmod, paths[2], 0o750), "")
        self.expect((*ANN, 0o750))
        self.assertEqual(run_as(BOB, os.chmod, paths[0], 0o777), "EPERM")
        for name, node in (("incoming", 1), ("dataset", 2), ("layout.json", 0)):
            path = self.everywhere(name)[node]
            os.chown(path, *BOB)
            os.chmod(path, 0o604)
            self.expect((*BOB, 0o604), name)
        self.assertEqual(run_as(ANN, write_text, self.everywhere("dataset")[1] + "/order.json", "{}"), "EACCES")
        # Kept by a node that was away, and by one that starts again.
        self.nodes.kill(2)
        os.chmod(paths[0], 0o711)
        self.nodes.start(2)
        self.nodes.wait_members()
        self.expect((*ANN, 0o711))
        self.expect((*BOB, 0o604), "layout.json")
        # A node that cannot agree with the others changes nothing.
        self.nodes.partition(1)
        cluster.until(lambda: "w1" not in self.nodes.nodes[0].members(), "w1 is away")
        self.assertNotEqual(mount.error_of(os.chmod, paths[1], 0o777), "")
        self.assertEqual(facts(paths[1]), (*ANN, 0o711))
        self.nodes.heal(1)
        self.nodes.wait_members()

    def test_a_text_that_is_closed_is_read_by_nobody_else_on_any_node(self):
        """Saved by a rename, now for its owner alone, and then for all; others read meanwhile."""
        job = self.nodes.job(0, self.name)
        texts = {
            "layout.json": lambda secret, i: '{"tp": %d, "pp": 1, "dp": 1}' % (2 if secret else 1) + " " * i,
            "rules.json": lambda secret, i: '{"format": "ptc-rules/1", "extends": "llama", "rules": [{"names": ["%s.weight"], "stage": "all"}]}'
                                            % ("secret" if secret else "open") + " " * i,
            "dataset/order.json": lambda secret, i: '{"format": "ptc-order/1", "seed": %d, "batch": 12, "epochs": 1}' % (2 if secret else 1) + " " * i}
        secrets = {"layout.json": '"tp": 2', "rules.json": "secret", "dataset/order.json": '"seed": 2'}
        end = time.monotonic() + 6

        def read():
            reads = found = 0
            while time.monotonic() < end:
                for name, secret in secrets.items():
                    for path in self.everywhere(name)[1:]:
                        try:
                            found += secret in read_text(path)
                            reads += 1
                        except OSError:
                            pass
            return f"{found} of {reads}"
        with concurrent.futures.ThreadPoolExecutor() as reader:
            answer = reader.submit(run_as, BOB, read)
            for i in itertools.count():
                for secret in (True, False):
                    for name, text in texts.items():
                        other = os.path.join(os.path.dirname(job.file(name)), "other")
                        write_text(other, text(secret, i % 50))
                        os.chmod(other, 0o600 if secret else 0o644)
                        while (error := mount.error_of(os.rename, other, job.file(name))) == "EAGAIN":
                            time.sleep(0.01)
                        self.assertEqual(error, "")
                if time.monotonic() > end:
                    break
            self.assertRegex(answer.result(), r"^0 of [1-9]")

    def test_who_a_job_is_given_to_reads_nothing_that_was_refused_before(self):
        """On whatever node it was refused, and whichever gives it away."""
        first = self.everywhere()[0]
        self.assertEqual(run_as(ANN, os.mkdir, first, 0o755), "")
        for giver, (part, owner) in enumerate((("", BOB), ("", (-1, BOB[1])), ("layout.json", (-1, BOB[1])))):
            os.chown(self.everywhere()[0], *ANN)
            os.chown(self.everywhere("layout.json")[0], *ANN)
            os.chmod(self.everywhere("layout.json")[0], 0o640)
            self.expect((*ANN, 0o755))
            self.expect((*ANN, 0o640), "layout.json")
            for path in self.everywhere():
                self.assertEqual(run_as(ANN, write_text, path + "/layout.json", '{"secret": 1}'), "EINVAL")
                self.assertIn("secret", run_as(ANN, read_text, path + "/status.json"))
                self.assertEqual(run_as(BOB, read_text, path + "/status.json"), "EACCES")
            for name in dict.fromkeys((part, "", "layout.json") if owner != BOB else ("",)):
                os.chown(self.everywhere(name)[giver], *owner)
            for path in self.everywhere("status.json"):
                seen = set()

                def bob_reads(path=path, seen=seen):
                    text = run_as(BOB, read_text, path)
                    seen.add("secret" in text)
                    return text != "EACCES"
                cluster.until(bob_reads, f"Bob reads {path}", 10)
                self.assertEqual(seen - {False}, set(), path)
                self.assertIn("is not told", run_as(BOB, read_text, path))

    def write_ranks(self, modes):
        """Rank r of two, on node r, by Ann; `modes` of its two files."""
        for rank, (model, config) in enumerate(modes):
            top = self.everywhere("incoming", "step")[rank]
            models.Llama(1).write_hf(f"{top}/rank/{rank}")
            for path, directories, names in os.walk(top):
                for name in directories + names:
                    os.chown(os.path.join(path, name), *ANN)
            os.chown(top, *ANN)
            os.chmod(f"{top}/rank/{rank}/model.safetensors", model)
            os.chmod(f"{top}/rank/{rank}/config.json", config)

    def test_files_of_a_checkpoint(self):
        job = self.nodes.job(0, self.name)
        job.set_layout(dp=2)
        self.write_ranks([(0o600, 0o640), (0o644, 0o604)])
        job.commit("step")
        # Both ranks wrote the same tensors: what is kept once allows what both did.
        private, owner = (*ANN, 0o400), ANN
        step = ["checkpoints", "step"]
        for rank, config in ((0, 0o440), (1, 0o404)):
            self.expect(private, *step, "layouts/tp1-pp1-dp2/rank", str(rank), "model.safetensors")
            self.expect((*owner, config), *step, "layouts/tp1-pp1-dp2/rank", str(rank), "config.json")
        self.expect(private, *step, "layouts/tp2-pp1-dp1/rank/1/model.safetensors")
        self.expect(private, *step, "hf/model.safetensors")
        self.expect((*owner, 0o440), *step, "hf/config.json")
        self.expect(private, *step, "model/model/norm/weight.npy")
        self.expect(private, *step, "layouts/tp2-pp1-dp1/rank/0/tensors/model/norm/weight.npy")
        self.expect(private, *step, "meta.json")  # a checksum of one number tells it
        for path in self.everywhere(*step, "meta.json"):
            self.assertEqual(run_as(BOB, read_text, path), "EACCES")
        for path in self.everywhere(*step, "hf/model.safetensors"):
            self.assertEqual(run_as(BOB, lambda path=path: str(os.open(path, os.O_RDONLY))), "EACCES")
            self.assertEqual(run_as(ANN, lambda path=path: str(os.pread(os.open(path, os.O_RDONLY), 1, 8))), "b'{'")
        job.set_layout(tp=2)
        self.nodes.wait_settled(self.name)
        self.expect(private, *step, "layouts/tp2-pp1-dp1/rank/1/model.safetensors")
        self.nodes.kill(1)
        self.nodes.start(1)
        self.nodes.wait_members()
        self.expect(private, *step, "layouts/tp2-pp1-dp1/rank/1/model.safetensors")

    def test_sources_are_read_as_who_saved_them_on_all_nodes(self):
        data = tempfile.mkdtemp(prefix=self.name, dir=self.nodes.top)
        os.chmod(data, 0o755)
        for name, text, team in (("shared.txt", "of the team", 42009), ("secret.txt", "of root", 0)):
            write_text(f"{data}/{name}", text)
            os.chmod(f"{data}/{name}", 0o640)
            os.chown(f"{data}/{name}", 0, team)
        self.assertEqual(run_as(ANN, os.mkdir, self.everywhere()[0]), "")
        source = json.dumps({"shards": data + "/shared.txt", "format": "files"})
        self.assertEqual(run_as(ANN, write_text, self.everywhere("dataset")[1] + "/source.json", source, groups=[42009]), "")
        self.assertEqual(run_as(ANN, write_text, self.everywhere("dataset")[1] + "/order.json", '{"batch": 1}'), "")
        for path in self.everywhere("dataset"):
            cluster.until(lambda path=path: os.path.lexists(path + "/head"), path + " has a run", 30)
            top = os.path.realpath(path + "/head") + "/rank-000/files/e000/000"
            self.assertEqual(run_as(ANN, read_text, f"{top}/{os.listdir(top)[0]}"), "of the team")
        # Behind a link that is changed later lies nothing that Ann may not read, on no node.
        os.unlink(data + "/shared.txt")
        os.symlink("secret.txt", data + "/shared.txt")
        for path, user in zip(self.everywhere("dataset"), (ANN, ROOT, BOB)):
            top = os.path.realpath(path + "/head") + "/rank-000/files/e000/000"
            self.assertIn(run_as(user, read_text, f"{top}/00000000_0.txt"), ("EACCES", "EIO", "of the team"))
        for path in self.everywhere("dataset"):
            status = mount.read_json(path + "/status.json")
            self.assertNotIn("of root", json.dumps(status))



class Quotas(TestCase):
    NODES = 2
    OPTIONS = ("-o", "allow_other", "--quota-user", "8M")

    def test_a_job_that_another_node_removed_counts_no_more(self):
        for node in self.nodes.nodes:
            os.chmod(node.path, 0o777)
        first, second = (node.path for node in self.nodes.nodes)
        for name in (self.name, self.name + "-other"):
            self.assertEqual(run_as(ANN, os.mkdir, os.path.join(first, name)), "")
            cluster.until(lambda name=name: os.path.isdir(os.path.join(second, name)), f"{name} is there")
        self.addCleanup(self.nodes.nodes[0].ptc, "rm", "--force", self.name + "-other", check=False)

        def write(name):
            with open(os.path.join(second, name, "file"), "wb", buffering=0) as file:
                for _ in range(6):
                    file.write(b"x" * (1 << 20))
        other = self.name + "-other"
        self.assertEqual(run_as(ANN, write, self.name), "")
        self.assertEqual(run_as(ANN, write, other), "EDQUOT")
        self.nodes.nodes[0].ptc("rm", "--force", "--yes", self.name)
        # Nobody has looked there for what was removed.
        cluster.until(lambda: run_as(ANN, write, other) == "", "what was removed elsewhere counts no more", 10)


if __name__ == "__main__":
    mount.main()
