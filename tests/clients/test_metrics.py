"""The numbers that a mount gives away are well formed, and they move with what is done."""
import datetime
import json
import os
import shutil
import struct
import subprocess
import time
import unittest

import models
import mount
import prometheus


class Metrics(mount.TestCase):
    def text(self):
        return mount.read_text(self.mount.path + "/.ptc/metrics")

    def metrics(self):
        return prometheus.check(self.text())

    def value(self, name, **labels):
        return self.metrics().get((name, tuple(labels.items())), 0)

    def committed(self, name=None):
        job = self.mount.job(name) if name else self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.wait()
        return job

    def test_requests_are_counted_with_their_time(self):
        before = self.metrics()
        for _ in range(10):
            os.stat(self.mount.path + "/.ptc")
            self.assertFalse(os.path.exists(self.mount.path + "/no-such-job"))
        after = self.metrics()

        def grown(name, **labels):
            key = name, tuple(labels.items())
            return after[key] - before.get(key, 0)
        self.assertGreaterEqual(grown("ptcfs_requests_total", operation="lookup"), 10)
        self.assertGreaterEqual(grown("ptcfs_request_errors_total", operation="lookup"), 10)
        self.assertGreaterEqual(grown("ptcfs_request_duration_seconds_count", operation="lookup"), 10)
        self.assertGreater(grown("ptcfs_request_duration_seconds_sum", operation="lookup"), 0)
        self.assertGreater(grown("ptcfs_read_bytes_total"), 0)  # the first text was read

    def test_a_removal_asks_once_a_name(self):
        """However many directories lead to a name: their attributes are the kernel's, until hidden names may come back."""
        job = self.new_job()
        rows = models.Llama().tensors[0].data[:8]
        tensors = [models.Tensor(f"a.layers.{layer}.b.{part}.c.weight", "F32", (2,), rows) for layer in range(30) for part in range(8)]
        models.write_safetensors(job.incoming("base") + "/rank/0/model.safetensors", tensors)
        job.commit("base")
        at = job.file("checkpoints/base")
        names = sum(len(directories) + len(files) for _, directories, files in os.walk(at))
        before = self.value("ptcfs_requests_total", operation="getattr")
        shutil.rmtree(at)
        self.assertLess(self.value("ptcfs_requests_total", operation="getattr") - before, 1.5 * names)
        self.assertFalse(os.path.exists(at))

    def test_a_job_is_seen(self):
        job = self.committed()
        name = job.name
        self.assertEqual(self.value("ptcfs_job_checkpoints", job=name), 1)
        self.assertEqual(self.value("ptcfs_job_commits_total", job=name, outcome="done"), 1)
        self.assertGreater(self.value("ptcfs_job_last_commit_duration_seconds", job=name), 0)
        self.assertEqual(self.value("ptcfs_job_reshards_total", job=name, outcome="done"), 0)
        job.set_layout(tp=2)
        status = job.status()
        self.assertEqual(self.value("ptcfs_job_reshards_total", job=name, outcome="done"), 1)
        self.assertEqual(self.value("ptcfs_job_in_force_revision", job=name), status["revision"])
        self.assertEqual(self.value("ptcfs_job_state", job=name, state="idle"), 1)
        self.assertEqual(self.value("ptcfs_job_state", job=name, state="failed"), 0)
        self.assertEqual(self.value("ptcfs_job_checkpoint_bytes", job=name),
                         status["checkpoints"][0]["bytes"])
        self.assertGreater(self.value("ptcfs_job_last_reshard_duration_seconds", job=name), 0)
        plan = json.loads(mount.read_text(job.file("plan.json")))
        for kind in ("kept", "local", "moved", "minimum"):
            self.assertEqual(self.value("ptcfs_job_last_reshard_bytes", job=name, kind=kind),
                             plan["bytes"][kind], kind)

    def test_the_newest_checkpoint(self):
        job = self.committed()
        said = datetime.datetime.fromisoformat(job.status()["checkpoints"][0]["time"]).timestamp()
        self.assertAlmostEqual(self.value("ptcfs_job_newest_checkpoint_timestamp_seconds", job=job.name), said, delta=0.002)
        models.Llama(2).write_hf(job.incoming("next") + "/rank/0")
        job.commit("next")
        self.assertGreater(self.value("ptcfs_job_newest_checkpoint_timestamp_seconds", job=job.name), said)
        for name in ("lost_tensors", "unreadable_checkpoints", "missing_copy_bytes"):
            self.assertEqual(self.metrics()[(f"ptcfs_job_{name}", (("job", job.name),))], 0)
        for name in ("base", "next"):
            self.mount.ptc("rm", "-y", "--force", f"{job.name}/{name}")
        self.assertNotIn(("ptcfs_job_newest_checkpoint_timestamp_seconds", (("job", job.name),)), self.metrics())

    def dataset(self, job):
        return {name[len("ptcfs_dataset_"):]: int(value) for (name, labels), value in self.metrics().items()
                if name.startswith("ptcfs_dataset_") and labels == (("job", job.name),)}

    def data_set_state(self, job):
        (state,) = [dict(labels)["state"] for (name, labels), value in self.metrics().items()
                    if name == "ptcfs_dataset_state" and labels[0] == ("job", job.name) and value]
        return state

    def test_a_data_set(self):
        job = self.committed()
        self.assertEqual(self.dataset(job), {})
        models.write_file(self.temporary("shards") + "/a.jsonl", b'{"a": 1}\n' * 60)

        def save(name, text):
            with open(job.file("dataset", name), "w", encoding="utf-8") as file:
                file.write(text)
        save("order.json", '{"batch": 12, "seed": 1, "epochs": 3}')
        self.assertEqual(self.data_set_state(job), "no source.json")
        self.assertEqual(self.dataset(job), {"read_errors": 0, "consumed_samples": 0})
        save("source.json", json.dumps({"shards": self.temporary("shards")}))
        deadline = time.monotonic() + 30
        while self.data_set_state(job) != "ready":
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        run = {"read_errors": 0, "consumed_samples": 0, "epoch": 0, "samples": 60, "end_samples": 180, "batch_samples": 12,
               "dp_ranks": 1, "generation": 1, "dp_changes": 0}
        self.assertEqual(self.dataset(job), run)
        save("consumed", "72")
        self.assertEqual(self.dataset(job), {**run, "consumed_samples": 72, "epoch": 1})
        job.set_layout(dp=2)
        while self.dataset(job)["dp_ranks"] != 2:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        status = json.loads(mount.read_text(job.file("dataset/status.json")))
        self.assertEqual(self.dataset(job), {**run, "consumed_samples": 72, "epoch": 1, "dp_ranks": 2, "dp_changes": 1,
                                             "generation": int(status["generation"])})
        self.assertGreater(int(status["generation"]), 1)
        self.assertEqual(self.data_set_state(job), status["state"])

    def test_what_is_refused_is_counted(self):
        job = self.committed()
        os.makedirs(job.incoming("bad") + "/rank/0")
        models.write_file(job.incoming("bad") + "/rank/0/model.safetensors", b"rubbish")
        self.assertEqual(mount.error_of(job.commit, "bad"), "ECANCELED")
        self.assertEqual(self.value("ptcfs_job_commits_total", job=job.name, outcome="refused"), 1)

    def test_names_of_users_are_escaped(self):
        name = 'a"b\\c\nd{job="x"} é'
        self.committed(name)
        self.assertEqual(self.value("ptcfs_job_checkpoints", job=name), 1)

    def test_files_that_the_kernel_reads(self):
        if not self.value("ptcfs_passthrough_enabled"):
            self.skipTest("the kernel reads nothing by itself here")
        job = self.committed()
        job.set_layout(tp=2)
        opens = self.value("ptcfs_passthrough_opens_total")
        with open(job.rank_file("base", "tp2-pp1-dp1", 0), "rb") as file:
            self.assertEqual(self.value("ptcfs_passthrough_opens_total"), opens + 1)
            self.assertGreaterEqual(self.value("ptcfs_passthrough_files"), 1)
            before, read = self.value("ptcfs_read_bytes_total"), 0
            for _ in range(50):
                file.seek(0)
                read += len(file.read())
            self.assertLess(self.value("ptcfs_read_bytes_total") - before, read)

    def test_the_gather_cache_is_seen(self):
        if not self.value("ptcfs_passthrough_enabled"):
            self.skipTest("the kernel reads nothing by itself here, so nothing is gathered")
        job = self.committed()
        path = self.large_computed_file(job)
        misses, hits = (self.value(f"ptcfs_gather_cache_{what}_total") for what in ("misses", "hits"))
        for _ in range(3):
            with open(path, "rb") as file:
                file.read()
        self.assertEqual(self.value("ptcfs_gather_cache_misses_total"), misses + 1)
        self.assertEqual(self.value("ptcfs_gather_cache_hits_total"), hits + 2)
        self.assertGreaterEqual(self.value("ptcfs_gather_cache_bytes"), os.stat(path).st_size)
        self.assertGreaterEqual(self.value("ptcfs_gather_cache_limit_bytes"),
                                self.value("ptcfs_gather_cache_bytes"))

    def large_computed_file(self, job):
        """A file of 1 MiB under a layout that nobody asked for."""
        header = json.dumps({"model.norm.weight": {
            "dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}).encode()
        os.makedirs(job.incoming("large") + "/rank/0")
        models.write_file(job.incoming("large") + "/rank/0/model.safetensors",
                          struct.pack("<Q", len(header)) + header + bytes(1 << 20))
        models.write_file(job.incoming("large") + "/rank/0/config.json", b'{"model_type": "llama"}')
        job.commit("large")
        job.wait()
        return job.checkpoint("large", "model/model/norm/weight.npy")

    def test_process_and_build(self):
        samples = self.metrics()
        self.assertGreater(samples[("process_resident_memory_bytes", ())], 1 << 20)
        self.assertGreater(samples[("process_open_fds", ())], 3)
        started = samples[("process_start_time_seconds", ())]
        self.assertAlmostEqual(started, os.stat(f"/proc/{self.mount.process.pid}").st_mtime, delta=60)
        self.assertTrue([k for k in samples if k[0] == "ptcfs_build_info"])

    def test_there_are_few_series_without_jobs(self):
        with mount.Mount() as fresh:
            text = mount.read_text(fresh.path + "/.ptc/metrics")
        self.assertLess(len(prometheus.check(text)), 400)

    def test_promtool_agrees(self):
        if not shutil.which("promtool"):
            self.skipTest("promtool is not installed")
        self.committed()
        done = subprocess.run(["promtool", "check", "metrics"], input=self.text(), text=True,
                              capture_output=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


class Strictness(unittest.TestCase):
    def test_the_checker_refuses_rubbish(self):
        good = "# HELP a_total A.\n# TYPE a_total counter\na_total{x=\"1\"} 2\n"
        self.assertEqual(prometheus.check(good), {("a_total", (("x", "1"),)): 2})
        for bad in (good[:-1], good * 2, good.replace("counter", "gauge"),
                    good.replace('"1"', '"1'), good.replace(" 2", ""), good.replace("# HELP", "#"),
                    good + 'a_total{x="1"} 3\n', good + "b_total 1\n", good.replace(" 2", " NaN")):
            with self.assertRaises((AssertionError, ValueError), msg=bad):
                prometheus.check(bad)


if __name__ == "__main__":
    mount.main()
