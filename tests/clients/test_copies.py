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

    def check_refused(self, job, *reasons):
        self.assertEqual(mount.error_of(job.commit, "back"), "ECANCELED")
        for reason in reasons:
            self.assertIn(reason, job.commit_error("back"))
        self.assertEqual(os.listdir(job.file("checkpoints")), [])

    def test_a_copy_of_its_own_directory_is_no_checkpoint(self):
        """It has each tensor in hf/, model/, dcp/ and layouts/: what to take of it is said."""
        self.run_program("cp", "-r", self.job.checkpoint("base"), self.temporary("backup"))
        advice = ("several times", "what is in its hf/", "the rank/ of one of its layouts/<layout>/", "a layout.json")
        for number, below in enumerate(("", "rank/0/", "rank/0/deeper/", "deeper/")):
            with self.subTest(below):
                job = self.mount.job(f"back-{number}")
                target = os.path.join(job.incoming("back"), below)
                os.makedirs(os.path.dirname(target.rstrip("/")), exist_ok=True)
                if below == "deeper/":
                    models.Bert().write_hf(job.incoming("back"))
                self.run_program("cp", "-r", self.temporary("backup"), target)
                self.check_refused(job, f"{below}meta.json and {below}hf/ are of a checkpoint's own directory", *advice)
        done = self.mount.ptc("import", "imported", self.temporary("backup"), check=False)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("meta.json and", done.stderr)
        self.assertIn("are of a checkpoint's own directory", done.stderr)
        job = self.mount.job("without-its-description")
        self.run_program("cp", "-r", self.temporary("backup"), job.incoming("back"))
        os.remove(job.incoming("back") + "/meta.json")
        self.check_refused(job, "layouts/tp2-pp1-dp1/rank/0/model.safetensors is of a rank",
                           "commit layouts/tp2-pp1-dp1/rank/ as one of its own")
        job = self.mount.job("as-it-says")
        self.run_program("cp", "-r", self.temporary("backup/hf"), job.incoming("back"))
        job.commit("back")
        self.assertEqual(mount.digests(job.checkpoint("back", "model")), mount.digests(self.job.checkpoint("base", "model")))

    def test_a_backup_is_brought_back(self):
        """As README.md says, into a job of another layout: every file as it was, and no tensor's bytes twice."""
        def write_npy(directory):
            for tensor in models.Bert().tensors:
                models.write_file(f"{directory}/{tensor.name.replace('.', '/')}.npy", models.npy_bytes(tensor))
            models.write_file(directory + "/config.json", models.Bert().config_text())
        for kind, write in (("bert", models.Bert().write_hf), ("llama", models.Llama().write_hf), ("npy", write_npy)):
            with self.subTest(kind):
                job = self.mount.job(kind)
                write(job.incoming("base") + "/rank/0")
                models.write_file(job.incoming("base") + "/rank/0/notes.txt", "of the writer")
                job.commit("base")
                job.set_layout(tp=2)
                backup = self.temporary(kind)
                os.mkdir(backup)
                self.run_program("cp", "-r", job.file("current/rank"), job.file("layout.json"), backup)
                self.assertTrue(os.path.isdir(backup + "/rank/1/tensors"), "it is copied with the rest")
                self.bring_back(job, self.mount.job("back-" + kind), backup)

    def bring_back(self, job, other, backup):
        other.set_layout(pp=2)
        self.run_program("cp", "-r", backup, other.incoming("base"))
        other.commit("base")
        self.assertEqual(mount.read_json(other.checkpoint("base", "meta.json"))["written_as"], "tp2-pp1-dp1")
        other.set_layout(tp=2)
        self.mount.ptc("import", other.name + "-imported", backup)
        for one in (other, mount.Job(self.mount, other.name + "-imported")):
            one.wait()
            before, after = (mount.digests(which.checkpoint("base")) for which in (job, one))
            for files in (before, after):
                del files["meta.json"]
            self.assertEqual(set(after), set(before))
            self.assertEqual([name for name in before if after[name] != before[name]], [])
            sums, theirs = ({tensor["name"]: tensor["checksum"] for tensor in
                             mount.read_json(which.checkpoint("base", "meta.json"))["tensors"]} for which in (job, one))
            self.assertEqual(theirs, sums)
            # What is no tensor each rank has for itself by now.
            more = sum(os.path.getsize(job.file("current/rank/1", name)) for name in ("config.json", "notes.txt"))
            self.assertEqual(one.status()["checkpoints"][0]["bytes"], job.status()["checkpoints"][0]["bytes"] + more)
            self.mount.ptc("verify", one.name)

    def test_arrays_of_the_writer_are_no_view(self):
        """One of them has other values than what is beside it: all are kept."""
        job = self.mount.job("own")
        models.Bert().write_hf(job.incoming("base") + "/rank/0")
        for number, tensor in enumerate(models.Bert().tensors[:2]):
            models.write_file(f"{job.incoming('base')}/rank/0/tensors/{tensor.name.replace('.', '/')}.npy",
                              models.npy_bytes(tensor) if number else models.npy_bytes(tensor)[:-1] + b"x")
        job.commit("base")
        kept = [file["path"] for file in mount.read_json(job.checkpoint("base", "meta.json"))["files"]]
        self.assertEqual(sum(path.startswith("tensors/") for path in kept), 2, kept)

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
