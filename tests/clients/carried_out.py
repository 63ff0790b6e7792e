"""Jobs of a real mount that "ptc autoscale" or "ptc spase run" decides for, and what a story of them must be like."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import models
import mount

SAMPLES, BATCH = 400, 4
TRAINER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "small_trainer.py")
PATIENCE = 60  # seconds


def profiles():
    """More GPUs are faster, and always with batch 4: what changes are dp, tp and the devices."""
    rows = [f"m,{BATCH},1,1,1,0.2", f"m,{BATCH},1,1,2,0.11", f"m,{BATCH},2,1,2,0.06"]
    return "model,batch,tp,pp,dp,iteration_s\n" + "".join(row + "\n" for row in rows)


class CarriedOut(mount.TestCase):
    """Jobs, their file, and a program that decides for them."""
    COMMAND, OPTIONS = (), ()

    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory(prefix="ptcfs-autoscale-")
        self.addCleanup(directory.cleanup)
        self.at, self.running, self.names = directory.name, None, []
        self.addCleanup(self.end)
        os.mkdir(self.path("data"))
        self.write("data/x.jsonl", "".join(json.dumps({"id": number}) + "\n" for number in range(SAMPLES)))
        self.write("profiles.csv", profiles())

    def path(self, name):
        return os.path.join(self.at, name)

    def write(self, name, text):
        """Whole or not at all."""
        with open(self.path(name + ".new"), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(self.path(name + ".new"), self.path(name))

    def prepare(self, name):
        job = self.mount.job(f"{self._testMethodName.replace('_', '-')[5:40]}-{name}")
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        for file, content in (("source", {"shards": self.path("data")}), ("order", {"batch": BATCH, "seed": 1})):
            with open(job.file(f"dataset/{file}.json"), "w", encoding="utf-8") as out:
                json.dump(content, out)
        self.wait_for(lambda: os.path.lexists(job.file("dataset/head")))
        return job

    def list_jobs(self, *jobs, gpus=4, nodes=None):
        """`jobs`: (job, what its trainer is told, more of "run")."""
        listed = [{"name": os.path.basename(job.path), "model": "m", "samples": SAMPLES, "batch": BATCH,
                   "run": {"command": [sys.executable, "-B", TRAINER, self.path("log"), *words], **more}}
                  for job, words, more in jobs]
        self.names = [one["name"] for one in listed]
        self.write("jobs.json", json.dumps({"cluster": {"nodes": nodes or {"localhost": gpus}}, "profiles": "profiles.csv",
                                            "jobs": listed}))

    def begin(self, *options):
        with open(self.path("said"), "ab") as out:
            self.running = subprocess.Popen(
                [os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, *self.COMMAND, self.path("jobs.json"),
                 "--logs", self.path("logs"), *self.OPTIONS, *options], stdout=out, stderr=out, cwd=self.at)

    def end(self):
        """It, and what it has started."""
        if self.running is not None:
            self.running.kill()
            self.running.wait()
        for name in self.names:
            record = self.record(name)
            if record.get("pid"):
                try:
                    os.killpg(record["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def record(self, name):
        try:
            return mount.read_json(os.path.join(self.mount.path, name, "autoscale.json"))
        except FileNotFoundError:
            return {}

    def record_of(self, job):
        return self.record(os.path.basename(job.path))

    def said(self):
        return mount.read_text(self.path("said")) if os.path.exists(self.path("said")) else ""

    def wait_for(self, is_so, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not is_so():
            self.assertLess(time.monotonic(), deadline, self.said())
            time.sleep(0.05)

    def wait_until_all_is_done(self, status=0):
        self.assertEqual(self.running.wait(timeout=2 * PATIENCE), status, self.said())

    def log(self, what=None):
        if not os.path.exists(self.path("log")):
            return []
        with open(self.path("log"), encoding="utf-8") as file:
            lines = [json.loads(line) for line in file if line.endswith("}\n")]
        return [line for line in lines if what in (None, line["what"])]

    def of_job(self, job, what=None):
        return [line for line in self.log(what) if line["job"] == os.path.basename(job.path)]

    def check_story(self, *jobs):
        """Nobody shared a GPU, each start went on from where the job was, in the layout that it was told of, and all was consumed."""
        users = {}
        for line in sorted(self.log(), key=lambda line: line["at"]):
            if line["what"] == "end":
                users = {device: pid for device, pid in users.items() if pid != line["pid"]}
                continue
            for device in line["devices"].split(","):
                self.assertNotIn(device, users, line)
                users[device] = line["pid"]
        for job in jobs:
            at = 0
            for line in self.of_job(job):
                if line["what"] == "start":
                    self.assertEqual(line["consumed"], at)
                    sizes = line["layout"]
                    self.assertEqual((line["plan"]["dp"], line["plan"]["batch"]), (sizes["dp"], line["batch"]))
                    self.assertEqual(line["shown"].split("/")[-1], f"tp{sizes['tp']}-pp1-dp{sizes['dp']}")
                    self.assertEqual(sizes["devices"], line["devices"].split(","))
                    self.assertEqual(line["cuda"], ",".join(device.split(":")[1] for device in sizes["devices"]))
                at = line["consumed"]
            self.assertEqual(at, SAMPLES)
            self.assertEqual(self.record_of(job)["state"], "done")
