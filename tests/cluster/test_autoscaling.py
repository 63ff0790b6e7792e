"""ptc autoscale on two nodes, of which one dies and returns."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from cluster import mount  # (it finds tests/clients)
import models
from cases import BigLlama, TestCase

SAMPLES, BATCH, PATIENCE = 600, 4, 90
TRAINER = os.path.join(os.path.dirname(os.path.abspath(mount.__file__)), "small_trainer.py")


class Autoscaling(TestCase):
    NODES = 2

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory(prefix="ptcfs-autoscaling-")
        self.addCleanup(directory.cleanup)
        self.at, self.running = directory.name, None
        self.addCleanup(self.end)
        os.mkdir(self.path("data"))
        self.write("data/x.jsonl", "".join(json.dumps({"id": number}) + "\n" for number in range(SAMPLES)))
        self.write("profiles.csv", f"model,batch,tp,pp,dp,iteration_s\nm,{BATCH},1,1,1,0.2\nm,{BATCH},1,1,2,0.11\n")

    def path(self, name):
        return os.path.join(self.at, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def end(self):
        if self.running is not None:
            self.running.kill()
            self.running.wait()
        for line in self.log():
            try:
                os.killpg(line["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass

    def log(self):
        if not os.path.exists(self.path("log")):
            return []
        with open(self.path("log"), encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("}\n")]

    def starts(self):
        return [line["devices"] for line in self.log() if line["what"] == "start"]

    def said(self):
        return mount.read_text(self.path("said"))

    def until(self, is_so):
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), deadline, self.said())
            time.sleep(0.05)

    def list_job(self, nodes):
        job = self.job(0)
        for file, content in (("source", {"shards": self.path("data")}), ("order", {"batch": BATCH, "seed": 1})):
            with open(job.file(f"dataset/{file}.json"), "w", encoding="utf-8") as out:
                json.dump(content, out)
        self.write("jobs.json", json.dumps({
            "cluster": {"nodes": nodes}, "profiles": "profiles.csv",
            "jobs": [{"name": self.name, "model": "m", "samples": SAMPLES,
                      "run": {"command": [sys.executable, "-B", TRAINER, self.path("log"), "0.1"], "stops_within": 20}}]}))

    def begin(self, *options):
        with open(self.path("said"), "wb") as out:
            self.running = subprocess.Popen(
                [os.path.join(mount.bin_dir(), "ptc"), "-C", self.nodes.nodes[0].path, "autoscale", self.path("jobs.json"),
                 "--logs", self.path("logs"), *options], stdout=out, stderr=out)

    def test_what_a_change_costs_is_of_ptcfs_own_plan(self):
        """What the busiest node gets or copies, and a start."""
        self.commit(0, BigLlama(), tp=1, pp=1, dp=1)
        self.write("profiles.csv", f"model,batch,tp,pp,dp,iteration_s\nm,{BATCH},2,1,1,0.05\n")
        self.list_job({"w0": 1, "w1": 1})
        ptc = self.nodes.nodes[0].ptc
        plan = json.loads(ptc("plan", self.name, "--tp", "2", "--json").stdout)
        dry = json.loads(ptc("autoscale", self.path("jobs.json"), "--dry-run", "--json").stdout)
        pairs = [pair["bytes"] for pair in plan["pairs"] if pair["source"] != pair["target"]]
        local = [pair["bytes"] for pair in plan["pairs"] if pair["source"] == pair["target"]]
        self.assertEqual(sum(pairs), plan["bytes"]["moved"])
        price = 15 + max(max(pairs, default=0) / 1e9, max(local, default=0) / 4e9)
        self.assertGreater(price, 15.003)
        self.assertAlmostEqual(dry["jobs"][0]["price_s"], price, 6)
        self.begin()
        self.until(lambda: self.starts() == ["w0:0,w1:0"])
        self.assertIn("which costs 15 s", self.said())
        record = json.loads(mount.read_text(self.job(0).file("autoscale.json")))
        self.assertAlmostEqual(record["decision"]["price_s"], price, 6)

    def test_a_node_dies_and_returns(self):
        self.commit(0, models.Llama(), tp=1, pp=1, dp=1, replicas=1)
        self.list_job({"w0": 1, "w1": 1})
        self.begin("--price", "0.5", "--until-done")
        self.until(lambda: self.starts() == ["w0:0,w1:0"])
        self.nodes.kill(1)
        self.until(lambda: self.starts() == ["w0:0,w1:0", "w0:0"])
        self.assertIn("w1 is not up in", self.said())
        self.nodes.start(1)
        self.until(lambda: len(self.starts()) == 3)
        self.assertIn("w1 is there again", self.said())
        self.until(lambda: self.running.poll() is not None)
        self.assertEqual(self.running.returncode, 0, self.said())
        self.assertEqual(self.starts()[2], "w0:0,w1:0")
        at = 0
        for line in self.log():
            if line["what"] == "start":
                self.assertEqual((line["consumed"], line["plan"]["dp"]), (at, line["devices"].count(":")))
            at = line["consumed"]
        self.assertEqual(at, SAMPLES)


if __name__ == "__main__":
    unittest.main(verbosity=2)
