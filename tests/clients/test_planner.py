"""ptc profile and ptc spase plan, as a user runs them, on profiles that others have published."""
import json
import os
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree

import mount

DATA = os.path.join(os.path.dirname(__file__), "..", "bench", "data")


class Planner(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ptcfs-planner-")
        self.addCleanup(directory.cleanup)
        self.at = directory.name

    def path(self, name):
        return os.path.join(self.at, name)

    def ptc(self, *words, code=0):
        done = subprocess.run([os.path.join(mount.bin_dir(), "ptc"), *words], capture_output=True, text=True, check=False,
                              timeout=120)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout if code == 0 else done.stderr

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def jobs(self, *jobs, nodes=(8, 8)):
        return self.write("jobs.json", json.dumps({"cluster": {"nodes": list(nodes)}, "profiles": "p.csv", "jobs": jobs}))

    def imported(self):
        self.ptc("profile", "import", "elasticflow", f"{DATA}/elasticflow/gpt2.csv", f"{DATA}/elasticflow/bert.csv", "-o",
                 self.path("p.csv"))

    def test_from_published_tables_to_a_picture(self):
        self.imported()
        shown = self.ptc("profile", "show", self.path("p.csv"), "gpt2").splitlines()
        self.assertEqual(shown[1].split()[:2], ["gpt2", "1"])
        self.assertGreater(len(shown), 4)
        jobs = self.jobs(*({"name": f"{model}-{i}", "model": model, "samples": 1e6 * (1 + i)}
                           for model in ("gpt2", "bert") for i in range(3)))
        options = ("--steps", "30000", "--seed", "7")
        told = self.ptc("spase", "plan", jobs, *options, "--svg", self.path("plan.svg"))
        for words in ("gpt2-2", "until all are done", "current practice", "optimus, dynamic"):
            self.assertIn(words, told)
        plan = json.loads(self.ptc("spase", "plan", jobs, *options, "--json"))
        self.assertEqual(plan, json.loads(self.ptc("spase", "plan", jobs, *options, "--json")))
        self.assertEqual({task["name"] for task in plan["tasks"]}, {f"{m}-{i}" for m in ("gpt2", "bert") for i in range(3)})
        self.assertGreaterEqual(plan["makespan_s"], plan["lower_bound_s"])
        others = {name: seconds for name, seconds in plan["instead_s"].items() if name != "optimus, dynamic"}
        self.assertLessEqual(plan["makespan_s"], min(others.values()) * (1 + 1e-9))
        for task in plan["tasks"]:
            self.assertEqual(sum(map(len, task["devices"].values())), task["gpus"])
        picture = xml.etree.ElementTree.parse(self.path("plan.svg")).getroot()
        titles = {title.text.split(":")[0] for title in picture.iter("{http://www.w3.org/2000/svg}title")}
        self.assertEqual(titles, {task["name"] for task in plan["tasks"]})

    def test_to_standard_output_and_back(self):
        text = self.ptc("profile", "import", "morphling", f"{DATA}/morphling/gpt2/placements.csv", "--batch", "16")
        self.write("p.csv", text)
        self.assertIn("tp", self.ptc("profile", "show", self.path("p.csv")))
        self.assertIn(" 16 ", self.ptc("profile", "show", self.path("p.csv")))

    def test_what_is_wrong_is_named(self):
        self.imported()
        job = {"name": "a", "model": "gpt2", "samples": 1}
        for path, *words in (
                (self.path("none.json"), "none.json", "No such file"),
                (self.write("bad.json", '{"cluster": {"nodes": [8]},\n "jobs": [}'), "bad.json: line 2, column 11"),
                (self.write("no.json", '{"cluster": {"nodes": [8]}, "profiles": "q.csv", "jobs": [{"name": "a", "model": "m", '
                                       '"samples": 1}]}'), "q.csv", "No such file")):
            said = self.ptc("spase", "plan", path, "--svg", self.path("x.svg"), code=1)
            for word in words:
                self.assertIn(word, said)
        for wrong, *words in (({**job, "model": "gtp2"}, "no profile has a model 'gtp2' (did you mean 'gpt2'?)"),
                              ({**job, "batch": 3}, "a batch from 3 to 3"),
                              ({**job, "sample": 3}, "unknown key 'sample' (did you mean 'samples'?)")):
            said = self.ptc("spase", "plan", self.jobs(wrong), "--svg", self.path("x.svg"), code=1)
            for word in words:
                self.assertIn(word, said)
        self.assertFalse(os.path.exists(self.path("x.svg")))
        self.assertIn("has no model 'gp2' (did you mean 'gpt2'?)", self.ptc("profile", "show", self.path("p.csv"), "gp2", code=1))
        self.ptc("profile", "import", "optimus", self.path("p.csv"), code=2)
        self.assertIn("there is no column 'exec_plan'",
                      self.ptc("profile", "import", "morphling", f"{DATA}/elasticflow/gpt2.csv", code=1))


if __name__ == "__main__":
    mount.main()
