"""Copies of what lies in the memory of devices: they are in the memory of hosts, and need no room in devices."""
import unittest

import cases
import models
from cluster import mount


class Medium(models.Llama):
    """Of some 31 MB: more than half of the room in a device."""
    vocab = 120_000
    config = {**models.Llama.config, "vocab_size": vocab}


class DeviceCopies(cases.TestCase):
    NODES = 2
    OPTIONS = ("--gpu", "host:64M")

    def newest_in_devices(self):
        *older, newest = self.job(0).status()["checkpoints"]
        return sorted(one["memory"] for one in newest.get("devices", [])) if not any("devices" in one for one in older) else None

    def wait_in_devices(self, memories):
        deadline = mount.time.monotonic() + 30
        while self.newest_in_devices() != memories:
            self.assertLess(mount.time.monotonic(), deadline, self.job(0).status())
            mount.time.sleep(0.05)

    def test_a_commit_needs_no_room_in_devices(self):
        names = [node.name for node in self.nodes.nodes]
        memories = [f"{name}/cuda:0" for name in names]
        self.commit(0, Medium(), dp=2, memory="device", replicas=1, devices=[f"{name}:0" for name in names])
        self.wait_in_devices(memories)
        for seed in (2, 3):
            name = f"next{seed}"
            Medium(seed=seed).write_hf(self.job(0).incoming(name) + "/rank/0")
            self.job(0).commit(name)
            self.wait_in_devices(memories)
            self.nodes.wait_settled(self.name)
            self.assertNotIn("missing_copy_bytes", self.job(0).status()["checkpoints"][-1])

    def test_daemons_that_end_together_lose_nothing(self):
        names = [node.name for node in self.nodes.nodes]
        model = models.Llama()
        self.commit(0, model, dp=2, memory="device", replicas=1, devices=[f"{name}:0" for name in names])
        self.wait_in_devices([f"{name}/cuda:0" for name in names])
        for node in (0, 1):
            self.nodes.stop(node)
        for node in (0, 1):
            self.nodes.start(node)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 1, 2)
        self.wait_in_devices([f"{name}/cuda:0" for name in names])


if __name__ == "__main__":
    unittest.main()
