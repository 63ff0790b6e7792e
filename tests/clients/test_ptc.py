"""The command line against a real mount."""
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import threading
import time
import unittest
import xml.etree.ElementTree

import make_llama
import models
import mount


class Ptc(mount.TestCase):
    def import_model(self, model=None, name="base"):
        job = mount.Job(self.mount, self.id().rsplit(".", 1)[-1])
        (model or models.Llama()).write_hf(self.temporary("model"))
        self.mount.ptc("import", job.name, self.temporary("model"), "--name", name)
        return job

    def test_import_makes_the_job_and_commits(self):
        job = self.import_model()
        self.assertEqual(os.listdir(job.file("checkpoints")), ["base"])
        found = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in models.Llama().tensors})
        again = self.mount.ptc("import", job.name, self.temporary("model"), check=False)
        self.assertEqual(again.returncode, 1)
        self.assertIn("already", again.stderr)
        half = self.mount.job("half")
        models.Llama().write_hf(half.incoming("a b") + "/rank/0")
        again = self.mount.ptc("import", "half", self.temporary("model"), "--name", "a b", check=False)
        self.assertEqual(again.returncode, 1)
        self.assertIn(f"mv '{half.incoming('a b')}' {half.path}/checkpoints/", again.stderr)
        for name in ("a/b", "", ".hidden"):
            refused = self.mount.ptc("import", "half", self.temporary("model"), "--name", name, check=False)
            self.assertEqual(refused.returncode, 1)
            self.assertIn(f"'{name}' is no name of a checkpoint", refused.stderr)

    def test_import_of_a_file(self):
        model = models.Llama()
        model.write_hf(self.temporary("model"))
        single = self.temporary("model") + "/model.safetensors"
        done = self.mount.ptc("import", "alone", single)
        self.assertIn("in 1 file copied", done.stdout)
        self.assert_same_file(single, self.mount.path + "/alone/checkpoints/base/layouts/tp1-pp1-dp1/rank/0/model.safetensors")
        self.mount.job("second").set_layout(tp=2)
        done = self.mount.ptc("import", "second", single, "--rank", "1", check=False)
        self.assertIn("rank 0", done.stderr)
        self.assert_same_file(single, self.mount.path + "/second/incoming/base/rank/1/model.safetensors")
        done = self.mount.ptc("import", "alone", self.temporary("nothing"), check=False)
        self.assertEqual((done.returncode, done.stderr), (1, f"ptc: {self.temporary('nothing')} is neither a directory nor a file\n"))
        self.mount.ptc("import", "alone", single, "--name", "moved", "--move")
        self.assertFalse(os.path.exists(single))

    def test_an_import_that_is_interrupted_while_it_commits_keeps_its_name(self):
        models.Llama().write_hf(self.temporary("model"))
        models.write_file(self.temporary("model/notes.bin"), "x" * (64 << 20))
        job = mount.Job(self.mount, "interrupted")
        config = job.incoming("base") + "/rank/0/config.json"
        for how in (signal.SIGINT, signal.SIGTERM):
            shutil.rmtree(job.incoming("base"), ignore_errors=True)
            process = subprocess.Popen(
                [os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "import", job.name,
                 self.temporary("model")],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while not os.path.exists(config):
                self.assertIsNone(process.poll())
            with open(config, "r+b"):  # a commit waits for a moment until it is closed
                while process.poll() is None:
                    if any(".import-" in name and os.path.isdir(job.incoming(name) + "/rank")
                           for name in os.listdir(job.file("incoming"))):
                        process.send_signal(how)
                        break
                self.assertEqual(process.wait(60), 1, process.communicate())
            self.assertIn("mv ", process.communicate()[1])
            self.assertEqual(sorted(set(os.listdir(job.file("incoming"))) - {"base.error"}), ["base"])
            self.assertEqual(sorted(os.listdir(job.incoming("base") + "/rank/0")),
                             sorted(os.listdir(self.temporary("model"))))
        job.commit("base")

    def test_an_import_that_is_interrupted_while_it_copies_leaves_nothing(self):
        models.Llama().write_hf(self.temporary("model"))
        for number in range(3000):
            models.write_file(self.temporary(f"model/many/{number}"), "x")
        job = mount.Job(self.mount, "interrupted_copy")
        for how, is_new in ((signal.SIGINT, True), (signal.SIGTERM, False)):
            if not is_new:
                os.mkdir(job.path)
            process = subprocess.Popen([os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "import", job.name,
                                        self.temporary("model")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while not os.path.exists(job.incoming("base") + "/rank/0/many/5"):
                self.assertIsNone(process.poll())
            process.send_signal(how)
            said = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, 1)
            self.assertIn(f"ptc: {job.name}/base was not imported: interrupted; what was copied is removed\n", said)
            self.assertEqual(f"job {job.name} is removed again" in said, is_new)
            self.assertEqual(os.path.exists(job.path), not is_new)
        self.assertEqual(os.listdir(job.file("incoming")), [])

    def test_what_lies_in_incoming_is_said(self):
        job, now = self.new_job(), time.time()
        models.write_file(job.incoming("an old one") + "/rank/0/w.bin", "x" * 5000)
        models.write_file(job.incoming("new") + "/rank/0/w.bin", "x" * 7000)
        self.assertNotIn("not committed", self.mount.ptc("status", job.name).stdout)
        for where, _, names in os.walk(job.incoming("an old one")):
            for path in (where, *(f"{where}/{name}" for name in names)):
                os.utime(path, (now - 7200, now - 7200))
        said = " ".join(self.mount.ptc("status", job.name, env={"COLUMNS": "400"}).stdout.split())
        self.assertIn(f"incoming an old one: 4.9 KiB, not committed; written 2 h ago. Commit it with mv, or "
                      f"rm -r '{job.incoming('an old one')}'", said)
        self.assertNotIn("new:", said)

    def test_import_follows_links_and_leaves_rubbish_out(self):
        models.Bert().write_hf(self.temporary("blobs"))
        models.write_file(self.temporary("hub/refs/main"), "abc")
        snapshot = self.temporary("hub/snapshots/abc")
        os.makedirs(snapshot + "/.git")
        models.write_file(snapshot + "/.git/HEAD", "x")
        models.write_file(snapshot + "/.cache/y", "x")
        for name in ("model.safetensors", "config.json"):
            os.symlink(self.temporary("blobs/" + name), os.path.join(snapshot, name))
        self.mount.ptc("import", "links", self.temporary("hub"))
        job = mount.Job(self.mount, "links")
        self.assertEqual(sorted(os.listdir(job.checkpoint("base", "layouts/tp1-pp1-dp1/rank/0"))),
                         ["config.json", "model.safetensors", "tensors"])

    def test_import_of_ranks_with_their_layout(self):
        model = models.Gpt2()
        model.write_ranks(self.temporary("ranks"), 2, 3)
        done = self.mount.ptc("import", "ranks/step7", self.temporary("ranks"), "--layout", "tp2-pp3-dp1",
                              "--move")
        self.assertIn("ranks: in layout tp2-pp3-dp1, as it was written", done.stdout)
        job = mount.Job(self.mount, "ranks")
        job.wait()
        self.assertIn("tp2-pp3-dp1", os.readlink(job.file("current")))
        found = models.read_safetensors(job.rank_file("step7", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in model.tensors})
        self.assertEqual([f for _, _, files in os.walk(self.temporary("ranks")) for f in files], [])

    def test_import_that_is_refused_says_why(self):
        models.write_file(self.temporary("bad/model.safetensors"), b"\x10\0\0\0\0\0\0\0{")
        done = self.mount.ptc("import", "bad", self.temporary("bad"), check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("model.safetensors", done.stderr)
        self.assertIn("mv ", done.stderr)

    @unittest.skipUnless(os.getuid() == 0, "only root limits space")
    def test_where_there_is_no_more_room_that_is_said(self):
        job, model = self.new_job(), self.temporary("model")
        models.Llama(1).write_hf(model)
        os.setxattr(job.path, "trusted.ptc.quota", b"1")
        told = self.mount.ptc("import", job.name, model, check=False)
        self.assertEqual(told.returncode, 1)
        self.assertIn("Disk quota exceeded", told.stderr)
        self.assertEqual(os.listdir(job.file("incoming")), [])
        os.setxattr(job.path, "trusted.ptc.quota", b"none")
        self.mount.ptc("import", job.name, model)

    def test_of_imports_of_one_name_one_is_done(self):
        name = "at_once"
        for number in range(8):
            models.Llama(number).write_hf(self.temporary(f"model{number}"))
        done = [None] * 8

        def bring_in(number):
            done[number] = self.mount.ptc("import", name, self.temporary(f"model{number}"), "--move", check=False)
        threads = [threading.Thread(target=bring_in, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [number for number in range(8) if done[number].returncode == 0]
        self.assertEqual(len(won), 1, [one.stderr for one in done])
        job = mount.Job(self.mount, name)
        found = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in models.Llama(won[0]).tensors})
        for number in range(8):
            self.assertEqual(os.listdir(self.temporary(f"model{number}")) == [], number in won)
            if number not in won:
                self.assertIn("already", done[number].stderr)

    def test_imports_that_replace_each_other_mix_nothing(self):
        """With --force each takes the place of the others, and what is committed is what one of them brought in."""
        number_of_files = 300
        for number in range(4):
            models.Llama(number).write_hf(self.temporary(f"model{number}"))
            for file in range(number_of_files):
                models.write_file(self.temporary(f"model{number}/more/{file}"), str(number))
        for name in ("first", "second", "third"):
            done = [None] * 4

            def bring_in(number):
                done[number] = self.mount.ptc("import", "replaced", self.temporary(f"model{number}"), "--name", name, "--force", check=False)
            threads = [threading.Thread(target=bring_in, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
                time.sleep(0.05)
            for thread in threads:
                thread.join()
            won = [number for number in range(4) if done[number].returncode == 0]
            self.assertEqual(len(won), 1, [one.stderr for one in done])
            job = mount.Job(self.mount, "replaced")
            found = models.read_safetensors(job.rank_file(name, "tp1-pp1-dp1", 0))
            self.assertEqual(found, {t.name: t for t in models.Llama(won[0]).tensors})
            more = job.checkpoint(name, "layouts/tp1-pp1-dp1/rank/0/more")
            self.assertEqual({mount.read_text(f"{more}/{file}") for file in range(number_of_files)}, {str(won[0])})
            for number in set(range(4)) - set(won):
                self.assertRegex(done[number].stderr, "already|has replaced what was copied|was removed meanwhile")

    def test_what_is_refused_has_its_name_again(self):
        job = self.new_job()
        models.write_file(self.temporary("bad/model.safetensors"), b"\x10\0\0\0\0\0\0\0{")
        done = self.mount.ptc("import", job.name, self.temporary("bad"), check=False)
        self.assertEqual(done.returncode, 1)
        self.assertNotIn(".import-", done.stderr)
        self.assertEqual(sorted(os.listdir(job.file("incoming"))), ["base", "base.error"])
        self.assertIn("commit of incoming/base refused: ", job.error())
        models.Llama().write_hf(self.temporary("model"))
        self.mount.ptc("import", job.name, self.temporary("model"), "--force")
        self.assertEqual(os.listdir(job.file("incoming")), [])
        self.assertEqual(job.error(), "")
        self.mount.ptc("import", job.name, self.temporary("bad"), "--name", "second", check=False)
        shutil.copy(self.temporary("model/model.safetensors"), job.incoming("second") + "/rank/0")
        job.commit("second")
        self.assertEqual(job.error(), "")

    def test_what_killed_imports_left_goes(self):
        """With the next import of the name; what another one is at, which holds its lock, stays."""
        job = self.new_job()
        left, of_another, others_name = (job.incoming(name) for name in
                                         (f"base.import-{16 * '0'}", f"base.import-{16 * 'a'}", f"other.import-{16 * '0'}"))
        for directory in (left, of_another, others_name):
            models.write_file(f"{directory}/rank/0/model.bin", b"bytes")
        models.Llama().write_hf(self.temporary("model"))
        lock = os.open(of_another, os.O_RDONLY)
        self.addCleanup(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        self.mount.ptc("import", f"{job.name}/base", self.temporary("model"))
        self.assertIn(os.path.basename(left), os.listdir(job.file("incoming")), "its import may be about to lock it")
        while time.time() < os.stat(left).st_ctime + 7:
            time.sleep(0.5)
        self.mount.ptc("rm", "--yes", f"{job.name}/base")
        self.mount.ptc("import", f"{job.name}/base", self.temporary("model"))
        self.assertEqual(sorted(os.listdir(job.file("incoming"))), sorted(os.path.basename(name) for name in (of_another, others_name)))

    def test_import_into_a_job_of_several_ranks(self):
        job = self.new_job()
        job.set_layout(tp=2)
        models.Llama().write_hf(self.temporary("model"))
        done = self.mount.ptc("import", job.name, self.temporary("model"), check=False)
        self.assertEqual(done.returncode, 1)
        command = done.stderr.splitlines()[-1].split()
        self.assertEqual(command, ["ptc", "import", "--force", "--layout", "tp1-pp1-dp1", f"{job.name}/base", self.temporary("model")])
        self.mount.ptc(*command[1:])
        self.assertEqual(os.listdir(job.file("checkpoints")), ["base"])

    def test_import_into_a_job_that_is_removed(self):
        job = self.new_job()
        models.Llama().write_hf(self.temporary("model"))
        for number in range(2000):
            models.write_file(self.temporary(f"model/many/{number}"), "x")
        import_it = subprocess.Popen([shutil.which("ptc", path=self.mount.bin), "-C", self.mount.path, "import", job.name, self.temporary("model")],
                                     stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not os.path.exists(job.incoming("base") + "/rank/0/many/5"):
            self.assertIsNone(import_it.poll())
        self.mount.ptc("rm", "--force", "--yes", job.name)
        said = import_it.communicate(timeout=60)[1]
        self.assertEqual(import_it.returncode, 1)
        self.assertIn(f"job {job.name} was removed meanwhile", said)
        self.assertNotIn("Nothing is lost", said)

    def test_export(self):
        job = self.import_model()
        model = models.Llama()
        self.mount.ptc("layout", job.name, "set", "--tp", 2, "--pp", 2, "--wait")
        self.mount.ptc("export", job.name, self.temporary("hf"))
        self.assertEqual(models.read_hf(self.temporary("hf")), {t.name: t for t in model.tensors})
        self.assertEqual(mount.read_text(self.temporary("hf/config.json")), model.config_text())
        refused = self.mount.ptc("export", job.name, self.temporary("hf"), check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("--force", refused.stderr)
        self.mount.ptc("export", job.name, self.temporary("hf"), "--force")
        # As the ranks load it, and in again under that layout.
        self.mount.ptc("export", f"{job.name}/base", self.temporary("ranks"), "--layout", "current")
        for rank in range(4):
            found = models.read_safetensors(self.temporary(f"ranks/rank/{rank}/model.safetensors"))
            held = model.rank_tensors(2, 2, rank % 2, rank // 2)
            self.assertEqual(found, {t.name: t for t in held})
        models.write_file(self.temporary("plain"), "")
        self.assertEqual(os.stat(self.temporary("ranks/layout.json")).st_mode, os.stat(self.temporary("plain")).st_mode)
        self.mount.ptc("import", "again", self.temporary("ranks"))  # a new job, in the layout that lies there
        self.assertEqual({key: mount.read_json(self.mount.path + "/again/layout.json")[key] for key in ("tp", "pp", "dp")},
                         {"tp": 2, "pp": 2, "dp": 1})
        self.mount.ptc("export", "again", self.temporary("one"), "--layout", "tp1-pp1-dp1",
                       "--rank", 0)
        found = models.read_safetensors(self.temporary("one/model.safetensors"))
        self.assertEqual(found, {t.name: t for t in model.tensors})
        refused = self.mount.ptc("export", job.name, self.temporary("none"), "--layout", "current", "--rank", 12, check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("has no rank 12", refused.stderr)
        self.mount.ptc("export", job.name, self.temporary("npy"), "--model")
        self.assertTrue(os.path.exists(self.temporary("npy/model/norm/weight.npy")))

    def test_an_export_of_a_layout_that_is_none(self):
        job = self.import_model()
        for layout, why in (("tp3-pp1-dp1", f"layout tp3-pp1-dp1 does not fit {job.name}/base: .*model.layers"),
                            ("tp9", "'tp9' is no layout's name, .* is it tp9-pp1-dp1"),
                            ("TP2_PP1", "'TP2_PP1' is no layout's name, .* is it tp2-pp1-dp1"),
                            ("VLLM-tp2", "'VLLM-tp2' is no layout's name, .* is it vllm-tp2"),
                            ("trtllm-tp2", "'trtllm-tp2' is no layout's name: TensorRT-LLM .* reads hf/"),
                            ("nothing", "'nothing' is no layout's name, such as tp4-pp2-dp1"),
                            ("tp2-zero2", "'tp2-zero2' is no layout's name, such as tp4-pp2-dp1"),
                            ("tp2-pp2-dp1+12345678", "is no layout's name, such as tp4-pp2-dp1"),
                            ("vllm-tp0", f"{job.name}/base cannot be laid out as vllm-tp0")):
            done = self.mount.ptc("export", job.name, self.temporary("out"), "--layout", layout, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, why)
            self.assertFalse(os.path.exists(self.temporary("out")))
        done = self.mount.ptc("export", job.name, self.temporary("out"), "--layout", "", check=False)
        self.assertEqual((done.returncode, "--layout: it is empty" in done.stderr), (2, True))
        for command in (("plan", job.name), ("rules", "check", job.name)):
            done = self.mount.ptc(*command, "--layout", "tp3-pp1-dp1", check=False)
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, "^ptc: .*tp3-pp1-dp1 does not fit")
            self.assertNotIn("column", done.stderr)  # of a text that nobody wrote

    def test_an_export_of_which_nothing_can_be_made(self):
        models.Llama().write_hf(self.temporary("model"))
        self.mount.ptc("import", "bare", self.temporary("model") + "/model.safetensors")  # without its config.json
        for more in ((), ("--rank", 0)):
            done = self.mount.ptc("export", "bare", self.temporary("out"), "--layout", "vllm-tp2", *more, check=False)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("nothing is exported: bare/base cannot be laid out as vllm-tp2: ", done.stderr)
            self.assertIn("the checkpoint has no config.json", done.stderr)
            self.assertFalse(os.path.exists(self.temporary("out")))

    def test_an_export_is_whole_or_not_there(self):
        """A tensor that no copy has right any more is not read; the others are written by then, or are being written."""
        with mount.Mount() as other:
            models.Llama().write_hf(self.temporary("model"))
            other.ptc("import", "llama", self.temporary("model"))
            os.mkdir(self.temporary("there"))
            os.mkdir(self.temporary("old"))
            models.write_file(self.temporary("old/config.json"), "old")
            images = os.path.join(other.store, "images")
            path = max((os.path.join(images, name) for name in os.listdir(images)), key=os.path.getsize)
            with open(path, "r+b") as file:
                file.seek(os.path.getsize(path) - 100)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            self.assertEqual(other.ptc("verify", "llama", check=False).returncode, 1)  # which is known from now on
            before = sorted(os.listdir(self.scratch))
            for options in (("--hf",), ("--model",), ("--layout", "current")):
                for name in ("new", "made/on/the/way", "there", "old"):
                    done = other.ptc("export", "llama", self.temporary(name), *options, "--force", check=False)
                    self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                    self.assertRegex(done.stderr, "llama/checkpoints/base/.*(weight.npy|model.safetensors): Input/output error")
                    self.assertIn(f"{self.temporary(name)} is as it was before; ptc verify llama/base tells", done.stderr)
                    self.assertEqual(sorted(os.listdir(self.scratch)), before)
                    self.assertEqual(os.listdir(self.temporary("there")), [])
                    self.assertEqual(os.listdir(self.temporary("old")), ["config.json"])
                    self.assertEqual(mount.read_text(self.temporary("old/config.json")), "old")

    def test_an_export_that_cannot_replace_what_is_there(self):
        """One by one its files go into a directory that holds something: what went wrong on the way is not denied."""
        job = self.import_model()
        os.makedirs(self.temporary("old/model.safetensors/mine"))
        done = self.mount.ptc("export", job.name, self.temporary("old"), "--hf", "--force", check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("has some of the new files beside those that were there", done.stderr)
        self.assertEqual(os.listdir(self.temporary("old/model.safetensors")), ["mine"])
        self.assertEqual([name for name in os.listdir(self.temporary("old")) if name.startswith(".ptc-export")], [])

    def test_an_export_that_is_interrupted(self):
        job = self.import_model()
        os.makedirs(self.temporary("there"), mode=0o750)
        self.mount.ptc("export", job.name, self.temporary("there"), "--model")
        self.assertEqual(stat.S_IMODE(os.stat(self.temporary("there")).st_mode), 0o750)
        whole = self.sizes("there")
        if os.getuid() == 0:  # room for the bytes, but not in whole pages of each file
            os.mkdir(self.temporary("full"))
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={sum(whole.values()) + 4096}", "full", self.temporary("full")],
                           check=True)
            self.addCleanup(subprocess.run, ["umount", self.temporary("full")], check=True)
            for name in ("full/out", "full"):
                done = self.mount.ptc("export", job.name, self.temporary(name), "--model", check=False)
                self.assertRegex(done.stderr, r"\.npy: .*No space left on device.*is as it was before")
                self.assertEqual(os.listdir(self.temporary("full")), [])
        for number in range(20):
            export = subprocess.Popen([os.path.join(self.mount.bin, "ptc"), "-C", self.mount.path, "export", job.name,
                                       self.temporary("stopped"), "--model"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            time.sleep(0.005 * number)
            export.send_signal(signal.SIGINT)
            export.wait()
            self.assertNotIn("ptc-export", " ".join(os.listdir(self.scratch)))
            if os.path.exists(self.temporary("stopped")):
                self.assertEqual(self.sizes("stopped"), whole)
                break

    def sizes(self, name):
        top = self.temporary(name)
        return {os.path.relpath(os.path.join(where, file), top): os.path.getsize(os.path.join(where, file))
                for where, _, files in os.walk(top) for file in files}

    def test_status_and_ls(self):
        job = self.import_model()
        status = json.loads(self.mount.ptc("status", job.name, "--json").stdout)
        self.assertEqual(status, job.status())
        text = self.mount.ptc("status", job.path).stdout
        self.assertTrue(all(len(line) <= 80 for line in text.splitlines()), text)
        for word in ("idle", "tp1-pp1-dp1", "base"):
            self.assertIn(word, text)
        self.assertIn(job.name, self.mount.ptc("ls").stdout)
        self.assertIn("base", self.mount.ptc("ls", job.name).stdout)
        self.assertIn(job.name + ":", self.mount.ptc("status").stdout)

    def test_wait(self):
        job = self.import_model()
        with open(job.file("layout.json"), "w", encoding="utf-8") as file:
            file.write('{"tp": 4, "pp": 1, "dp": 1}')
        done = self.mount.ptc("wait", job.name, "--timeout", 60)
        self.assertIn("tp4-pp1-dp1 in force", done.stdout)
        self.assertEqual(job.status()["layout"], "tp4-pp1-dp1")
        subprocess.run(["bash", "-c", f"""echo '{{"tp": 3}}' > {job.file("layout.json")}"""], check=True)  # says nothing
        done = self.mount.ptc("wait", job.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("layout.json refused: ", done.stderr)
        self.assertIn("tp4-pp1-dp1 stays in force", done.stderr)
        # Whatever else is refused after it.
        self.assertEqual(mount.error_of(models.write_file, job.file("dataset/consumed"), "x"), "EINVAL")
        self.assertIn("dataset/consumed refused: ", job.error())
        done = self.mount.ptc("wait", job.name, check=False)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("layout.json refused: ", done.stderr)
        status = self.mount.ptc("status", job.name).stdout
        self.assertRegex(status, "last error .*: dataset/consumed")
        self.assertRegex(status, "layout error .*: layout.json")
        models.write_file(job.file("layout.json"), mount.read_text(job.file("layout.json")))  # what is wanted all the same
        self.mount.ptc("wait", job.name)
        job.set_layout(tp=2)
        self.assertIsNone(job.status()["layout_error"])
        self.mount.ptc("wait", job.name)

    def test_plan(self):
        job = self.import_model()
        before = job.status()
        plan = json.loads(self.mount.ptc("plan", job.name, "--tp", 2, "--json").stdout)
        self.assertEqual((plan["from"], plan["to"], plan["state"]),
                         ("tp1-pp1-dp1", "tp2-pp1-dp1", "dry-run"))
        self.assertEqual(job.status(), before)
        self.assertIn("least possible", self.mount.ptc("plan", job.name, "--tp", 2).stdout)
        same = json.loads(self.mount.ptc("plan", job.name, "--tp", 1, "--json").stdout)
        self.assertEqual(same["files"]["written"], 0)
        bad = self.mount.ptc("plan", job.name, "--tp", 3, check=False)
        self.assertEqual(bad.returncode, 1)
        self.assertIn("model.layers.", bad.stderr)
        bad = self.mount.ptc("plan", job.name, "--layout", "tp2", check=False)
        self.assertEqual(bad.returncode, 1)
        self.assertIn("is it tp2-pp1-dp1?", bad.stderr)
        bad = self.mount.ptc("plan", job.name, "--layout", "nothing.json", check=False)
        self.assertIn("'nothing.json' is neither a file nor a layout's name", bad.stderr)
        self.mount.ptc("layout", job.name, "set", "--tp", 2, "--wait")
        done = json.loads(self.mount.ptc("plan", job.name, "--json").stdout)
        self.assertEqual((done["state"], done["to"]), ("done", "tp2-pp1-dp1"))
        self.assertEqual(done["bytes"], plan["bytes"])

    def test_layout(self):
        job = self.import_model()
        self.assertEqual(self.mount.ptc("layout", job.name).stdout.strip(),
                         mount.read_text(job.file("layout.json")).strip())
        job.set_layout(tp=1, pp=2, stages=[2, 3], keep=5)
        done = self.mount.ptc("layout", job.name, "set", "--pp", 5, "--wait")
        self.assertIn("stages", done.stderr)
        layout = json.loads(mount.read_text(job.file("layout.json")))
        self.assertEqual((layout["pp"], layout["keep"], "stages" in layout), (5, 5, False))
        self.mount.ptc("layout", job.name, "set", "--pp", 2, "--stages", "2,3", "--wait")
        self.assertEqual(json.loads(mount.read_text(job.file("layout.json")))["stages"], [2, 3])
        self.assertEqual(json.loads(self.mount.ptc("plan", job.name, "--pp", 2, "--stages=3,2", "--json").stdout)["from"],
                         job.status()["layout"])
        devices = self.mount.ptc("layout", job.name, "set", "--devices", "nobody:0,nobody:1", check=False)
        self.assertEqual(devices.returncode, 1)
        self.assertIn("nobody", devices.stderr)
        self.mount.ptc("layout", job.name, "set", "--stages", "even", "--devices", "auto", "--wait")
        self.assertEqual({"stages", "devices"} & set(json.loads(mount.read_text(job.file("layout.json")))), set())
        self.mount.ptc("layout", job.name, "set", "--pp", 3, "--stages", "0,5,0", "--wait")  # embedding and head alone
        current = job.file("current", "rank")
        self.assertEqual([sorted(models.read_safetensors(f"{current}/{rank}/model.safetensors")) for rank in (0, 2)],
                         [["model.embed_tokens.weight"], ["lm_head.weight", "model.norm.weight"]])
        in_force = os.readlink(job.file("current"))
        self.mount.ptc("layout", job.name, "set", "--stages", "E|t*5|L", "--wait")  # as Megatron-Core writes it
        self.assertEqual(json.loads(mount.read_text(job.file("layout.json")))["stages"], "E|t*5|L")
        self.assertEqual(os.readlink(job.file("current")), in_force)
        done = self.mount.ptc("layout", job.name, "set", "--pp", 2, "--wait")
        self.assertIn('"stages" was a pipeline layout of before and is left out', done.stderr)
        bad = self.mount.ptc("layout", job.name, "set", "--stages", "Et*3|tX", check=False)
        self.assertIn("'Et*3|tX' is no pipeline layout like 'Et*3|t*4|t*3L'", bad.stderr)
        self.assertEqual(bad.returncode, 2)
        self.mount.ptc("layout", job.name, "set", "--stages", "even", "--pp", 1, "--dp", 4, "--optimizer", "fsdp", "--dp-shard", 2, "--wait")
        self.assertEqual([mount.digests(f"{current}/{rank}") for rank in (0, 1)], [mount.digests(f"{current}/{rank}") for rank in (2, 3)])
        self.assertNotEqual(mount.digests(f"{current}/0"), mount.digests(f"{current}/1"))
        self.assertEqual(os.readlink(job.file("current")), "checkpoints/base/layouts/tp1-pp1-dp4-shard2-fsdp")
        done = self.mount.ptc("layout", job.name, "set", "--dp", 3, "--wait")
        self.assertIn('"dp_shard" was 2 and is left out: it does not divide dp = 3', done.stderr)
        done = self.mount.ptc("layout", job.name, "set", "--dp", 4, "--dp-shard", 2, "--wait")
        self.mount.ptc("layout", job.name, "set", "--cp", 2, "--shard-over", "cp", "--wait")
        self.assertEqual(os.readlink(job.file("current")), "checkpoints/base/layouts/tp1-pp1-dp4-cp2-shard2-fsdp-over_cp")
        found = [mount.digests(f"{current}/{rank}") for rank in range(8)]
        self.assertEqual(len({str(each) for each in found}), 4)
        self.assertEqual(found[:4], found[4:])
        self.mount.ptc("layout", job.name, "set", "--cp", 1, "--shard-over", "dp", "--wait")
        self.assertNotIn("shard_over", json.loads(mount.read_text(job.file("layout.json"))))
        done = self.mount.ptc("layout", job.name, "set", "--optimizer", "replicated", "--dp", 1, "--wait")
        self.assertIn('"dp_shard" was 2 and is left out: nothing is cut over dp', done.stderr)
        self.mount.ptc("layout", job.name, "set", "--pp", 5, "--wait")
        refused = self.mount.ptc("layout", job.name, "set", "--tp", 3, check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("refused", refused.stderr)
        self.assertIn("model.layers.", refused.stderr)
        edited = self.mount.ptc("layout", job.name, "edit", "--wait", env={
            "EDITOR": "sed -i 's/\"tp\": 1/\"tp\": 2/'", "VISUAL": ""})
        self.assertIn("tp2-pp5-dp1 in force", edited.stdout)
        done = self.mount.ptc("layout", job.name, "set", "--pp", 1, "--dp", 2, "--etp", 1, "--wait")  # two ranks; it has no experts
        self.assertIn("tp2-pp1-dp2-etp1 in force", done.stdout)
        self.assertEqual(sorted(os.listdir(current)), ["0", "1"])
        for rank in range(2):
            self.assertEqual(models.read_safetensors(f"{current}/{rank}/model.safetensors"),
                             {t.name: t for t in models.Llama().rank_tensors(2, 1, rank, 0)})
        refused = self.mount.ptc("layout", job.name, "set", "--dp", 3, check=False)
        self.assertIn("etp·ep·dp·cp = 3 ranks, which tp = 2 does not divide", refused.stderr)
        done = self.mount.ptc("layout", job.name, "set", "--etp", 0, "--dp", 1, "--wait")
        self.assertIn("tp2-pp1-dp1 in force", done.stdout)

    def test_a_change_that_is_not_waited_for_any_more_goes_on(self):
        job = mount.Job(self.mount, "impatient")
        make_llama.write_model(self.temporary("model"), "68m", seed=1)
        self.mount.ptc("import", job.name, self.temporary("model"))
        said = ""
        for attempt, tp in enumerate((2, 4, 1, 4, 2, 1) * 4):  # of 12 heads
            process = subprocess.Popen([os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "layout", job.name, "set",
                                        "--tp", str(tp), "--wait"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            while process.poll() is None:
                status = job.status()
                if (status["wanted"], status["state"]) == (f"tp{tp}-pp1-dp1", "resharding"):  # not what is tidied up of the former
                    time.sleep(attempt % 6 / 1000)  # the save itself may not have returned yet
                    process.send_signal(signal.SIGINT)
                    break
            said = process.communicate(timeout=60)[1]
            self.assertEqual(job.wait()["layout"], f"tp{tp}-pp1-dp1", said)
            if process.returncode == -signal.SIGINT and "was being saved" not in said:
                break
        self.assertRegex(said, f"ptc: interrupted: the change of {job.name}( to tp{tp}-pp1-dp1)? goes on; ptc wait {job.name} ")

    def test_a_layout_that_another_replaces_meanwhile_is_no_success(self):
        job = mount.Job(self.mount, "replaced-meanwhile")
        make_llama.write_model(self.temporary("model"), "68m", seed=1)
        self.mount.ptc("import", job.name, self.temporary("model"))
        for tp, other in ((2, 4), (1, 2), (4, 1), (2, 4)) * 5:
            process = subprocess.Popen([os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "layout", job.name, "set",
                                        "--tp", str(tp), "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while process.poll() is None and job.status()["wanted"] != f"tp{tp}-pp1-dp1":
                pass
            process.send_signal(signal.SIGSTOP)
            job.set_layout(tp=other)
            self.assertEqual(job.wait()["layout"], f"tp{other}-pp1-dp1")
            process.send_signal(signal.SIGCONT)
            out, said = process.communicate(timeout=60)
            if process.returncode != 0 or f"tp{tp}-pp1-dp1 in force" not in out:
                break  # not done before it was stopped
        self.assertEqual(process.returncode, 1, out)
        self.assertIn(f"was replaced by tp{other}-pp1-dp1 ", said)
        self.assertIn(f"{job.name}: tp{other}-pp1-dp1 in force", said)

    def test_what_another_keeps_and_adds_to_is_a_success(self):
        job = mount.Job(self.mount, "added-to-meanwhile")
        make_llama.write_model(self.temporary("model"), "68m", seed=1)
        self.mount.ptc("import", job.name, self.temporary("model"))
        ptc = [os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "layout", job.name, "set"]
        for tp, pp in ((2, 2), (1, 1), (4, 2), (1, 2)) * 5:
            process = subprocess.Popen([*ptc, "--tp", str(tp), "--wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            while process.poll() is None and not job.status()["wanted"].startswith(f"tp{tp}-"):
                pass
            process.send_signal(signal.SIGSTOP)
            self.mount.ptc("layout", job.name, "set", "--pp", str(pp))
            self.assertEqual(job.wait()["layout"], f"tp{tp}-pp{pp}-dp1")
            process.send_signal(signal.SIGCONT)
            out, said = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, said)
            if f"tp{tp}-pp{pp}-dp1 in force" in out:
                break  # it was not done before it was stopped
        self.assertIn(f"tp{tp}-pp{pp}-dp1 in force", out)

    def test_edits_at_once_are_all_kept(self):
        job = self.import_model()
        program = [os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "layout", job.name, "set"]
        for turn in range(4):
            wanted = {"tp": 1 + turn % 2, "pp": 2 - turn % 2, "dp": 1 + turn // 2 % 2, "keep": 10 + turn, "vpp": 1}
            before = job.status()["revision"]
            processes = [subprocess.Popen([*program, f"--{key}", str(value)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                          text=True) for key, value in wanted.items()]
            said = [process.communicate(timeout=60)[1] for process in processes]
            layout = mount.read_json(job.file("layout.json"))
            self.assertEqual({key: layout.get(key) for key in wanted}, wanted, said)
            self.assertLessEqual(job.status()["revision"], before + len(wanted))
            self.assertNotIn("at the same time", "".join(said))
            job.wait()

    def test_edits_in_an_editor_replace_nothing_unseen(self):
        job, ptc = self.import_model(), os.path.join(mount.bin_dir(), "ptc")
        os.mkdir(self.temporary("tmp"))
        done = self.mount.ptc("layout", job.name, "edit", check=False, env={
            "EDITOR": f"{ptc} -C {self.mount.path} layout {job.name} set --keep 7; sed -i 's/\"tp\": 1/\"tp\": 2/'", "VISUAL": "",
            "TMPDIR": self.temporary("tmp")})
        self.assertEqual(done.returncode, 1)
        self.assertIn("while it was edited", done.stderr)
        kept, = os.listdir(self.temporary("tmp"))
        self.assertIn(f"{self.temporary('tmp')}/{kept} has yours", done.stderr)
        self.assertEqual(mount.read_json(f"{self.temporary('tmp')}/{kept}")["tp"], 2)
        layout = mount.read_json(job.file("layout.json"))
        self.assertEqual((layout["tp"], layout["keep"]), (1, 7))

    def test_a_layout_file_that_was_removed(self):
        job = self.import_model()
        job.set_layout(tp=2, pp=5, keep=3)
        job.wait()
        for take_away in (os.remove, lambda path: os.rename(path, job.file("other.json"))):
            take_away(job.file("layout.json"))
            done = self.mount.ptc("layout", job.name, check=False)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn(f"layout.json of {job.name} was removed; tp2-pp5-dp1 stays in force. 'ptc layout {job.name} set'", done.stderr)
            done = self.mount.ptc("layout", job.name, "set", "--tp", 1, "--wait")
            self.assertIn("tp1-pp5-dp1 in force", done.stdout)
            self.assertIn("layout.json was removed", done.stderr)
            layout = mount.read_json(job.file("layout.json"))
            self.assertEqual((layout["tp"], layout["pp"], layout["dp"]), (1, 5, 1))
            os.remove(job.file("layout.json"))
            done = self.mount.ptc("layout", job.name, "edit", "--wait", env={"EDITOR": "sed -i 's/\"tp\": 1/\"tp\": 2/'", "VISUAL": ""})
            self.assertIn("tp2-pp5-dp1 in force", done.stdout)

    def test_names_of_layouts(self):
        """A name says all but lists, and is read as a path before anybody had the layout; there is one."""
        job, name = self.import_model(), "tp1-pp1-dp4-shard2-fsdp"
        before = mount.digests(job.checkpoint("base", "layouts", name))
        self.assertTrue(before)
        done = self.mount.ptc("layout", job.name, "set", "--dp", 4, "--dp-shard", 2, "--optimizer", "fsdp", "--wait")
        self.assertIn(f"{name} in force", done.stdout)
        self.assertEqual(os.readlink(job.file("current")), f"checkpoints/base/layouts/{name}")
        self.assertEqual(os.listdir(job.checkpoint("base", "layouts")), [name])
        self.assertEqual(mount.digests(job.file("current") + "/"), before)
        for other in ("tp1-pp1-dp4-fsdp-shard2", "tp1-pp1-dp4-shard4-fsdp", "tp1-pp1-dp4-shard3-fsdp", "tp1-pp1-dp4-shard2",
                      "tp1-pp1-dp4-fsdp+00000000", "tp1-pp1-dp4-replicated", "tp1-pp1-dp4-order_tp_cp_ep_dp_pp"):
            self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", other)), other)
        plan = json.loads(self.mount.ptc("plan", job.name, "--layout", "tp2-pp1-dp2-zero1", "--json").stdout)
        self.assertEqual((plan["from"], plan["to"]), (name, "tp2-pp1-dp2-zero1"))
        bad = self.mount.ptc("plan", job.name, "--layout", "dp4-fsdp-shard2", check=False)
        self.assertIn(f"is it {name}?", bad.stderr)
        # Out, and in again under that layout.
        self.mount.ptc("export", job.name, self.temporary("ranks"), "--layout", name)
        for target, more in (("beside", ()), ("named", ("--layout", name))):
            if more:
                os.remove(self.temporary("ranks/layout.json"))
            self.mount.ptc("import", target, self.temporary("ranks"), *more)
            again = mount.Job(self.mount, target)
            self.assertEqual(again.wait()["layout"], name)
            self.assertEqual({key: value for key, value in mount.read_json(again.file("layout.json")).items() if key != "format"},
                             {"tp": 1, "pp": 1, "dp": 4, "optimizer": "fsdp", "dp_shard": 2})
            found = models.read_safetensors(again.rank_file(os.listdir(again.file("checkpoints"))[0], "tp1-pp1-dp1", 0))
            self.assertEqual(found, {t.name: t for t in models.Llama().tensors})

    def test_copies_are_no_more_open_than_what_was_copied(self):
        def open_to_all(top):
            return {name for where, _, names in os.walk(top) for name in names if os.stat(os.path.join(where, name)).st_mode & 0o077}
        source = self.temporary("model")
        models.Llama().write_hf(source)
        os.chmod(source + "/model.safetensors", 0o600)
        self.mount.ptc("import", "closed-file", source)
        self.assertEqual(open_to_all(self.mount.path + "/closed-file/checkpoints/base/hf"), {"config.json"})
        self.assertEqual(os.stat(self.mount.path + "/closed-file/checkpoints/base/.sources.json").st_mode & 0o777, 0o400)
        self.mount.ptc("import", "closed", source + "/model.safetensors")
        self.assertNotIn("model.safetensors", open_to_all(self.mount.path + "/closed/checkpoints/base/layouts/tp1-pp1-dp1/rank"))
        self.mount.ptc("export", "closed-file", self.temporary("out"))
        self.assertEqual(open_to_all(self.temporary("out")), {"config.json"})
        os.chmod(source + "/model.safetensors", 0o644)
        os.chmod(source, 0o700)
        self.mount.ptc("import", "closed-directory", source)
        self.assertEqual(open_to_all(self.mount.path + "/closed-directory/checkpoints/base/hf"), set())

    def test_rules_are_mended(self):
        """After the commit, by rules.json and a layout that says so; other layouts stay as they were."""
        job, tensors = self.import_model(), {t.name: t for t in models.Llama().tensors}
        refused = self.mount.ptc("layout", job.name, "set", "--tp", 2, "--rules", "rules.json", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("this job has no rules.json", refused.stderr)
        with open(job.file("rules.json"), "w", encoding="utf-8") as file:
            json.dump({"format": "ptc-rules/1", "extends": "llama", "rules": [{"names": ["layers.{layer}.mlp.up_proj.weight"]}]}, file)
        plan = json.loads(self.mount.ptc("plan", job.name, "--tp", 2, "--rules", "rules.json", "--json").stdout)
        self.assertRegex(plan["to"], "^tp2-pp1-dp1-rules_[0-9a-f]{8}$")
        self.mount.ptc("layout", job.name, "set", "--tp", 2, "--rules", "rules.json", "--wait")
        name = os.path.basename(os.readlink(job.file("current")))
        self.assertEqual(name, plan["to"])
        expected = {t.name: tensors[t.name] if ".up_proj." in t.name else t for t in models.Llama().rank_tensors(2, 1, 1, 0)}
        self.assertEqual(models.read_safetensors(job.file("current/rank/1/model.safetensors")), expected)
        self.assertEqual(models.read_safetensors(job.rank_file("base", "tp2-pp1-dp1", 1)),
                         {t.name: t for t in models.Llama().rank_tensors(2, 1, 1, 0)})
        checked = self.mount.ptc("rules", "check", job.name, "up_proj", "--layout", name)
        self.assertNotIn("axis", checked.stdout.split("up_proj", 1)[1])
        refused = self.mount.ptc("rules", "check", self.temporary("model") + "/", "--layout", name, check=False)
        self.assertIn("--rules FILE", refused.stderr)
        done = self.mount.ptc("layout", job.name, "set", "--rules", "none", "--wait")
        self.assertIn("tp2-pp1-dp1 in force", done.stdout)
        self.assertEqual(models.read_safetensors(job.rank_file("base", name, 1)), expected)

    def test_verify(self):
        job = self.import_model()
        for layout in ({"tp": 1}, {"tp": 4, "pp": 2}):
            job.set_layout(**layout)
            self.assertIn("good", self.mount.ptc("verify", job.name).stdout)
        report = json.loads(self.mount.ptc("verify", f"{job.name}/base", "--json").stdout)
        self.assertEqual((report["good"], report["tensors"]), (True, len(models.Llama().tensors)))

    def test_verify_while_somebody_removes_it(self):
        job = self.import_model()
        os.unlink(job.checkpoint("base", "model", "model", "norm", "weight.npy"))
        done = self.mount.ptc("verify", job.name, check=False)
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn("model.norm.weight: not checked: ", done.stdout)
        self.assertIn("is being removed", done.stdout)
        self.assertNotIn("BAD", done.stdout)

    def test_verify_finds_a_changed_byte(self):
        with mount.Mount() as other:
            models.Llama().write_hf(self.temporary("model"))
            other.ptc("import", "llama", self.temporary("model"))
            images = os.path.join(other.store, "images")
            path = max((os.path.join(images, name) for name in os.listdir(images)),
                       key=os.path.getsize)
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            with open(path, "r+b") as file:
                file.seek(os.path.getsize(path) - 100)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            done = other.ptc("verify", "llama", check=False)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertIn("BAD", done.stdout)
            self.assertIn("model.norm.weight", done.stdout)

    def test_rm(self):
        job = self.import_model()
        self.mount.ptc("import", job.name, self.temporary("model"), "--name", "second")
        self.mount.ptc("rm", f"{job.name}/base", "--yes")
        self.assertEqual(os.listdir(job.file("checkpoints")), ["second"])
        refused = self.mount.ptc("rm", job.name, "--yes", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn(f"holds 1 checkpoint; ptc rm --force {job.name} removes it", refused.stderr)
        self.mount.ptc("rm", job.name, "--yes", "--force")
        self.assertFalse(os.path.exists(job.path))

    def test_pin(self):
        job = self.import_model()
        directory = job.file("checkpoints", "base")
        self.mount.ptc("pin", f"{job.name}/base")
        self.assertEqual(os.getxattr(directory, "user.ptc.pin"), b"1")
        self.assertTrue(job.status()["checkpoints"][0]["pinned"])
        self.assertIn("current, pinned", self.mount.ptc("ls", job.name).stdout)
        refused = self.mount.ptc("rm", f"{job.name}/base", "--yes", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("pinned", refused.stderr)
        self.assertEqual(mount.error_of(os.unlink, directory + "/meta.json"), "EPERM")
        self.mount.ptc("pin", f"{job.name}/base", "--remove")
        self.assertEqual(mount.error_of(os.getxattr, directory, "user.ptc.pin"), "ENODATA")
        self.mount.ptc("rm", f"{job.name}/base", "--yes")

    def test_top(self):
        job = self.import_model()
        job.set_layout(tp=2)
        for width in (80, 40, 20):
            text = self.mount.ptc("top", "--once", env={"COLUMNS": str(width)}).stdout
            self.assertTrue(all(len(line) <= width for line in text.splitlines()), text)
        blocks = self.mount.ptc("top", "-n", 2, "-d", 0.1).stdout
        self.assertNotIn("\033", blocks)
        self.assertEqual(blocks.count("JOB "), 2)
        self.assertIn(job.name[:8], blocks)
        raw = self.mount.ptc("status", job.name, "--json").stdout
        self.assertEqual(raw, mount.read_text(job.file("status.json")))

    def test_long_names_and_many_ranks_fit_the_terminal(self):
        job = self.mount.job("j" * 200)
        models.Llama().write_hf(job.incoming("c" * 200) + "/rank/0")
        job.commit("c" * 200)
        job.set_layout(tp=2, pp=4, dp=64)
        self.assertEqual(mount.error_of(lambda: job.set_layout(tp=3)), "EINVAL")
        ugly = self.mount.job("\033[31m\nred")
        for width in (80, 40):
            for command in (("status",), ("status", job.name), ("plan", job.name), ("top", "--once"),
                            ("plan", job.name, "--tp", 1, "--dp", 512), ("ls",), ("ls", job.name)):
                text = self.mount.ptc(*command, env={"COLUMNS": str(width)}).stdout
                self.assertNotIn("\033", text)
                for line in text.splitlines():
                    self.assertLessEqual(len(line), width, f"{command} {text}")
        self.assertIn("tp2-pp4-dp64 (revision 2)", self.mount.ptc("status", job.name).stdout)
        os.rmdir(ugly.path)

    def test_plan_svg(self):
        job = self.import_model()
        job.set_layout(tp=2, pp=2)
        tree = xml.etree.ElementTree.parse(job.file("plan.svg"))
        text = "".join(tree.getroot().itertext())
        self.assertIn("tp1-pp1-dp1 → tp2-pp2-dp1", text)
        self.assertIn("rank 0 → rank 3", text)

    def test_finding_the_mount(self):
        job = self.import_model()
        program = shutil.which("ptc", path=self.mount.bin)
        environment = {**os.environ, "PTC_MOUNT": self.mount.path}

        def run(*arguments, cwd="/", env=None):
            return mount.subprocess.run([program, *arguments], cwd=cwd, text=True, check=False,
                                        capture_output=True, env=env or dict(os.environ))

        self.assertEqual(run("ls", env=environment).returncode, 0)
        self.assertEqual(run("ls", cwd=job.file("checkpoints")).returncode, 0)
        self.assertIn("idle", run("status", ".", cwd=job.path).stdout)
        self.assertIn("idle", run("status", job.path).stdout)
        for where, what in ((job.path, "checkpoints/base"), (job.path, "current"), (job.file("checkpoints"), "base"),
                            (os.path.dirname(self.mount.path), "mnt/" + job.name)):
            done = run("verify", what, cwd=where)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(job.name + "/base", done.stdout + done.stderr)
        self.assertIn("no job 'checkpoints'", run("verify", "checkpoints/none", cwd=job.path).stderr)
        lost = run("-C", "/", "ls")
        self.assertEqual(lost.returncode, 1)
        self.assertIn(".ptc/version", lost.stderr)
        half = self.mount.job("half_removed")
        os.remove(half.file("status.json"))  # as by rm -r that was ended
        told = self.mount.ptc("status", half.name, check=False)
        self.assertEqual(told.returncode, 1)
        self.assertIn("is half removed: rm -r", told.stderr)
        near = self.mount.ptc("status", job.name + "x", check=False)
        self.assertIn(f"is it '{job.name}'?", near.stderr)

    def test_a_killed_daemon_is_said(self):
        with mount.Mount() as other:
            job = other.job("job")
            os.listdir(job.path)  # the kernel has it in its caches
            other.process.kill()
            other.process.wait()
            done = other.ptc("status", check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn("is gone; unmount it", done.stderr)
            other.start()  # takes the dead mount away
            self.assertIn("job", other.ptc("status").stdout)

    def test_usage(self):
        for arguments in ((), ("nope",), ("status", "--nope"), ("layout", "x", "set"),
                          ("export", "a", "b", "--hf", "--model")):
            self.assertEqual(self.mount.ptc(*arguments, check=False).returncode, 2, arguments)
        self.assertIn("Examples", self.mount.ptc("--help").stdout)
        self.assertRegex(self.mount.ptc("--version").stdout, r"^ptc \d+\.\d+")


if __name__ == "__main__":
    mount.main()
