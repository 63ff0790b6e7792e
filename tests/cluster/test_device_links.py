"""Layouts in the memory of devices, on two nodes: from device to device over a link, and without one."""
import os
import subprocess
import tempfile
import unittest

import cases
import models


class DeviceLinks(cases.TestCase):
    NODES = 2
    OPTIONS = ("--gpu", "host:256M")
    TLS = False
    LINKS = "bytes go between devices of two nodes over host memory"

    def log(self, node):
        with open(self.nodes.nodes[node].log, encoding="utf-8") as file:
            return file.read()

    def test_a_layout_moves_from_device_to_device(self):
        model = models.Llama()
        names = [node.name for node in self.nodes.nodes]
        self.commit(0, model, tp=2, memory="device", devices=[f"{name}:0" for name in names])
        self.expect_everywhere(model, 2, 1)
        for node in (1, 0):  # what the other one has comes from its device
            self.job(0).set_layout(tp=1, memory="device", devices=[f"{names[node]}:0"])
            self.nodes.wait_settled(self.name)
            self.expect_everywhere(model, 1, 1)
            self.assertEqual(self.LINKS in self.log(node), self.links_are_used())

    def links_are_used(self):
        return "--transport" not in self.OPTIONS


class WithoutLinks(DeviceLinks):
    OPTIONS = (*DeviceLinks.OPTIONS, "--transport", "tcp")


class Refused(unittest.TestCase):
    def test_nccl_that_cannot_be_is_said(self):
        with tempfile.TemporaryDirectory() as top:
            os.mkdir(top + "/mnt")
            for gpu in ("off", "host:64M", "auto"):
                ptcfs = os.path.join(os.environ["PTC_BIN_DIR"], "ptcfs")
                done = subprocess.run([ptcfs, "--store", top + "/store", "--node", "w1", "--etcd", "http://127.0.0.1:9", "--gpu", gpu,
                                       "--transport", "nccl", top + "/mnt"], capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("--transport nccl: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
