"""ptc spase run on a real mount: jobs in the order of a schedule, which is looked at again when they are slow, come and fail."""
import json
import os
import random
import re
import subprocess
import time

import mount
from carried_out import BATCH, PATIENCE, SAMPLES, CarriedOut


class SpaseRun(CarriedOut):
    COMMAND, OPTIONS = ("spase", "run"), ("--price", "0.5", "--steps", "2000", "--seed", "7")

    def profiles(self, *seconds_by_gpus):
        self.write("profiles.csv", "model,technique,batch,tp,pp,dp,iteration_s\n" + "".join(
            f"m,mine,{BATCH},1,1,{gpus},{seconds}\n" for gpus, seconds in seconds_by_gpus))

    def test_jobs_run_in_the_order_of_the_schedule(self):
        a, b, c = (self.prepare(name) for name in "abc")
        self.profiles((1, 0.02))  # one on each GPU, and the last one when one of them has ended
        self.list_jobs(*((job, ["0.02"], {}) for job in (a, b, c)), gpus=2)
        # Who is slow on a busy machine would else be changed for that.
        self.begin("--until-done", "--svg", self.path("now.svg"), "--threshold", "1000")
        self.wait_for(lambda: len(self.log("start")) == 2)
        waiting, = (job for job in (a, b, c) if not self.of_job(job))
        decision = self.record_of(waiting)["decision"]
        self.assertRegex(decision["waits"], r"^1 GPU in about \d.*, when .* has ended$")
        top = " ".join(self.mount.ptc("top", "--once").stdout.split())
        self.assertIn("autoscale: it waits for 1 GPU in about", top)
        self.assertIn("autoscale it waits for 1 GPU in about", " ".join(self.mount.ptc("status", waiting.name).stdout.split()))
        said = mount.read_text(self.mount.path + "/.ptc/metrics")
        self.assertIn(f'ptcfs_job_autoscale_state{{job="{waiting.name}",state="waits"}} 1', said)
        self.assertIn('why="the schedule begins"', said)
        self.assertTrue(mount.read_text(self.path("now.svg")).startswith("<svg"))
        self.wait_until_all_is_done()
        self.check_story(a, b, c)
        self.assertEqual([len(self.of_job(job, "start")) for job in (a, b, c)], [1, 1, 1])  # nobody was changed
        self.assertEqual({one["technique"] for one in self.log("start")}, {"mine"})
        self.assertIn("a schedule, because the schedule begins: all is done in", self.said())
        self.assertIn("TASK", self.said())
        content = json.loads(mount.read_text(self.path("jobs.json")))
        content["jobs"][0]["deadline"] = "2020-01-01T00:00Z"
        self.write("jobs.json", json.dumps(content))
        self.begin("--until-done")  # it was begun before
        self.wait_until_all_is_done()
        self.assertIn("3 jobs, 3 done; there is nothing to do", self.said())
        content["jobs"][0]["name"] = "never-begun"
        self.write("jobs.json", json.dumps(content))
        told = self.mount.ptc("spase", "run", self.path("jobs.json"), "--logs", self.path("logs"), check=False)
        self.assertEqual(told.returncode, 1)
        self.assertRegex(told.stderr, r"jobs.json: line 1, column \d+: the deadline of 'never-begun' is past already")

    def test_who_is_slower_gets_more(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.profiles((1, 0.025), (2, 0.014))  # both would take 2.5 s on a GPU of their own
        self.list_jobs((a, ["1"], {}), (b, ["0.025"], {}), gpus=2)  # a has far more left than b, on whatever machine
        self.begin()
        self.wait_for(lambda: self.of_job(a, "start") and len(self.of_job(a, "start")[-1]["layout"]["devices"]) == 2)
        self.wait_for(lambda: re.search("because .*a takes [0-9.]+ x as long as its profile says", self.said()))
        self.assertRegex(self.said(), r"and \d jobs? that runs? change")

    def test_a_killed_one_is_followed_by_the_next(self):
        jobs = [self.prepare(name) for name in "abc"]
        seed = random.randrange(1 << 32)
        rng = random.Random(seed)
        self.profiles((1, 0.025), (2, 0.014))  # the first one is slow, and so changed meanwhile
        self.list_jobs(*((job, [pause], {}) for job, pause in zip(jobs, ("0.08", "0.025", "0.025"))), gpus=2)
        self.begin("--until-done")
        for _ in range(6):
            time.sleep(rng.uniform(0.05, 1.5))
            if self.running.poll() is not None:
                break
            self.running.kill()
            self.running.wait()
            self.begin("--until-done")
        with self.subTest(seed=seed):
            self.wait_until_all_is_done()
            self.check_story(*jobs)

    def test_it_is_said_who_holds_the_gpus(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.profiles((1, 0.05))
        self.list_jobs((a, ["0.1"], {}), gpus=1)
        self.begin("--until-done")
        self.wait_for(lambda: self.of_job(a, "start"))
        a.save_layout(tp=1, pp=1, dp=1, devices=["localhost:0"], keep=7)
        self.wait_for(lambda: self.record_of(a)["state"] == "by hand")
        self.list_jobs((a, ["0.1"], {}), (b, ["0.01"], {}), gpus=1)
        self.wait_for(lambda: self.record_of(b).get("decision", {}).get("waits"))
        self.assertEqual(self.record_of(b)["decision"]["waits"], f"{a.name}, which is left alone with 1 GPU")
        top = " ".join(self.mount.ptc("top", "--once").stdout.split())
        self.assertIn(f"it waits for {a.name}, which is left alone with 1 GPU", top)
        self.mount.ptc("spase", "run", "--adopt", a.name)
        self.wait_until_all_is_done()

    def test_failures_hand_edits_and_who_comes(self):
        a, b, c = (self.prepare(name) for name in "abc")
        self.profiles((1, 0.05))
        first = (a, ["0.05"], {}), (b, ["0.02", "crash"], {})
        self.list_jobs(*first, gpus=4)  # one for each, and one that is named by hand
        self.begin("--until-done")
        self.wait_for(lambda: self.of_job(a, "start") and self.record_of(b).get("failures"))
        second = subprocess.run([os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "autoscale", self.path("jobs.json")],
                                capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=self.at)
        self.assertEqual(second.returncode, 1)
        self.assertIn(f"another autoscaler is at work in {self.mount.path}", second.stderr)
        a.save_layout(tp=1, pp=1, dp=1, devices=["localhost:0"], keep=7)
        self.wait_for(lambda: self.record_of(a)["state"] == "by hand")
        self.assertIn("ptc spase run --adopt", self.record_of(a)["remark"])
        self.list_jobs(*first, (c, ["0.01"], {}), gpus=4)
        self.wait_for(lambda: self.record_of(c).get("state") == "done")  # on what is left
        self.assertIn("adopt", self.mount.ptc("spase", "run", "--help").stdout)
        told = self.mount.ptc("spase", "run", self.path("jobs.json"), "--start-price", "3", check=False)
        self.assertNotEqual(told.returncode, 0)
        self.assertIn("--start-price requires --price", told.stderr)
        self.mount.ptc("spase", "run", "--adopt", a.name)
        self.wait_until_all_is_done(status=1)
        self.assertEqual(self.record_of(a)["state"], "done")
        self.assertEqual(self.of_job(a)[-1]["consumed"], SAMPLES)
        self.assertEqual(self.record_of(b)["state"], "given up")
        self.assertIn("has failed", self.said())


if __name__ == "__main__":
    mount.main()
