"""Layouts in the memory of devices, which are HostDevices here: a real daemon, a real model."""
import os
import unittest

import models
import mount

safetensors = mount.require("safetensors.numpy")


class Small(models.Llama):
    dtype = "F32"  # which numpy knows


class Large(Small):
    """Of some 64 MB, nearly all of it in two tensors."""
    vocab = 125_000
    config = {**models.Llama.config, "vocab_size": vocab}


class Medium(Small):
    """Of some 31 MB: more than half of the room in a device."""
    vocab = 60_000
    config = {**models.Llama.config, "vocab_size": vocab}


class DeviceTier(unittest.TestCase):
    """Each test has a daemon of its own: one of them starts it again."""

    def setUp(self):
        self.mount = mount.Mount("--gpu", "host:64M,64M").__enter__()
        self.addCleanup(self.mount.__exit__)
        self.model = Small()
        self.job = self.mount.job("llama")
        self.model.write_hf(self.job.incoming("base") + "/rank/0")
        self.job.commit("base")

    def check(self, tp, job=None, model=None):
        """All ranks' files, by our reader and by safetensors' own."""
        for rank in range(tp):
            path = (job or self.job).rank_file("base", f"tp{tp}-pp1-dp1", rank)
            held = {tensor.name: tensor for tensor in (model or self.model).rank_tensors(tp, 1, rank, 0)}
            found = models.read_safetensors(path)
            self.assertEqual(set(found), set(held))
            for name, tensor in held.items():
                self.assertEqual(found[name], tensor, f"tp{tp} rank {rank}: {name}")
            loaded = safetensors.load_file(path)
            self.assertEqual({name: array.tobytes() for name, array in loaded.items()},
                             {name: bytes(tensor.data) for name, tensor in held.items()})

    def devices(self, job=None):
        """Of the newest checkpoint, by memory: bytes."""
        newest = (job or self.job).status()["checkpoints"][-1]
        return {one["memory"]: one["bytes"] for one in newest.get("devices", [])}

    def images(self):
        return [name for name in os.listdir(self.mount.store + "/images") if "." not in name]

    def test_there_and_back(self):
        files = len(self.images())
        self.job.set_layout(tp=2, memory="device")
        self.check(2)
        self.assertEqual(set(self.devices()), {"cuda:0", "cuda:1"})
        self.assertEqual(len(self.images()), files - 1, "the weights are in no file")
        self.assertIn("alone", self.job.status()["warnings"][0])
        self.assertIn("cuda:1", self.mount.ptc("status", "llama").stdout)
        verified = self.mount.ptc("verify", "llama/base").stdout
        self.assertIn("good", verified)
        self.assertIn("cuda:0", verified)
        before = {rank: mount.read_bytes(self.job.rank_file("base", "tp2-pp1-dp1", rank)) for rank in range(2)}
        self.job.set_layout(tp=4, memory="device")  # from device to device
        self.check(4)
        self.assertEqual(set(self.devices()), {"cuda:0", "cuda:1"})
        for rank, held in before.items():  # computed out of devices' memory when read
            self.assertEqual(mount.read_bytes(self.job.rank_file("base", "tp2-pp1-dp1", rank)), held)
        self.job.set_layout(tp=4, memory="host")
        self.check(4)
        self.assertEqual(self.devices(), {})
        self.assertEqual(self.job.status()["warnings"], [])
        self.mount.ptc("layout", "llama", "set", "--memory", "device", "--wait")
        self.check(4)
        self.assertEqual(set(self.devices()), {"cuda:0", "cuda:1"})
        self.mount.ptc("layout", "llama", "set", "--tp", "1", "--memory", "host", "--wait")
        self.check(1)
        self.assertEqual(mount.read_json(self.job.file("layout.json"))["memory"], "host")

    def test_ranks_are_where_the_layout_says(self):
        node = self.job.status()["nodes"][0]["name"]
        self.job.set_layout(tp=2, memory="device", devices=[f"{node}:1", f"{node}:0"])
        self.check(2)
        self.assertEqual(set(self.devices()), {"cuda:0", "cuda:1"})
        self.job.set_layout(tp=1, memory="device", devices=[f"{node}:1"])
        self.check(1)
        self.assertEqual(set(self.devices()), {"cuda:1"})
        self.assertEqual(mount.error_of(self.save, {"tp": 1, "memory": "device", "devices": [f"{node}:2"]}), "EINVAL")
        self.assertIn("which node", self.job.error() + str(self.job.status()["layout_error"]))

    def save(self, fields, job=None):
        (job or self.job).save_layout(**fields)

    def test_bad_values(self):
        self.assertEqual(mount.error_of(self.save, {"memory": "gpu"}), "EINVAL")
        done = self.mount.ptc("layout", "llama", "set", "--memory", "cuda:0", check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("'memory' must be", done.stderr)
        ptcfs = os.path.join(self.mount.bin, "ptcfs")
        for bad, why in (("gpu", "is none of"), ("host:1M", "too small"), ("0,0", "named twice"), ("host:", "size")):
            done = mount.subprocess.run([ptcfs, "-f", "--gpu", bad, self.mount.top], capture_output=True, text=True,
                                        timeout=20, check=False)
            self.assertEqual(done.returncode, 1, bad)
            self.assertIn(why, done.stderr)

    def test_too_little_room_is_refused_before_anything_moves(self):
        job, model = self.mount.job("large"), Large()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        before = job.status()
        self.assertNotEqual(mount.error_of(self.save, {"tp": 1, "memory": "device"}, job), "")
        said = job.status()["layout_error"]["what"]
        for part in ("not enough memory on cuda:0", "48.0 MiB are free", "are missing"):
            self.assertIn(part, said)
        self.assertEqual(job.status()["in_force_revision"], before["in_force_revision"])
        self.assertEqual(self.devices(job), {})
        job.set_layout(tp=2, memory="device")  # half of it on each has room
        self.check(2, job, model)
        self.assertNotEqual(mount.error_of(self.save, {"tp": 4, "memory": "device"}, job), "")
        self.check(2, job, model)

    def test_no_device(self):
        self.mount.stop()
        self.mount.options = ("--gpu", "off")
        self.mount.start()
        self.assertEqual(mount.error_of(self.save, {"tp": 2, "memory": "device"}), "EINVAL")
        self.assertIn("start its ptcfs with --gpu", self.job.status()["layout_error"]["what"])

    def test_a_commit_comes_into_the_devices_and_older_ones_leave_them(self):
        self.job.set_layout(tp=1, memory="device")
        other = Small(seed=2)
        other.write_hf(self.job.incoming("next") + "/rank/0")
        self.job.commit("next")
        self.job.wait()
        deadline = mount.time.monotonic() + 20
        while mount.time.monotonic() < deadline:
            older, newest = self.job.status()["checkpoints"]
            if "devices" in newest and "devices" not in older:
                break
            mount.time.sleep(0.05)
        self.assertEqual(newest["name"], "next")
        self.assertIn("devices", newest)
        self.assertNotIn("devices", older)
        self.check(1)

    def wait_newest_in_devices(self, job, name):
        """It alone."""
        deadline = mount.time.monotonic() + 30
        while True:
            status = job.status()
            *older, newest = status["checkpoints"]
            self.assertEqual(newest["name"], name)
            if "devices" in newest and not any("devices" in one for one in older) and status["state"] == "idle":
                return status
            if mount.time.monotonic() > deadline:
                self.fail(status)
            mount.time.sleep(0.05)

    def test_where_two_have_no_room_the_older_one_leaves_first(self):
        job = self.mount.job("medium")
        kept = {}
        for seed, name in ((1, "base"), (2, "next"), (3, "third")):
            kept[name] = Medium(seed=seed)
            kept[name].write_hf(job.incoming(name) + "/rank/0")
            job.commit(name)
            if name == "base":
                job.set_layout(tp=1, memory="device")
            status = self.wait_newest_in_devices(job, name)
            self.assertIsNone(status["last_error"])
        for name, model in kept.items():
            found = models.read_safetensors(job.rank_file(name, "tp1-pp1-dp1", 0))
            self.assertEqual(found, {tensor.name: tensor for tensor in model.rank_tensors(1, 1, 0, 0)}, name)

    def test_what_no_daemon_brought_into_devices_the_next_one_does(self):
        self.job.set_layout(tp=1, memory="device")
        self.mount.stop()
        self.mount.options = ("--gpu", "off")
        self.mount.start()  # with which base is lost, and that holds up no other
        Small(seed=2).write_hf(self.job.incoming("next") + "/rank/0")
        self.job.commit("next")
        self.job.wait()  # without devices it is in the host's memory
        self.assertEqual(self.devices(), {})
        self.mount.stop()
        self.mount.options = ("--gpu", "host:64M,64M")
        self.mount.start()
        self.wait_newest_in_devices(self.job, "next")

    def test_after_a_start_it_is_lost_and_named(self):
        self.job.set_layout(tp=2, memory="device")
        self.mount.stop()
        self.mount.start()
        status = self.job.status()
        self.assertTrue(any("lost 48 tensors" in warning for warning in status["warnings"]), status["warnings"])
        self.assertEqual(mount.error_of(mount.read_bytes, self.job.rank_file("base", "tp2-pp1-dp1", 0)), "EIO")
        self.mount.stop()
        self.mount.start()
        events = self.mount.ptc("events", "llama").stdout
        self.assertEqual(events.count("48 tensors are lost"), 1, events)
        self.mount.ptc("rm", "llama/base", "--force", check=False)
        job = self.mount.job("again")  # and the daemon goes on
        self.model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2, memory="device")
        self.check(2, job)


if __name__ == "__main__":
    mount.main()
