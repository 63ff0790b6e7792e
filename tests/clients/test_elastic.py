"""tools/examples: training runs whose layout changes under way, compared with one that is never interrupted."""
import os
import sys

import mount

HERE = os.path.dirname(os.path.abspath(__file__))
torch = mount.require("torch")
for folder in ("python", "examples"):
    sys.path.insert(0, os.path.join(HERE, "../../tools", folder))
import proof  # noqa: E402  pylint: disable=wrong-import-position


class Elastic(mount.TestCase):
    def tell(self, name):
        samples = self.temporary("samples")
        proof.write_samples(samples)
        self.assertTrue(proof.tell(name, self.mount.path, samples, self.scratch, self.kill_daemon))
        picture = mount.read_text(self.temporary(name + ".svg"))
        self.assertIn("killed", picture)
        kept = os.environ.get("PTC_PICTURES")
        if kept:
            with open(os.path.join(kept, name + ".svg"), "w", encoding="utf-8") as file:
                file.write(picture)

    def kill_daemon(self):
        self.mount.stop(kill=True)
        self.mount.start()

    def test_the_daemon_is_killed(self):
        """While pp2-dp2 runs; what was committed is there again, and the loss is the same to the last bit."""
        self.tell("daemon")

    def test_replicas_and_stages_to_the_last_bit(self):
        """dp2, dp4 (a process killed), pp2-dp2 with half the batch, pp4."""
        self.tell("replicas-and-stages")

    def test_tensors(self):
        """tp2-dp2, dp4, tp4 with half the batch (a process killed), pp2-tp2."""
        self.tell("tensors")

    def test_fsdp(self):
        """FSDP2 on four, two (a process killed), three ranks with half the batch."""
        self.tell("fsdp")


if __name__ == "__main__":
    mount.main()
