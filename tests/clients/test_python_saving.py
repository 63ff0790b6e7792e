"""tools/python: what becomes of saves that something comes between, on a real mount."""
import os
import sys

import mount
import ranks

sys.path.insert(0, ranks.PACKAGE)
torch = mount.require("torch")
import ptc  # noqa: E402  pylint: disable=wrong-import-position


class Saving(ranks.TestCase):
    def test_the_group_is_destroyed_meanwhile(self):
        """As at the end of a script: no rank commits alone, and all are told. Afterwards a new group saves."""
        job = ptc.Job.create(self.mount.path + "/destroyed", dp=2)
        self.run_ranks(2, """
import threading
from ptc import group
job, go_on = ptc.Job(path), threading.Event()
group.in_background(lambda: go_on.wait(60))
future = job.save({"w": torch.ones(2), "who": rank}, "a", wait=False)
dist.destroy_process_group()
go_on.set()
try:
    raise SystemExit(future.result(60))
except ptc.PtcError as error:
    assert "destroyed before" in str(error), error
assert job.checkpoints() == []
dist.init_process_group("gloo", init_method="file://" + meet + ".again", rank=rank, world_size=size)
job.save({"w": torch.ones(2)}, "a")
""", job.path)
        self.assertEqual(job.checkpoints(), ["a"])

    def test_a_rank_that_has_ended(self):
        job = ptc.Job.create(self.mount.path + "/ended", dp=2)
        self.run_ranks(2, """
import time
job = ptc.Job(path)
job.save({"w": torch.ones(2)}, "a")
if rank == 1:
    time.sleep(0.2)
    os._exit(0)
try:
    raise SystemExit(job.save({"w": torch.ones(2)}, "b", wait=False).result(60))
except ptc.PtcError as error:
    assert "rank 0 has waited for the others in vain" in str(error) and "ank 1" in str(error), error
os._exit(0)
""", job.path)
        self.assertEqual(job.checkpoints(), ["a"])


if __name__ == "__main__":
    mount.main()
