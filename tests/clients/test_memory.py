"""A layout that would take too much memory is not even begun; what is computed for one who looks takes none when he has gone.

PTC_RANKS=30000 looks at so many (4000 otherwise), PTC_NAMES=2000000 lists so many (120000).
"""
import os
import subprocess
import time

import models
import mount

RANKS = int(os.environ.get("PTC_RANKS", "4000"))
CAN_FORGET = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 18)  # the kernel, names, when it is asked to
NAMES = int(os.environ.get("PTC_NAMES", "120000"))


class Memory(mount.TestCase):
    def used(self):
        """Bytes of the daemon's own memory; not of the store."""
        for line in mount.read_text(f"/proc/{self.mount.process.pid}/status").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        return 0

    def nodes(self):
        for line in mount.read_text(self.mount.path + "/.ptc/metrics").splitlines():
            if line.startswith("ptcfs_nodes "):
                return int(line.split()[1])
        return 0

    def wait_until_it_is_back(self, before, within=64 << 20):
        deadline = time.monotonic() + 180
        while self.used() > before + within and time.monotonic() < deadline:
            time.sleep(1)
        self.assertLessEqual(self.used() - before, within)

    def test_it_comes_back_where_nobody_uses_the_mount_any_more(self):
        """More names than are kept; nothing but /proc is looked at meanwhile."""
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        ranks = job.checkpoint("base", "layouts", "tp1-pp1-dp60000", "rank")
        most = before
        for i, name in enumerate(os.listdir(ranks)):
            os.listdir(f"{ranks}/{name}/tensors")
            if i % 100 == 0:  # where this takes long, much of it is back before the end
                most = max(most, self.used())
        print(f"{(most - before) >> 20} MiB at most, {(self.used() - before) >> 20} at the end")
        self.assertGreater(most, before + (32 << 20))
        self.wait_until_it_is_back(before, max(32 << 20, (most - before) // 2))

    def test_it_comes_back_after_all_ranks_of_a_large_layout(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        ranks = job.checkpoint("base", "layouts", f"tp1-pp1-dp{RANKS}", "rank")
        names = os.listdir(ranks)
        self.assertEqual(len(names), RANKS)
        for name in names:
            self.assertIn("model.safetensors", os.listdir(f"{ranks}/{name}"))
            self.assertTrue(os.listdir(f"{ranks}/{name}/tensors"))
        print(f"{RANKS} ranks: {(self.used() - before) >> 20} MiB at first")
        # Of 30,000 no more than 64 MiB may stay: of fewer, as much less, but for what any use of the mount takes.
        self.wait_until_it_is_back(before, min(64 << 20, (8 << 20) + (64 << 20) * RANKS // 30_000))
        if CAN_FORGET:  # files, too, that nobody has opened: once a minute, while nobody uses the mount; who asks does
            time.sleep(100)
            if self.nodes() > 10_000:  # it was not idle just then
                time.sleep(150)
            self.assertLessEqual(self.nodes(), 10_000)

    def test_it_comes_back_after_very_many_names(self):
        """Which the kernel still knows: it is asked to forget them."""
        if not CAN_FORGET:
            self.skipTest("this kernel cannot be asked to forget names")
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        ranks = job.checkpoint("base", "layouts", f"tp1-pp1-dp{NAMES}", "rank")
        done = subprocess.run(["ls", "-lU", ranks], capture_output=True, text=True, check=True)
        self.assertEqual(len(done.stdout.splitlines()), NAMES + 1)
        print(f"{NAMES} names: {(self.used() - before) >> 20} MiB and {self.nodes()} nodes at first")
        # Fewer than 100,000 are let be: all that came after the kernel was asked while they were listed, say.
        deadline = time.monotonic() + 180
        while self.nodes() >= 100_000 and time.monotonic() < deadline:
            time.sleep(1)
        self.assertLess(self.nodes(), 100_000)
        self.wait_until_it_is_back(before)
        self.assertTrue(os.path.isdir(f"{ranks}/{NAMES - 1}"))

    def test_what_cannot_be_computed_is_refused_before_it_is(self):
        job = self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = self.used()
        for wanted, reason in (({"pp": 64}, "layers"), ({"dp": 1 << 20, "optimizer": "fsdp"}, "at most")):
            self.assertEqual(mount.error_of(lambda wanted=wanted: job.save_layout(**wanted)), "EINVAL")
            self.assertIn(reason, job.error())
        self.assertEqual(mount.error_of(os.stat, job.checkpoint("base", "layouts/tp1-pp64-dp1")), "ENOENT")
        self.assertLess(self.used() - before, 64 << 20)


if __name__ == "__main__":
    mount.main()
