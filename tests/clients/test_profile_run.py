"""ptc profile run: trials of techniques that are right, that lie, hang, fork and crash; and of those that come along."""
import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import mount

TECHNIQUES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/planner/library/techniques")
PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/examples/planned/model.py")
ASKED = f"""#!{sys.executable}
import json, os, sys, time
asked = json.load(sys.stdin)
with open("asked", "a") as file:
    file.write(json.dumps({{**asked, "name": os.path.basename(sys.argv[0]), "told": sys.argv[1:], "pid": os.getpid(),
                           "cuda": os.environ["CUDA_VISIBLE_DEVICES"], "at": time.time()}}) + "\\n")
"""


class ProfileRun(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ptcfs-profile-run-")
        self.addCleanup(directory.cleanup)
        self.at = directory.name
        os.mkdir(self.path("library"))
        self.jobs()

    def path(self, name):
        return os.path.join(self.at, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def technique(self, name, text):
        self.write("library/" + name, ASKED + text)
        os.chmod(self.path("library/" + name), 0o755)

    def jobs(self, *jobs, gpus=4):
        jobs = jobs or ({"batch": [16, 64], "trial": {"layers": 3}},)
        self.write("jobs.json", json.dumps({
            "cluster": {"nodes": {"w0": gpus}, "device": "A9"}, "profiles": "profiles.csv",
            "jobs": [{"name": f"j{number}", "model": "m", "samples": 100, **job} for number, job in enumerate(jobs)]}))

    def command(self, *words, library="library"):
        return [os.path.join(mount.bin_dir(), "ptc"), "profile", "run", self.path("jobs.json"), "--library", self.path(library), *words]

    def run_it(self, *words, code=0, library="library", **more):
        done = subprocess.run(self.command(*words, library=library), capture_output=True, text=True, check=False, timeout=400, **more)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def rows(self):
        with open(self.path("profiles.csv"), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def asked(self):
        with open(self.path("asked"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def test_all_is_tried_once(self):
        self.technique("good", 'print("Loading…")\nprint(json.dumps({"dp": asked["gpus"], "iteration_s": asked["batch"] / asked["gpus"] / 100, '
                               '"peak_bytes": 7}))\n')
        self.jobs({"batch": [16, 64], "trial": {"layers": 3}}, {"batch": 64, "trial": {"layers": 3}})  # of one model
        told = self.run_it()
        self.assertIn("9 trials now, 0 of them without a time; 9 in all", told)
        rows = self.rows()
        self.assertEqual({(row["batch"], row["dp"]) for row in rows}, {(str(b), str(g)) for b in (16, 32, 64) for g in (1, 2, 4)})
        for row in rows:
            self.assertEqual(float(row["iteration_s"]), int(row["batch"]) / int(row["dp"]) / 100)
            self.assertEqual((row["model"], row["technique"], row["device"], row["peak_bytes"], row["origin"]), ("m", "good", "A9", "7", "measured"))
        for one in self.asked():
            self.assertEqual((one["told"], one["trial"], one["model"]), (["search"], {"layers": 3}, "m"))
            self.assertEqual(len(one["devices"]), one["gpus"])
            self.assertEqual(one["cuda"], ",".join(map(str, one["devices"])))
        self.assertIn("0 trials now", self.run_it())
        self.assertEqual(len(self.asked()), 9)
        shown = subprocess.run([os.path.join(mount.bin_dir(), "ptc"), "autoscale", self.path("jobs.json"), "--dry-run"],
                               capture_output=True, text=True, check=True).stdout
        self.assertIn("GPUs in use", shown)

    def test_side_by_side_as_there_are_gpus(self):
        self.technique("slow", 'time.sleep(1)\nopen(f"end{asked[\'gpus\']}-{asked[\'batch\']}", "w").write(str(time.time()))\n'
                               'print(json.dumps({"dp": asked["gpus"], "iteration_s": 1}))\n')
        self.run_it()
        asked = self.asked()
        for one in asked:
            one["end"] = float(mount.read_text(self.path(f"end{one['gpus']}-{one['batch']}")))
        beside = [[other for other in asked if other["at"] <= one["at"] < other["end"]] for one in asked]
        for together in beside:
            devices = sum((one["devices"] for one in together), [])
            self.assertEqual(len(devices), len(set(devices)), together)
        self.assertEqual(max(map(len, beside)), 3)  # those of one GPU
        os.unlink(self.path("profiles.csv"))
        os.unlink(self.path("asked"))
        self.run_it("--one-at-a-time", "--gpus", "1")
        times = sorted(one["at"] for one in self.asked())
        self.assertTrue(all(b - a >= 1 for a, b in zip(times, times[1:])))

    def test_there_is_none_because(self):
        for name, text, why in (
                ("crash", "os.kill(os.getpid(), 11)", "it was ended by signal 11"),
                ("exit", 'print("no such layer", file=sys.stderr); sys.exit(3)', "it ended with exit status 3: 'no such layer'"),
                ("hang", "time.sleep(1000)", "it took more than 1 s"),
                ("lie-layout", 'print(\'{"tp": 3, "iteration_s": 1}\')', "it says tp3-pp1-dp1 of 1 GPU"),
                ("lie-huge", 'print(\'{"tp": 1048577, "dp": 1048577, "iteration_s": 1}\')', "it says tp1048577-pp1-dp1048577 of 1 GPU"),
                ("lie-time", 'print(\'{"iteration_s": -1}\')', "its iteration_s is no time"),
                ("lie-json", 'print("fast!")', "it printed no JSON object: 'fast!'"),
                ("much", 'print("x" * (3 << 20))', "it printed no JSON object: "),
                ("endless", 'while True: print("x" * (1 << 20))', "it printed more than 64 MiB"),
                ("endless-errors", 'while True: print("x" * (1 << 20), file=sys.stderr)', "it printed more than 64 MiB"),
                ("silent", "", "it printed nothing"),
                ("none", 'print(\'{"none": "out of memory"}\')', "out of memory")):
            self.technique(name, text)
            self.jobs({"batch": 16}, gpus=1)
            told = self.run_it("--technique", name, "--within", "1" if name == "hang" else "30")
            with self.subTest(name):
                self.assertIn(f"m {name} on 1 GPU, batch 16: none: {why}", told)
                row = [one for one in self.rows() if one["technique"] == name][0]
                self.assertEqual(row["iteration_s"], "oom")
                self.assertTrue(row["origin"].startswith("none: "))
        self.technique("none", 'print(\'{"iteration_s": 1}\')')
        self.assertIn("0 trials now", self.run_it("--technique", "none"))
        self.assertIn("1 trial now, 0 of them", self.run_it("--technique", "none", "--again"))

    def test_what_it_forks_goes_too(self):
        self.technique("fork", 'child = os.fork()\nif child == 0:\n    os.setsid()\n    time.sleep(1000)\nopen("child", "w").write(str(child))\n'
                               'print(\'{"iteration_s": 1}\', flush=True)\n')
        self.jobs({"batch": 16}, gpus=1)
        self.run_it()
        child = int(mount.read_text(self.path("child")))
        deadline = time.monotonic() + 10
        while os.path.exists(f"/proc/{child}") and mount.read_text(f"/proc/{child}/stat").rsplit(")", 1)[1].split()[0] != "Z":
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_what_is_modelled_was_not_tried(self):
        self.technique("good", 'print(json.dumps({"dp": asked["gpus"], "iteration_s": 8 / asked["gpus"]}))\n')
        self.jobs({"batch": 16}, gpus=2)
        self.write("profiles.csv", "model,technique,batch,tp,pp,dp,device,iteration_s,origin\nm,good,16,1,1,1,A9,7,measured\n"
                                   "m,good,16,1,1,2,A9,3.5,modelled\nm,good,16,1,1,2,B9,3,modelled\n")
        self.assertIn("1 trial now, 0 of them without a time; 3 in all", self.run_it())
        self.assertEqual([(row["dp"], row["device"], row["iteration_s"], row["origin"]) for row in self.rows()],
                         [("1", "A9", "7", "measured"), ("2", "B9", "3", "modelled"), ("2", "A9", "4", "measured")])

    def test_a_killed_one_goes_on(self):
        self.technique("slow", 'time.sleep(0.2)\nprint(json.dumps({"dp": asked["gpus"], "iteration_s": 1}))\n')
        for end in (signal.SIGKILL, signal.SIGINT):
            running = subprocess.Popen(self.command("--one-at-a-time"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            with running:
                for _ in range(2):
                    self.assertIn("samples/s", running.stdout.readline())
                running.send_signal(end)
                rest = running.stdout.read()
            self.assertEqual(running.returncode, -9 if end == signal.SIGKILL else 130, rest)
        self.assertIn("interrupted: the same again goes on with the", rest)
        before = len(self.rows())
        self.assertIn(f"{9 - before} trials now, 0 of them without a time; 9 in all", self.run_it())
        self.assertLessEqual(len(self.asked()), 11)  # those that were under way twice

    def test_into_json(self):
        self.technique("good", 'print(json.dumps({"dp": asked["gpus"], "iteration_s": 1}))\n')
        self.assertIn("9 trials now, 0 of them without a time; 9 in all", self.run_it("-o", self.path("p.json")))
        rows = json.loads(mount.read_text(self.path("p.json")))
        self.assertEqual({(row["batch"], row["dp"], row["iteration_s"]) for row in rows},
                         {(b, g, 1) for b in (16, 32, 64) for g in (1, 2, 4)})
        self.assertIn("0 trials now", self.run_it("-o", self.path("p.json")))
        self.assertFalse(os.path.exists(self.path("profiles.csv")))

    def test_what_is_wrong_is_named(self):
        self.technique("good", 'print(\'{"iteration_s": 1}\')\n')
        self.assertIn("has no technique 'god' (did you mean 'good'?)", self.run_it("--technique", "god", code=1))
        self.assertIn("No such file or directory", self.run_it(library="none", code=1))
        self.jobs({})
        self.jobs({"trial": {}})
        self.assertIn("jobs.json: line 1, column 88: job 'j0': 'batch' is missing", self.run_it(code=1))
        self.jobs({"batch": 1, "trial": 3})
        self.assertIn("'trial' must be an object", self.run_it(code=1))
        self.jobs({"batch": 1, "trial": {"a": 1}}, {"batch": 1, "trial": {"a": 2}})
        self.assertRegex(self.run_it(code=1), r"jobs.json: line 1, column \d+: job 'j1': it and 'j0' have one model, 'm', and say")
        self.jobs({"batch": 16, "now": {"gpus": 5}})
        self.assertRegex(self.run_it(code=1), r"jobs.json: line 1, column \d+: job 'j0': it has 5 GPUs, and the cluster has 4")
        self.assertFalse(os.path.exists(self.path("profiles.csv")))

    @unittest.skipIf(importlib.util.find_spec("torch") is None, "there is no torch")
    def test_those_that_come_along(self):
        self.jobs({"batch": 8, "trial": {"program": PROGRAM}}, gpus=2)
        env = {**os.environ, "PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}
        told = self.run_it(library=TECHNIQUES, env=env)
        self.assertIn("12 trials now, 2 of them without a time", told)
        self.assertEqual({tuple(row[key] for key in ("technique", "tp", "pp", "dp", "accumulation"))
                          for row in self.rows() if row["iteration_s"] != "oom"},
                         {*((name, "1", "1", dp, "2" if name == "accumulation" else "1")
                            for name in ("accumulation", "ddp", "fsdp", "offload") for dp in "12"),
                          ("tensor", "2", "1", "1", "1"), ("gpipe", "1", "2", "1", "1")})
        self.assertIn("tensor on 1 GPU, batch 8: none: one GPU has nobody to share the model with", told)
        self.jobs({"batch": 9, "model": "n", "trial": {"program": "none.py"}}, gpus=1)
        told = self.run_it("--technique", "ddp", library=TECHNIQUES, env=env)
        self.assertIn("none: there is no none.py", told)

    @unittest.skipIf(importlib.util.find_spec("torch") is None, "there is no torch")
    def test_what_cannot_be_cut(self):
        whole = "import torch\nHEADS = 3\ndef model():\n    return torch.nn.Sequential(torch.nn.Linear(8, 4))\n"
        for name, more, technique, why in (
                ("heads", "", "tensor", "3 heads cannot be shared by 2 ranks"),
                ("names", "HEADS = 2\n", "tensor", "no torch.nn.Linear of the model is called *q_proj"),
                ("stages", "", "gpipe", "the model's layers, 1, are fewer than 2 stages")):
            self.write(name + ".py", whole + more)
            asked = {"batch": 8, "gpus": 2, "trial": {"program": self.path(name + ".py")}}
            told = subprocess.run([sys.executable, "-B", os.path.join(TECHNIQUES, technique), "search"], input=json.dumps(asked),
                                  capture_output=True, text=True, check=True, timeout=120).stdout
            self.assertTrue(json.loads(told)["none"].startswith(why), told)

    @unittest.skipIf(importlib.util.find_spec("torch") is None, "there is no torch")
    def test_what_is_timed(self):
        """The second of two batches; GPipe's micro-batches are halved while that is faster; out of memory is what PyTorch says."""
        whole = ("import time, torch\ndef model():\n    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
                 "def batch(size):\n    return torch.ones(size, 4)\ncalls = []\n"
                 "def loss(model, batch):\n    out = model(batch)\n    calls.append(len(batch))\n")
        for name, more in (("slow", "    time.sleep(3 if len(calls) == 1 else 0.01)\n"),
                           ("large", "    if len(calls) == 2:\n        raise torch.OutOfMemoryError('tried to allocate')\n"),
                           ("small", "    time.sleep({8: 0.6, 4: 0.2, 2: 0.05, 1: 0.2}[len(batch)])\n")):
            self.write(name + ".py", whole + more + "    return out.mean()\n")

        def tell(technique, name, gpus):
            asked = {"batch": 8, "gpus": gpus, "trial": {"program": self.path(name + ".py")}}
            return json.loads(subprocess.run([sys.executable, "-B", os.path.join(TECHNIQUES, technique), "search"], input=json.dumps(asked),
                                             capture_output=True, text=True, check=True, timeout=120).stdout)
        self.assertLess(tell("ddp", "slow", 1)["iteration_s"], 2)
        self.assertEqual(tell("ddp", "large", 1), {"none": "out of memory"})
        found = tell("gpipe", "small", 2)
        self.assertEqual(found["micro_batch"], 2)
        self.assertLess(found["iteration_s"], 0.6)


if __name__ == "__main__":
    mount.main()
