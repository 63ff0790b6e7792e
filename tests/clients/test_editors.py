"""Every way in which editors and shells save layout.json starts a reshard."""
import json
import os
import shutil
import subprocess

import models
import mount


class Editors(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()
        models.Gpt2().write_hf(self.job.incoming("base") + "/rank/0")
        self.job.commit("base")
        self.path = self.job.file("layout.json")
        self.job.set_layout(tp=1)
        self.revision = self.job.status()["revision"]

    def edited(self, tp):
        text = mount.read_text(self.path)
        layout = json.loads(text)
        layout["tp"] = tp
        return json.dumps(layout, indent=1) + "\n"

    def check_in_force(self, tp, text=None):
        status = self.job.wait()
        self.assertEqual(status["layout"], f"tp{tp}-pp1-dp1", status)
        self.assertEqual(status["revision"], self.revision + 1, status)
        self.assertEqual(json.loads(mount.read_text(self.path))["tp"], tp)
        if text is not None:
            self.assertEqual(mount.read_text(self.path), text)
        self.assertEqual(os.readlink(self.job.file("current")),
                         f"checkpoints/base/layouts/tp{tp}-pp1-dp1")

    def shell(self, command, **variables):
        done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True,
                              cwd=self.job.path, timeout=60, env={**os.environ, **variables})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_truncate_and_write_as_nano(self):
        text = self.edited(2)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)
        self.check_in_force(2, text)

    def test_write_without_truncation_then_truncate(self):
        text = self.edited(2)
        fd = os.open(self.path, os.O_WRONLY)
        os.pwrite(fd, text.encode(), 0)
        os.ftruncate(fd, len(text.encode()))
        os.fsync(fd)
        os.close(fd)
        self.check_in_force(2, text)

    def test_new_file_renamed_over_it(self):
        text = self.edited(4)
        with open(self.path + ".new", "w", encoding="utf-8") as file:
            file.write(text)
        os.rename(self.path + ".new", self.path)
        self.check_in_force(4, text)
        self.assertFalse(os.path.exists(self.path + ".new"))

    def test_backup_then_write_as_vim(self):
        # backupcopy=no: the old file becomes the backup, the new one is written under its name.
        text = self.edited(2)
        with open(self.job.file("4913"), "w", encoding="utf-8"):
            pass
        os.unlink(self.job.file("4913"))
        os.rename(self.path, self.path + "~")
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, text.encode())
        os.fsync(fd)
        os.close(fd)
        os.unlink(self.path + "~")
        self.check_in_force(2, text)

    def test_swap_file_beside_it(self):
        swap = self.job.file(".layout.json.swp")
        with open(swap, "wb") as file:
            file.write(b"b0VIM 9.0")
        text = self.edited(2)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)
        os.unlink(swap)
        self.check_in_force(2, text)

    def test_vim(self):
        vim = shutil.which("vim.tiny") or shutil.which("vim")
        if not vim:
            self.skipTest("vim is not installed")
        self.shell(f"{vim} -u NONE -es -c '%s/\"tp\": 1/\"tp\": 2/' -c wq layout.json")
        self.check_in_force(2)

    def test_vim_with_renaming_backup(self):
        vim = shutil.which("vim.tiny") or shutil.which("vim")
        if not vim:
            self.skipTest("vim is not installed")
        self.shell(f"{vim} -u NONE -es -c 'set backup backupcopy=no' "
                   "-c '%s/\"tp\": 1/\"tp\": 4/' -c wq layout.json")
        self.check_in_force(4)

    def test_sed(self):
        self.shell("sed -i 's/\"tp\": 1/\"tp\": 2/' layout.json")
        self.check_in_force(2)

    def test_ed(self):
        if not shutil.which("ed"):
            self.skipTest("ed is not installed")
        self.shell("printf '%s\\n' ',s/\"tp\": 1/\"tp\": 2/' w q | ed -s layout.json")
        self.check_in_force(2)

    def test_echo(self):
        self.shell("echo '{\"tp\":2,\"pp\":1,\"dp\":1}' > layout.json")
        self.check_in_force(2, '{"tp":2,"pp":1,"dp":1}\n')

    def test_cp_and_mv_over_it(self):
        other = self.temporary("layout.json")
        with open(other, "w", encoding="utf-8") as file:
            file.write(self.edited(2))
        self.shell('cp "$OTHER" layout.json', OTHER=other)
        self.check_in_force(2)
        self.revision += 1
        with open(other, "w", encoding="utf-8") as file:
            file.write(self.edited(4))
        self.shell('mv "$OTHER" layout.json', OTHER=other)
        self.check_in_force(4)

    def test_tee_and_append(self):
        self.shell("echo '{\"tp\":2,\"pp\":1,\"dp\":1}' | tee layout.json > /dev/null")
        self.check_in_force(2)
        self.revision += 1
        self.shell("echo >> layout.json")  # a new text of the same layout
        self.assertEqual(self.job.wait()["layout"], "tp2-pp1-dp1")

    def test_the_same_content_is_no_edit(self):
        text = mount.read_text(self.path)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)
        self.assertEqual(self.job.wait()["revision"], self.revision)

    def test_opening_for_writing_without_writing_is_no_edit(self):
        os.close(os.open(self.path, os.O_RDWR))
        self.assertEqual(self.job.wait()["revision"], self.revision)

    def test_a_newer_edit_wins(self):
        for tp in (2, 4, 1, 2):
            with open(self.path, "w", encoding="utf-8") as file:
                json.dump({"tp": tp, "pp": 1, "dp": 1}, file)
        status = self.job.wait()
        self.assertEqual((status["layout"], status["revision"]), ("tp2-pp1-dp1", self.revision + 4))


if __name__ == "__main__":
    mount.main()
