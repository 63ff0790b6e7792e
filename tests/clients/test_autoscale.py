"""ptc autoscale on a real mount: jobs come, end, crash and hang, somebody edits, and the autoscaler itself is killed."""
import json
import os
import random
import signal
import subprocess
import time

import mount
import prometheus
from carried_out import BATCH, PATIENCE, SAMPLES, CarriedOut, profiles


class Autoscale(CarriedOut):
    COMMAND, OPTIONS = ("autoscale",), ("--price", "0.5")

    def test_jobs_come_and_end(self):
        a, b, c = (self.prepare(name) for name in "abc")
        quick, slow = ["0.02"], ["0.1"]
        self.list_jobs((a, quick, {}), (b, slow, {}))
        self.begin("--until-done")
        self.wait_for(lambda: len(self.log("start")) == 2)
        said = mount.read_text(self.mount.path + "/.ptc/metrics")
        for words in (f'ptcfs_job_autoscale_gpus{{job="{a.name}"}} 2', f'ptcfs_job_autoscale_state{{job="{a.name}",state="runs"}} 1',
                      'to_gpus="2",why="the autoscaler begins"'):
            self.assertIn(words, said)
        top = " ".join(self.mount.ptc("top", "--once").stdout.split())
        self.assertIn("autoscale: it runs on 2 GPUs with batch 4 (tp1-pp1-dp2); 0 GPUs before, and now these because", top)
        self.list_jobs((a, quick, {}), (b, slow, {}), (c, slow, {}))
        self.wait_until_all_is_done()
        self.check_story(a, b, c)
        self.assertEqual([len(line["layout"]["devices"]) for line in self.of_job(a, "start")][0], 2)
        self.assertGreater(len(self.log("start")), 3)  # somebody was given another number
        self.assertIn("because", self.said())
        gpus = {labels: value for (name, labels), value in prometheus.check(mount.read_text(self.mount.path + "/.ptc/metrics")).items()
                if name == "ptcfs_job_autoscale_starts_total"}
        self.assertEqual(sum(gpus[(("job", os.path.basename(job.path)),)] for job in (a, b, c)), len(self.log("start")))
        self.assertEqual(self.record_of(b)["decision"]["to"]["batch"], BATCH)
        costs = self.record_of(b)["costs"]  # as they were measured, though a fixed price was what counted
        self.assertNotIn(costs["start_s"], (15, None))
        self.assertLess(costs["start_s"], 15)
        stopped = [self.record_of(job)["costs"]["stop_s"] for job in (a, b, c) if len(self.of_job(job, "start")) > 1]
        self.assertTrue(any(stop != 5 for stop in stopped), stopped)

    def test_a_killed_one_is_followed_by_the_next(self):
        jobs = [self.prepare(name) for name in "abc"]
        seed = random.randrange(1 << 32)
        rng = random.Random(seed)
        self.list_jobs(*((job, ["0.05"], {}) for job in jobs), gpus=3)
        kills = 0
        self.begin("--until-done")
        while kills < 8:
            time.sleep(rng.uniform(0.05, 1.2))
            if self.running.poll() is not None:
                break
            self.running.kill()
            self.running.wait()
            kills += 1
            self.begin("--until-done")
        with self.subTest(seed=seed, kills=kills):
            self.wait_until_all_is_done()
            self.check_story(*jobs)

    def test_profiles_that_change_and_jobs_that_go_and_return(self):
        a, b = self.prepare("a"), self.prepare("b")
        both = (a, ["0.1"], {}), (b, ["0.1"], {})
        self.list_jobs(*both)
        self.begin("--until-done")
        self.wait_for(lambda: len(self.log("start")) == 2)
        self.list_jobs(both[1])
        self.wait_for(lambda: self.record_of(a)["state"] == "by hand")
        self.assertIn("it is not in", self.record_of(a)["remark"])
        self.list_jobs(*both)
        self.wait_for(lambda: self.record_of(a)["state"] == "runs")
        self.assertEqual(len(self.of_job(a, "start")), 1)  # it was never stopped
        self.write("profiles.csv", profiles().splitlines()[0] + f"\nm,{BATCH},1,1,1,0.2\n")
        self.wait_for(lambda: [line["devices"].count(":") for line in self.log("start")][2:] == [1, 1])
        self.wait_until_all_is_done()
        self.check_story(a, b)

    def test_nodes_get_other_numbers(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1"], {}), gpus=2)
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        self.list_jobs((a, ["0.1"], {}), nodes={"w7": 8, "localhost": 1})  # its GPUs would be nobody's
        self.wait_for(lambda: "which the cluster there does not have" in self.said())
        self.list_jobs((a, ["0.1"], {}), (b, ["0.1"], {}), nodes={"w7": 8, "localhost": 4})
        self.wait_until_all_is_done()
        self.check_story(a, b)

    def test_a_job_that_is_removed_ends(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1"], {"stops_within": 2}), (b, ["0.1"], {}), gpus=2)
        self.begin()
        self.wait_for(lambda: len(self.log("start")) == 2)
        pid = self.record_of(a)["pid"]
        self.mount.ptc("rm", "--force", a.name)
        self.wait_for(lambda: "the job was removed: its processes are ended" in self.said() or not os.path.exists(f"/proc/{pid}"))
        self.wait_for(lambda: not os.path.exists(f"/proc/{pid}"))
        self.wait_for(lambda: self.record_of(b)["state"] == "done")
        self.assertIsNone(self.running.poll())

    def test_who_says_too_soon_that_all_is_done_is_asked_once_more(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.02", "early"], {}))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertEqual(len(self.of_job(job, "start")), 2)
        self.assertIn("it has ended, 0 of 400 samples consumed", self.said())

    def test_one_that_has_no_room_holds_up_nobody(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.write("profiles.csv", profiles() + f"big,{BATCH},1,1,8,0.1\n")
        self.list_jobs((a, ["0.02"], {}), (b, ["0.02"], {}), nodes={"w7": 8, "localhost": 2})
        jobs = json.loads(mount.read_text(self.path("jobs.json")))
        jobs["jobs"][0]["model"] = "big"
        self.write("jobs.json", json.dumps(jobs))
        self.begin()
        self.wait_for(lambda: self.record_of(b).get("state") == "done")
        self.assertEqual(self.of_job(a), [])

    def test_the_daemon_is_killed_and_returns(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1"], {}))
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        self.mount.stop(kill=True)
        self.wait_for(lambda: "nodes.json" in self.said())
        self.mount.start()
        self.wait_until_all_is_done()
        self.assertEqual(self.record_of(job)["state"], "done")
        self.assertEqual(self.of_job(job)[-1]["consumed"], SAMPLES)

    def test_jobs_go_on_when_it_is_ended(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.05"], {}))
        self.begin()
        self.wait_for(lambda: self.of_job(job, "start"))
        self.running.send_signal(signal.SIGINT)
        self.assertEqual(self.running.wait(timeout=PATIENCE), 0)
        self.assertIn("1 job goes on; the next autoscaler finds it again", self.said())
        told = json.loads(self.mount.ptc("autoscale", self.path("jobs.json"), "--dry-run", "--json").stdout)["jobs"][0]
        self.assertEqual((told["now"]["gpus"], told["changes"]), (4, False))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("it runs already", self.said())
        self.assertEqual(len(self.of_job(job, "start")), 1)
        self.check_story(job)

    def test_a_second_one_refuses(self):
        self.list_jobs((self.prepare("a"), ["0.1"], {}))
        self.begin()
        self.wait_for(lambda: self.log("start"))
        second = subprocess.run([os.path.join(mount.bin_dir(), "ptc"), "-C", self.mount.path, "autoscale",
                                 self.path("jobs.json")], capture_output=True, text=True, check=False, timeout=PATIENCE, cwd=self.at)
        self.assertEqual(second.returncode, 1)
        self.assertIn(f"another autoscaler is at work in {self.mount.path}", second.stderr)

    def test_an_edit_by_hand_wins(self):
        a, b, c = (self.prepare(name) for name in "abc")
        self.list_jobs((a, ["0.1"], {}), (b, ["0.1"], {}), gpus=4)
        self.begin("--until-done")
        self.wait_for(lambda: len(self.log("start")) == 2)
        a.save_layout(tp=1, pp=1, dp=1, devices=["localhost:0"])
        self.wait_for(lambda: self.record_of(a)["state"] == "by hand")
        self.assertIn('ptc autoscale --adopt', self.record_of(a)["remark"])
        text = mount.read_text(a.file("layout.json"))
        self.list_jobs((a, ["0.1"], {}), (b, ["0.1"], {}), (c, ["0.02"], {}), gpus=4)
        self.wait_for(lambda: self.record_of(c).get("state") == "done")  # it has had what is left
        self.assertEqual(mount.read_text(a.file("layout.json")), text)
        self.assertEqual(len(self.of_job(a)), 1)
        told = self.mount.ptc("autoscale", "--adopt", os.path.basename(b.path))
        self.assertIn("is not left alone: nothing to do", told.stdout)
        self.assertFalse(os.path.exists(b.file("autoscale.adopt")))
        self.mount.ptc("autoscale", "--adopt", os.path.basename(a.path))
        self.wait_until_all_is_done()
        self.assertEqual(self.record_of(a)["state"], "done")

    def test_who_ends_again_and_again_is_given_up(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1", "crash"], {}), (b, ["0.1"], {}))
        self.begin("--until-done")
        self.wait_until_all_is_done(status=1)
        self.assertEqual(self.record_of(a)["state"], "given up")
        self.assertIn("it ended with exit status 7, 5 times without progress; see", self.record_of(a)["remark"])
        self.assertEqual(len(self.of_job(a, "start")), 5)
        self.assertEqual(self.record_of(b)["state"], "done")

    def test_who_hangs_is_killed(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1", "hang"], {"progress_within": 1}))
        self.begin()
        self.wait_for(lambda: len(self.of_job(job, "start")) >= 2)
        self.assertIn("nothing was consumed for", self.said())
        self.assertIn("it was ended by signal 9; it starts again in 1 s", self.said())

    def test_who_is_deaf_is_killed(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1", "deaf"], {"stops_within": 1}), gpus=2)
        self.begin()
        self.wait_for(lambda: self.log("start"))
        self.list_jobs((a, ["0.1", "deaf"], {"stops_within": 1}), (b, ["0.1"], {}), gpus=2)
        self.wait_for(lambda: len(self.log("start")) == 3)
        self.assertIn("it was asked to end 1 s ago: it is killed, and goes on from its last checkpoint", self.said())

    def test_what_cannot_be_had_is_left_out(self):
        job = self.prepare("a")
        self.write("profiles.csv", profiles() + f"m,{BATCH},3,1,1,0.01\n")  # faster than all, but heads are 4
        self.list_jobs((job, ["0.02"], {}))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("tp3-pp1-dp1 cannot be had: ", self.said())
        self.check_story(job)

    def test_a_program_that_is_not_there(self):
        job = self.prepare("a")
        self.list_jobs((job, [], {"command": ["./no-such-program"]}))
        self.begin("--until-done")
        self.wait_until_all_is_done(status=1)
        self.assertIn(f"starting ./no-such-program in {self.at}: there is no such program", self.said())
        self.assertIn("given up: " + os.path.basename(job.path), self.said())

    def test_files_that_are_wrong(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1"], {}))
        good = mount.read_text(self.path("jobs.json"))
        for change, error in ((lambda all: all["jobs"][0].pop("run"), "'run' is missing: how it is started"),
                              (lambda all: all["jobs"][0].update(run=[]), "'run' is a program and its arguments"),
                              (lambda all: all["jobs"][0]["run"].update(stops_within=0), "'stops_within' must be seconds"),
                              (lambda all: all["jobs"][0]["run"].update(stop_within=1), "did you mean 'stops_within'?"),
                              (lambda all: all["jobs"][0].update(model="n"), "no profile has a model 'n'"),
                              (lambda all: all["jobs"][0].update(name="../x"), "cannot be the name of a job in a mount")):
            content = json.loads(good)
            change(content)
            self.write("jobs.json", json.dumps(content))
            with self.subTest(error):
                said = self.mount.ptc("autoscale", self.path("jobs.json"), "--logs", self.path("logs"), check=False)
                self.assertEqual(said.returncode, 1)
                self.assertIn(error, said.stderr)
        self.write("jobs.json", good)
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        self.write("jobs.json", good[:-4])
        self.wait_for(lambda: "what it said before holds" in self.said())
        self.write("jobs.json", good)
        self.wait_until_all_is_done()
        self.check_story(job)

    def test_nodes_that_are_not_there_do_not_count(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.02"], {}), nodes={"w7": 8, "localhost": 1})
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("w7 is not up in", self.said())
        self.check_story(job)
        self.assertEqual(self.of_job(job, "start")[0]["devices"], "localhost:0")


if __name__ == "__main__":
    mount.main()
