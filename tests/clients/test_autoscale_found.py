"""ptc autoscale on a real mount: what it finds otherwise than it was when it, or another one, looked last."""
import json
import os
import signal
import subprocess
import time
import unittest

import mount
from carried_out import BATCH, PATIENCE, CarriedOut, profiles


class Found(CarriedOut):
    COMMAND, OPTIONS = ("autoscale",), ("--price", "0.5")

    def test_a_layout_that_is_away_for_a_moment_is_no_removed_job(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.05"], {}))
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        os.rename(job.file("layout.json"), job.file("layout.json~"))
        time.sleep(1.5)  # it looks twice a second
        os.rename(job.file("layout.json~"), job.file("layout.json"))
        self.wait_until_all_is_done()
        self.assertNotIn("removed", self.said())
        self.assertEqual(len(self.of_job(job, "start")), 1)

    def test_adopted_while_no_autoscaler_runs(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.05"], {}))
        self.begin()
        self.wait_for(lambda: self.log("start"))
        job.save_layout(tp=1, pp=1, dp=1, devices=["localhost:0"])
        self.wait_for(lambda: self.record_of(job)["state"] == "by hand")
        self.running.send_signal(signal.SIGINT)
        self.running.wait(timeout=PATIENCE)
        self.mount.ptc("autoscale", "--adopt", job.name)
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("it is decided for again", self.said())
        self.assertEqual(self.record_of(job)["state"], "done")

    def test_who_is_not_listed_any_more_keeps_its_gpus(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1"], {}), gpus=1)
        self.begin()
        self.wait_for(lambda: self.log("start"))
        self.running.send_signal(signal.SIGINT)
        self.running.wait(timeout=PATIENCE)
        self.list_jobs((b, ["0.01"], {}), gpus=1)
        dry = self.mount.ptc("autoscale", self.path("jobs.json"), "--dry-run", "--json")
        self.assertIn(f"ptc: {a.name}: it is not in the file, and runs on 1 GPU", dry.stderr)
        self.assertIsNone(json.loads(dry.stdout)["jobs"][0]["then"])
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("jobs.json: it is left alone", self.said())
        self.assertGreater(self.of_job(b, "start")[0]["at"], self.of_job(a, "end")[0]["at"])
        # Listed again, it is decided for again; it has read all.
        self.list_jobs((a, ["0.05"], {}), (b, ["0.01"], {}), gpus=1)
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertEqual(self.record_of(a)["state"], "done")

    def test_one_of_its_name_is_begun_anew(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.01"], {}))
        self.begin()
        self.wait_for(lambda: self.record_of(job).get("state") == "done")
        subprocess.run(["rm", "-r", job.path], check=True)
        self.wait_for(lambda: "there is no job" in self.said())
        job = self.prepare("a")
        self.wait_for(lambda: len(self.of_job(job, "end")) == 2)
        self.assertEqual(self.of_job(job, "start")[1]["consumed"], 0)

    def test_a_table_that_comes_later_than_the_file_that_names_it(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.15"], {}), gpus=1)
        jobs = json.loads(mount.read_text(self.path("jobs.json")))
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        jobs["profiles"], jobs["cluster"]["nodes"]["localhost"] = "other.csv", 4
        self.write("jobs.json", json.dumps(jobs))
        os.unlink(self.path("profiles.csv"))
        self.wait_for(lambda: "other.csv" in self.said() and "what it said before holds" in self.said())
        self.write("other.csv", profiles())
        self.wait_for(lambda: "jobs.json has changed" in self.said())
        self.wait_until_all_is_done()
        self.assertEqual(self.said().count("what it said before holds"), 1)

    def test_more_ranks_than_its_batch_was_for(self):
        job = self.prepare("a")
        with open(job.file("dataset/order.json"), "w", encoding="utf-8") as file:
            json.dump({"batch": 2, "seed": 1}, file)
        self.write("profiles.csv", "model,batch,tp,pp,dp,iteration_s\nm,2,1,1,1,0.2\nm,8,1,1,4,0.02\n")
        self.list_jobs((job, ["0.02"], {}))
        jobs = json.loads(mount.read_text(self.path("jobs.json")))
        jobs["jobs"][0]["batch"] = [2, 8]
        self.write("jobs.json", json.dumps(jobs))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        start, = self.of_job(job, "start")
        self.assertEqual((start["layout"]["dp"], start["batch"]), (4, 8))
        self.assertNotIn("cannot be had", self.said())

    def test_a_dry_run_tells_what_it_would_cost(self):
        """As it does then, by ptcfs's own plan: of a layout that the job cannot have nothing is told."""
        job = self.prepare("a")
        self.write("profiles.csv", profiles() + f"m,{BATCH},7,1,1,0.001\n")  # which tensors of 8 heads do not allow
        self.list_jobs((job, ["0.02"], {}), gpus=8)

        def told():
            done = self.mount.ptc("autoscale", self.path("jobs.json"), "--dry-run", "--json")
            self.assertRegex(done.stderr, rf"\Aptc: .*profiles\.csv: line 5, column 5: job '{os.path.basename(job.path)}': "
                                          r"tp7-pp1-dp1 cannot be had: [^\n]+\n\Z")
            return json.loads(done.stdout)["jobs"][0]
        dry = told()
        self.OPTIONS = ()
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        decision = self.record_of(job)["decision"]
        self.assertEqual(decision["to"]["way"], dry["then"]["way"])
        self.assertAlmostEqual(decision["price_s"], dry["price_s"], places=6)
        self.wait_until_all_is_done()
        jobs = json.loads(mount.read_text(self.path("jobs.json")))
        jobs["jobs"][0]["samples"] = 10 ** 9  # then what is fastest is worth any price
        self.write("jobs.json", json.dumps(jobs))
        self.assertEqual(told()["then"]["gpus"], 4)

    def test_where_nothing_can_be_had_nothing_is_told(self):
        job = self.prepare("a")
        self.write("profiles.csv", f"model,batch,tp,pp,dp,iteration_s\nm,{BATCH},7,1,1,1\n")  # which tensors of 8 heads do not allow
        self.list_jobs((job, ["0.02"], {}), gpus=8)
        done = self.mount.ptc("autoscale", self.path("jobs.json"), "--dry-run", check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("profiles.csv: line 2, column 5: job ", done.stderr)
        self.assertRegex(done.stderr, r"jobs\.json: line 1, column \d+: job .*: nothing can be had of what the profiles have of 'm'")

    def test_what_is_wrong_leaves_nothing_behind(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1"], {}))
        good = json.loads(mount.read_text(self.path("jobs.json")))
        for change, error in (({"model": "n"}, "no profile has a model 'n'"), ({"batch": 3}, "a batch of 3; there is 4"),
                              ({"technique": "x"}, "has a technique 'x'"), ({"now": {"gpus": 5}}, "the cluster has 4"),
                              ({"run": []}, "'run' is a program"), ({"name": "../x"}, "cannot be the name of a job in a mount"),
                              ({"deadline": "2020-01-01T00:00Z"}, "is past already")):
            self.write("jobs.json", json.dumps({**good, "jobs": [{**good["jobs"][0], **change}]}))
            there = sorted(os.listdir(self.at))
            for command in (["autoscale"], ["spase", "run"]):
                with self.subTest(error, command=command):
                    done = self.mount.ptc(*command, self.path("jobs.json"), "--logs", self.path("logs"), check=False)
                    self.assertEqual(done.returncode, 1)
                    self.assertRegex(done.stderr, r"jobs\.json: line 1, column \d+: ")
                    self.assertIn(error, done.stderr)
                    self.assertEqual(sorted(os.listdir(self.at)), there)
                    self.assertFalse(os.path.exists(job.file("autoscale.json")))

    @unittest.skipUnless(os.getuid() == 0, "only root limits space")
    def test_what_cannot_be_written_down_is_not_begun(self):
        """Nobody would find it again."""
        full, other = self.prepare("full"), self.prepare("other")
        os.setxattr(full.path, "trusted.ptc.quota", b"1")
        self.list_jobs((full, ["0.02"], {}), (other, ["0.02"], {}), gpus=2)
        self.begin("--until-done")
        self.wait_for(lambda: "full: what was done with it could not be written down" in self.said())
        self.wait_for(lambda: self.record_of(other).get("state") == "done")
        self.assertEqual(self.of_job(full), [])
        self.assertFalse(os.path.exists(full.file("autoscale.json")))
        os.setxattr(full.path, "trusted.ptc.quota", b"none")
        self.wait_until_all_is_done()
        self.check_story(full, other)

    def test_who_has_consumed_all_and_does_not_end_is_asked_to(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.005", "stays"], {"stops_within": 2}))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertIn("it does not end: it is asked to", self.said())
        self.assertTrue(self.of_job(job, "end")[0]["asked"])

    def test_a_done_one_with_more_samples_goes_on(self):
        """Though they were raised while no autoscaler ran; its data set has no more, which it says again."""
        job = self.prepare("a")
        self.list_jobs((job, ["0.005"], {}))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        jobs = json.loads(mount.read_text(self.path("jobs.json")))
        jobs["jobs"][0]["samples"] = 800
        self.write("jobs.json", json.dumps(jobs))
        self.begin()
        self.wait_for(lambda: len(self.of_job(job, "start")) >= 2)

    @unittest.skipUnless(os.getuid() == 0, "only root gives files away")
    def test_what_another_user_runs_is_not_started_beside_it(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1"], {}))
        self.begin()
        self.wait_for(lambda: self.log("start"))
        self.running.send_signal(signal.SIGINT)
        self.running.wait(timeout=PATIENCE)
        os.chown(job.file("autoscale.json"), 41001, 41001)
        self.begin()
        self.wait_for(lambda: "which another user has started" in self.said())
        time.sleep(1)
        self.assertEqual(len(self.of_job(job, "start")), 1)

    def test_killed_in_each_state(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.3"], {}), (b, ["0.3"], {}), gpus=2)
        head = profiles().splitlines()[0]
        each, one_has_both = f"{head}\nm,{BATCH},1,1,1,0.2\n", f"{head}\nm,{BATCH},1,1,2,0.1\n"
        self.write("profiles.csv", each)
        self.begin("--until-done")
        killed = []
        for state in ("runs", "stops", "waits", "changes"):
            for _ in range(6):
                each, one_has_both = one_has_both, each
                self.write("profiles.csv", each)
                if self.catch((a, b), state):
                    killed.append(state)
                    break
        self.assertEqual(killed, ["runs", "stops", "waits", "changes"], self.said())
        self.wait_until_all_is_done()
        self.check_story(a, b)

    def catch(self, jobs, state):
        """It is killed while the record of one of them says so, and begun anew; False: none did for a while."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if state in [self.record_of(job).get("state") for job in jobs]:
                self.running.kill()
                self.running.wait()
                seen = [self.record_of(job).get("state") for job in jobs]
                self.begin("--until-done")
                return state in seen
        return False

    def test_an_edit_while_it_ends_wins(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1", "edits"], {}))
        self.begin("--until-done")
        self.wait_for(lambda: self.log("start"))
        self.list_jobs((a, ["0.1", "edits"], {}), (b, ["0.02"], {}))
        self.wait_for(lambda: self.record_of(a)["state"] == "by hand")
        self.assertEqual(mount.read_json(a.file("layout.json"))["keep"], 7)
        self.wait_for(lambda: self.record_of(b).get("state") == "done")
        self.assertEqual(mount.read_json(a.file("layout.json"))["keep"], 7)
        self.assertEqual(len(self.of_job(a, "start")), 1)

    def test_who_finds_no_room_is_dropped_where_that_is_wanted(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.write("profiles.csv", profiles().splitlines()[0] + f"\nm,{BATCH},1,1,2,0.1\n")
        self.list_jobs((a, ["0.1"], {}), gpus=2)
        self.begin("--drop", "--until-done")
        self.wait_for(lambda: self.log("start"))
        self.list_jobs((a, ["0.1"], {}), (b, ["0.02"], {}), gpus=2)
        self.wait_until_all_is_done(status=1)
        self.assertIn("it is dropped: there was no room for it when it came", self.record_of(b)["remark"])
        self.assertIn(f"ptc: given up: {b.name}", self.said())
        self.assertEqual((self.record_of(a)["state"], self.record_of(b)["state"], self.of_job(b)), ("done", "given up", []))

    def test_who_has_failed_says_twice_that_it_is_done(self):
        job = self.prepare("a")
        self.list_jobs((job, ["0.1", "flaky"], {}))
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.assertEqual(len(self.of_job(job, "start")), 3)
        self.assertEqual((self.record_of(job)["state"], self.record_of(job)["remark"]), ("done", "it says so, 0 of 400 samples consumed"))
        self.assertIn("it says so, 0 of 400", " ".join(self.mount.ptc("status", job.name).stdout.split()))

    def test_who_waits_is_said(self):
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((a, ["0.1"], {}), (b, ["0.1"], {}), gpus=1)
        self.begin()
        self.wait_for(lambda: self.log("start"))
        self.wait_for(lambda: f"{b.name}: it waits for room: others have it" in self.said())
        self.assertIn("it waits for room: others have it", " ".join(self.mount.ptc("status", b.name).stdout.split()))
        self.running.kill()
        self.running.wait()
        os.killpg(self.record_of(a)["pid"], signal.SIGKILL)
        self.wait_for(lambda: "its processes have ended, and no autoscaler has seen it yet; it ran on 1 GPU" in
                      " ".join(self.mount.ptc("status", a.name).stdout.split()))
        told = json.loads(self.mount.ptc("autoscale", self.path("jobs.json"), "--dry-run", "--json").stdout)["jobs"]
        self.assertIsNone(next(one for one in told if one["name"] == a.name)["now"])
        wrong = subprocess.run([os.path.join(mount.bin_dir(), "ptc"), "-C", self.path("none"), "autoscale", self.path("jobs.json"), "--dry-run"],
                               capture_output=True, text=True, check=False, timeout=PATIENCE)
        self.assertEqual(wrong.returncode, 1, wrong.stdout)

    def test_adopted_it_runs_as_it_is_decided(self):
        """Somebody has saved a layout that its processes do not run in, while no autoscaler was there."""
        job = self.prepare("a")
        self.list_jobs((job, ["0.1"], {}), gpus=1)
        self.begin()
        self.wait_for(lambda: self.log("start"))
        self.running.kill()
        self.running.wait()
        job.save_layout(tp=1, pp=1, dp=2)
        self.assertIn("by the autoscaler that runs, or by the next one", self.mount.ptc("autoscale", "--adopt", job.name).stdout)
        self.begin("--until-done")
        self.wait_until_all_is_done()
        self.check_story(job)
        self.assertEqual(len(self.of_job(job, "start")), 2)

    def test_it_is_decided_now_and_then(self):
        """Nothing happens but that one has less and less left: it gets what the other has."""
        a, b = self.prepare("a"), self.prepare("b")
        self.list_jobs((b, ["0.3"], {}), (a, ["0.05"], {}), gpus=3)
        self.begin("--policy", "elastic-completion", "--every", "1")
        self.wait_for(lambda: self.record_of(a).get("decision", {}).get("to", {}).get("gpus") == 2)
        self.assertEqual(self.record_of(a)["decision"]["why"], "1 s have passed")


if __name__ == "__main__":
    mount.main()
