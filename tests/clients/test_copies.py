"""cp, rsync and tar copy a checkpoint out of the mount, and in again, byte for byte."""
import filecmp
import os
import shutil
import subprocess

import models
import mount


def tree(directory):
    found = {}
    for path, directories, files in os.walk(directory):
        for name in files + [d for d in directories if os.path.islink(os.path.join(path, d))]:
            full = os.path.join(path, name)
            found[os.path.relpath(full, directory)] = full
    return found


class Copies(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()
        models.Bert().write_hf(self.job.incoming("base") + "/rank/0")
        self.job.commit("base")
        self.job.set_layout(tp=2)

    def run_program(self, *arguments):
        mount.require_program(arguments[0])
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stderr, "")
        return done

    def assert_same_tree(self, a, b):
        left, right = tree(a), tree(b)
        self.assertEqual(set(left), set(right))
        self.assertTrue(left)
        for name, path in left.items():
            one, other = os.lstat(path), os.lstat(right[name])
            self.assertEqual(one.st_size, other.st_size, name)
            self.assertEqual(int(one.st_mtime), int(other.st_mtime), name)
            self.assert_same_file(path, right[name])

    def test_cp(self):
        self.run_program("cp", "-a", self.job.checkpoint("base"), self.temporary("copy"))
        self.assert_same_tree(self.job.checkpoint("base"), self.temporary("copy"))

    def test_rsync(self):
        if not shutil.which("rsync"):
            self.skipTest("rsync is not installed")
        source = self.job.checkpoint("base") + "/"
        self.run_program("rsync", "-a", source, self.temporary("copy"))
        self.assert_same_tree(source, self.temporary("copy"))
        again = self.run_program("rsync", "-ai", source, self.temporary("copy"))
        self.assertEqual(again.stdout, "", "sizes and times are stable, so nothing is copied twice")

    def test_tar(self):
        self.run_program("tar", "-C", self.job.path, "-cf", self.temporary("t.tar"),
                         "checkpoints/base")
        self.run_program("tar", "-C", self.scratch, "-xf", self.temporary("t.tar"))
        self.assert_same_tree(self.job.checkpoint("base"), self.temporary("checkpoints/base"))

    def test_diff_and_find(self):
        source = self.job.checkpoint("base", "model")
        self.run_program("cp", "-a", source, self.temporary("model"))
        self.run_program("diff", "-r", source, self.temporary("model"))
        found = self.run_program("find", source, "-name", "*.npy")
        self.assertEqual(len(found.stdout.splitlines()), len(models.Bert().tensors))

    def test_cp_into_the_mount(self):
        models.Gpt2().write_hf(self.temporary("model"), sharded=True)
        ranks = self.job.incoming("other") + "/rank"
        os.makedirs(ranks)
        self.run_program("cp", "-r", self.temporary("model"), ranks + "/0")
        with open(self.job.incoming("other") + "/layout.json", "w", encoding="utf-8") as file:
            file.write('{"tp": 1, "pp": 1, "dp": 1}')
        self.run_program("mv", self.job.incoming("other"), self.job.file("checkpoints/"))
        whole = models.read_safetensors(
            self.job.rank_file("other", "tp1-pp1-dp1", 0, "model.safetensors"))
        self.assertEqual(whole, {t.name: t for t in models.Gpt2().tensors})

    def test_nothing_in_a_checkpoint_can_be_written(self):
        path = self.job.checkpoint("base", "model/pooler/dense/bias.npy")
        for call in (lambda: open(path, "r+b"), lambda: open(path, "wb"),
                     lambda: os.truncate(path, 1), lambda: os.rename(path, path + "x"),
                     lambda: os.chmod(path, 0o600), lambda: os.setxattr(path, "user.x", b"1"),
                     lambda: os.mkdir(self.job.checkpoint("base", "new"))):
            self.assertIn(mount.error_of(call), ("EROFS", "EPERM", "EACCES"))

    def test_remove_a_checkpoint(self):
        models.Bert(2).write_hf(self.job.incoming("next") + "/rank/0")
        with open(self.job.incoming("next") + "/layout.json", "w", encoding="utf-8") as file:
            file.write('{"tp": 1, "pp": 1, "dp": 1}')
        self.job.commit("next")
        self.run_program("rm", "-r", self.job.checkpoint("base"))
        self.assertEqual(os.listdir(self.job.file("checkpoints")), ["next"])
        self.assertTrue(filecmp.cmp(self.job.checkpoint("next", "hf/config.json"),
                                    self.job.file("current/rank/0/config.json"), shallow=False))


if __name__ == "__main__":
    mount.main()
