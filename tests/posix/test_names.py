"""Names that are long, no text, or odd: kept in incoming/, listed, and either committed or refused with a reason."""
import json
import os

from sides import mount  # which makes the modules beside it known
import models  # pylint: disable=wrong-import-order

ODD = [b"a\nb", b"tab\there", b"\xff\xfe", b"\xc3(", b"caf\xc3\xa9", b"\xf0\x9f\x98\x80", b"-rf", b"~", b" ", b"*",
       b"quote'\"", b"back\\slash", b"%2e%2e", b".hidden", b"...", b"\x01\x7f", b"n" * 255, b"\xe2\x82" * 127]


class Names(mount.TestCase):
    def test_are_kept(self):
        incoming = os.fsencode(self.new_job().incoming("d"))
        os.mkdir(incoming)
        for name in ODD:
            with open(os.path.join(incoming, name), "wb") as file:
                file.write(name)
        self.assertEqual(sorted(os.listdir(incoming)), sorted(ODD))
        for name in ODD:
            os.rename(os.path.join(incoming, name), os.path.join(incoming, b"x"))
            os.rename(os.path.join(incoming, b"x"), os.path.join(incoming, name))
            with open(os.path.join(incoming, name), "rb") as file:
                self.assertEqual(file.read(), name)

    def test_of_other_files_are_committed_or_refused(self):
        job = self.new_job()
        for number, name in enumerate(ODD):
            with self.subTest(name=name):
                self.commit_with(job, f"c{number}", name)

    def commit_with(self, job, checkpoint, name):
        models.Llama().write_hf(job.incoming(checkpoint) + "/rank/0")
        odd = os.path.join(os.fsencode(job.incoming(checkpoint)), b"rank/0", name)
        with open(odd, "wb") as file:
            file.write(b"kept")
        error = mount.error_of(job.commit, checkpoint)
        # Whatever became of it: what says so is text that can be read.
        json.loads(mount.read_text(job.file("status.json")))
        if error:
            self.assertEqual(error, "ECANCELED")
            self.assertTrue(os.path.exists(odd))
            self.assertNotEqual(job.commit_error(checkpoint), "")
        else:
            layout = os.path.realpath(job.file("current"))
            with open(os.path.join(os.fsencode(layout), b"rank/0", name), "rb") as file:
                self.assertEqual(file.read(), b"kept")
            json.loads(mount.read_text(job.checkpoint(checkpoint, "meta.json")))

    def test_of_checkpoints_and_jobs(self):
        """A name that is no text is refused, and nothing changes."""
        for name in (b"\xff\xfe", b"a\nb", b"\x01"):
            path = os.path.join(os.fsencode(self.mount.path), name)
            if not mount.error_of(os.mkdir, path):
                os.rmdir(path)
        job = self.new_job()
        for name in (b"\xff\xfe", b"a\nb", b"n" * 255, b"caf\xc3\xa9"):
            source = os.path.join(os.fsencode(job.path), b"incoming", name)
            models.Llama().write_hf(os.fsdecode(source) + "/rank/0")
            target = os.path.join(os.fsencode(job.path), b"checkpoints", name)
            error = mount.error_of(os.rename, source, target)
            self.assertIn(error, ("", "ECANCELED"), name)
            self.assertTrue(os.path.isdir(source if error else target))
            json.loads(mount.read_text(job.file("status.json")))
            json.loads(mount.read_text(self.mount.path + "/.ptc/stats"))


if __name__ == "__main__":
    mount.main()
