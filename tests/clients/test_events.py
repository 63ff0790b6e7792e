"""ptc events: what has happened to a job, in its order, over new starts, and whatever becomes of its file."""
import datetime
import json
import os
import re
import signal
import subprocess
import time

import models
import mount


class Events(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.job = self.new_job()

    def ptc(self, *arguments, check=True):
        return self.mount.ptc("events", *arguments, check=check)

    def events(self, *arguments):
        return [json.loads(line) for line in self.ptc("--json", *(arguments or (self.job.name,))).stdout.splitlines()]

    def kinds(self, *arguments):
        return [event["event"] for event in self.events(*arguments)]

    def until(self, kind):
        deadline = time.monotonic() + 30
        while kind not in self.kinds():
            self.assertLess(time.monotonic(), deadline, self.kinds())
            time.sleep(0.05)

    def commit(self, name, seed=1):
        models.Llama(seed).write_hf(self.job.incoming(name) + "/rank/0")
        models.write_file(self.job.incoming(name) + "/layout.json", b'{"tp": 1, "pp": 1, "dp": 1}')
        self.job.commit(name)
        self.job.wait()

    def file(self):
        return os.path.join(self.mount.store, "jobs", self.job.name, "events.jsonl")

    def test_what_happens_in_its_order(self):
        began = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1)
        self.commit("base")
        self.job.set_layout(tp=2)
        self.until("reshard_ended")
        with self.assertRaises(OSError):
            with open(self.job.file("layout.json"), "w", encoding="utf-8") as file:
                file.write('{"tp": 7}')
        os.makedirs(self.job.incoming("bad") + "/rank/0")
        models.write_file(self.job.incoming("bad") + "/rank/0/model.safetensors", b"rubbish")
        self.assertEqual(mount.error_of(self.job.commit, "bad"), "ECANCELED")
        self.mount.ptc("pin", f"{self.job.name}/base")
        self.mount.ptc("pin", "--remove", f"{self.job.name}/base")
        self.commit("next", 2)
        self.mount.ptc("rm", "-y", "--force", f"{self.job.name}/base")
        events = self.events()
        wanted = ["job_made", "commit", "layout_saved", "reshard_began", "reshard_ended", "layout_refused", "commit_refused",
                  "pinned", "unpinned", "commit", "removed"]
        left = iter(event["event"] for event in events)
        self.assertTrue(all(kind in left for kind in wanted), [event["event"] for event in events])
        self.assertEqual([event["seq"] for event in events], list(range(1, len(events) + 1)))
        for event in events:
            self.assertTrue(began <= datetime.datetime.fromisoformat(event["time"]) <= datetime.datetime.now(datetime.timezone.utc))
            self.assertEqual(event["job"], self.job.name)
        of = {event["event"]: event for event in reversed(events)}
        status = self.job.status()
        self.assertEqual(of["commit"]["checkpoint"], "base")
        self.assertEqual(of["commit"]["tensors"], status["checkpoints"][0]["tensors"])
        last = [event for event in events if event["event"] == "reshard_ended"][0]
        self.assertEqual((last["checkpoint"], last["from"], last["to"]), ("base", "tp1-pp1-dp1", "tp2-pp1-dp1"))
        self.assertIn("bad", of["commit_refused"]["why"])
        self.assertNotIn("why", of["layout_refused"])  # it may quote what not all may read
        self.assertEqual(of["removed"]["checkpoint"], "base")
        told = self.ptc(self.job.name).stdout
        self.assertRegex(told, r"(?m)^2\S+Z \S+ commit: base, \d+ tensors, .*, tp1-pp1-dp1$")
        self.assertRegex(told, r"(?m) reshard ended: base, tp1-pp1-dp1 to tp2-pp1-dp1, .* kept, .* written, ")
        self.assertEqual(len(told.splitlines()), len(events))

    def test_a_new_start_and_a_torn_line(self):
        self.commit("base")
        before = self.events()
        self.mount.stop(kill=True)
        with open(self.file(), "ab") as file:
            file.write(b'{"seq":99,"time":"20')
        self.mount.start()
        after = self.events()
        self.assertEqual(after[:len(before)], before)
        self.assertEqual([event["event"] for event in after[len(before):]], ["daemon_started"])
        self.assertEqual(after[-1]["seq"], before[-1]["seq"] + 1)
        self.assertEqual(after[-1]["checkpoints"], 1)
        with open(self.file(), "rb") as file:
            self.assertNotIn(b'"seq":99', file.read())

    def test_it_does_not_grow_for_ever(self):
        self.commit("base")
        self.mount.stop()
        line = '{"seq":%d,"time":"2026-01-01T00:00:00.000Z","node":"a","event":"pinned","checkpoint":"base"}\n'
        models.write_file(self.file(), "".join(line % number for number in range(1, 2000)).encode())
        self.mount.start()
        for _ in range(2):
            self.mount.ptc("pin", f"{self.job.name}/base")
            self.mount.ptc("pin", "--remove", f"{self.job.name}/base")
        events = self.events()
        self.assertEqual(len(events), 1000)
        self.assertEqual([event["seq"] for event in events], list(range(events[0]["seq"], events[0]["seq"] + 1000)))
        self.assertEqual([event["event"] for event in events[-3:]], ["unpinned", "pinned", "unpinned"])
        with open(self.file(), "rb") as file:
            self.assertLess(file.read().count(b"\n"), 1010)

    def test_the_file(self):
        self.commit("base")
        path = self.job.file(".events.jsonl")
        self.assertNotIn(".events.jsonl", os.listdir(self.job.path))
        self.assertEqual(len(mount.read_text(path).splitlines()), len(self.events()))
        self.assertEqual(os.stat(path).st_mode, os.stat(self.job.file("status.json")).st_mode)
        for change in (lambda: open(path, "w", encoding="utf-8"), lambda: os.rename(self.job.file("layout.json"), path)):
            self.assertNotEqual(mount.error_of(change), None)
        self.mount.ptc("rm", "-y", "--force", self.job.name)
        self.assertFalse(os.path.exists(os.path.dirname(self.file())))
        os.mkdir(self.job.path)  # and another of its name begins anew
        self.assertEqual(self.kinds(), ["job_made"])

    def test_since_and_all_jobs(self):
        self.commit("base")
        time.sleep(1.1)
        now = datetime.datetime.now(datetime.timezone.utc)
        self.mount.ptc("pin", f"{self.job.name}/base")
        utc = now.strftime("%Y-%m-%dT%H:%M:%S")
        east = (now + datetime.timedelta(hours=1)).strftime("%Y-%m-%d %H:%M:%S") + "+01:00"
        for since in (utc + "Z", east, str(int(now.timestamp())), now.isoformat().replace("+00:00", "Z")):
            self.assertEqual(self.kinds(self.job.name, "--since", since), ["pinned"], since)
        local = now.astimezone().strftime("%Y-%m-%dT%H:%M:%S")
        self.assertEqual(self.kinds(self.job.name, "--since", local), ["pinned"])
        self.assertGreater(len(self.kinds(self.job.name, "--since", "1h")), 1)
        self.assertEqual(self.kinds(self.job.name, "--since", "0s"), [])
        for wrong in ("yesterday", "5x", "2026-13-01", "2026-01-01T00:00:00+1", "-5m"):
            done = self.ptc(self.job.name, f"--since={wrong}", check=False)
            self.assertEqual(done.returncode, 2, wrong)
            self.assertIn("is no time", done.stderr)
        for where in ((), (self.mount.path,)):
            events = self.events(*where, "--since", utc + "Z")
            self.assertEqual([(event["job"], event["event"]) for event in events], [(self.job.name, "pinned")])
        told = self.ptc("--since", utc + "Z").stdout
        self.assertRegex(told, rf" {re.escape(self.job.name)}: pinned: base\n")

    def test_follow(self):
        self.commit("base")
        with subprocess.Popen([self.mount.bin + "/ptc", "-C", self.mount.path, "events", self.job.name, "--follow", "--since", "0s",
                               "--json"], stdout=subprocess.PIPE, text=True) as follower:
            try:
                time.sleep(0.7)
                self.mount.ptc("pin", f"{self.job.name}/base")
                self.assertEqual(json.loads(follower.stdout.readline())["event"], "pinned")
                self.mount.ptc("pin", "--remove", f"{self.job.name}/base")
                self.assertEqual(json.loads(follower.stdout.readline())["event"], "unpinned")
            finally:
                follower.send_signal(signal.SIGINT)
                follower.wait(10)

    def test_a_full_store_stops_nothing(self):
        self.commit("base")
        os.remove(self.file())
        os.symlink("/dev/full", self.file())  # which is not followed
        self.mount.ptc("pin", f"{self.job.name}/base")
        self.assertTrue(self.job.status()["checkpoints"][0]["pinned"])
        os.remove(self.file())
        self.mount.ptc("pin", "--remove", f"{self.job.name}/base")
        self.assertEqual(self.kinds(), ["unpinned"])


if __name__ == "__main__":
    mount.main()
