"""SIGKILL in the midst of changes of a data set; after a start it is as it was before the change, or after it.

PTC_DATA_SET_POINTS=12    how many points, spread over all (or "all")
PTC_KILL_ONLY=117         one point
"""
import functools
import json
import os
import shutil
import tempfile
import time

import points
from story import mount
from test_dataset import write_shards

SHARDS = tempfile.mkdtemp(prefix="ptcfs-shards-") + "/shards"
EXPECTED = []  # what is shown after so many steps


class DataStory:
    """What befalls a data set of 40 samples, in steps; each may be repeated."""

    STEPS = ("make", "source", "order_4", "consume_8", "dp_1", "consume_12", "order_6", "consume_24", "consume_26",
             "order_5", "consume_34", "dp_5")

    def __init__(self, daemon):
        self.mount = daemon
        self.job = mount.Job(daemon, "job")
        self.other = mount.Job(daemon, "other")
        self.done = []

    def run(self):
        for step in self.STEPS[len(self.done):]:
            verb, _, what = step.partition("_")
            getattr(self, verb)(*[int(what)] if what else [])
            shown = self.shown()
            self.done.append(step)
            if len(EXPECTED) < len(self.done):
                EXPECTED.append(shown)
            assert shown == EXPECTED[len(self.done) - 1], f"{step}: {shown}"

    def at(self, name):
        return self.job.file("dataset", name)

    def save(self, name, text):
        with open(self.at(name), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def make(self):
        os.makedirs(self.job.path, exist_ok=True)
        self.dp(2)

    def source(self):
        self.save("source.json", json.dumps({"shards": [SHARDS]}))

    def order(self, batch):
        self.save("order.json", json.dumps({"batch": batch, "seed": 5, "round": "down"}))

    def consume(self, count):
        self.save("consumed", str(count))

    def dp(self, ranks):
        if mount.read_json(self.job.file("layout.json"))["dp"] != ranks:
            self.job.save_layout(dp=ranks)

    def settled(self):
        status = mount.read_json(self.at("status.json"))
        dp = mount.read_json(self.job.file("layout.json"))["dp"]
        return status["state"] in ("no source.json", "no order.json", "ready") and status.get("dp", dp) == dp

    def shown(self):
        """All that tells of the run, and a digest of each file that it reads; None: there is no job."""
        if not os.path.isdir(self.job.path):
            return None
        dp = self.job.wait()["layout"].rsplit("dp", 1)[1]
        deadline = time.monotonic() + mount.SETTLE_SECONDS
        while not self.settled():
            assert time.monotonic() < deadline, mount.read_text(self.at("status.json"))
            time.sleep(0.01)
        texts = [mount.read_text(self.at(name)) if os.path.exists(self.at(name)) else None
                 for name in ("source.json", "order.json", "consumed", "plan.json")]
        return dp, texts, mount.digests(self.at("head")) if os.path.islink(self.at("head")) else None

    def check(self):
        shown, steps = self.shown(), len(self.done)
        before = EXPECTED[steps - 1] if steps else None
        if steps == 0 and shown is not None:  # make is two steps
            shown, before = shown[1:], None
            assert shown == EXPECTED[0][1:], shown
            return
        assert shown in (before, EXPECTED[min(steps, len(EXPECTED) - 1)]), f"after {self.done}: {shown}"

    def clear(self):
        shutil.rmtree(self.job.path)
        for directory in ("images", "jobs"):
            left = os.listdir(os.path.join(self.mount.store, directory))
            assert not left, f"left behind in {directory}: {left}"


def main():
    only = os.environ.get("PTC_KILL_ONLY")
    write_shards(SHARDS)
    try:
        total = points.count_points(DataStory)
        number = os.environ.get("PTC_DATA_SET_POINTS", "12")
        points.survive(functools.partial(points.kill, teller=DataStory),
                       [int(only)] if only else points.spread(total, number))
    finally:
        shutil.rmtree(os.path.dirname(SHARDS))


if __name__ == "__main__":
    main()
