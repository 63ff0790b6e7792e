"""Data sets: what plain Python, tarfile and NumPy read from <job>/dataset/, over changes of dp and batch."""
import array
import glob
import io
import json
import multiprocessing
import os
import shutil
import tarfile
import time

import mount

SAMPLES = 40  # a key has 3 members: .json, .bin, .cls


def member(key, kind):
    if kind == "json":
        return json.dumps({"key": key}).encode()
    return bytes([key % 251]) * (key * 37 % 5000) if kind == "bin" else str(key % 10).encode()


def write_shards(directory, samples=SAMPLES, shard=16):
    """A WebDataset: 16 samples a tar."""
    os.makedirs(directory)
    for first in range(0, samples, shard):
        with tarfile.open(f"{directory}/{first // shard:05}.tar", "w") as tar:
            for key in range(first, min(samples, first + shard)):
                for kind in ("json", "bin", "cls"):
                    data = member(key, kind)
                    info = tarfile.TarInfo(f"{key:06}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def keys_of_tar(path):
    """The samples of a tar, in order; their bytes are checked."""
    keys = []
    with tarfile.open(path) as tar:
        for info in tar:
            key, kind = info.name.split(".")
            if tar.extractfile(info).read() != member(int(key), kind):
                raise AssertionError(f"{info.name} of {path} is not what was written")
            if kind == "json":
                keys.append(int(key))
    return keys


def ids_of(path):
    with open(path, "rb") as file:
        return array.array("Q", file.read()).tolist()


def wait_for(check, what):
    deadline = time.monotonic() + 60
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError("never: " + what)
        time.sleep(0.02)


class DataSet(mount.TestCase):
    def begin(self, dp=3, **order):
        self.job = self.new_job()
        self.job.set_layout(dp=dp)
        self.data = self.temporary("data")
        write_shards(self.data)
        self.save("source.json", json.dumps({"shards": [self.data]}))
        self.save("order.json", json.dumps({"batch": 6, "seed": 5, **order}))
        wait_for(lambda: os.path.lexists(self.at("head")), self.status())

    def at(self, *parts):
        return self.job.file("dataset", *parts)

    def save(self, name, text):
        with open(self.at(name), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def refused(self, name, text):
        self.assertEqual(mount.error_of(self.save, name, text), "EINVAL")
        error = self.status()["error"]
        self.assertEqual(self.job.error(), f"dataset/{name} refused: {error}")
        told = self.mount.ptc("status", self.job.name).stdout
        self.assertIn("".join(error.split()), "".join(told.split()))
        return error

    def status(self):
        return mount.read_json(self.at("status.json"))

    def set_dp(self, dp, generation):
        self.job.set_layout(dp=dp)
        wait_for(lambda: os.readlink(self.at("head")) == "gen/" + generation, f"dp {dp}: {self.status()}")

    def tars(self, rank, generation="head", epoch=0):
        return sorted(glob.glob(os.path.realpath(self.at(generation)) + f"/rank-{rank:03}/tar/e{epoch:03}/*.tar"))

    def global_order(self, dp=1):
        """All samples of epoch 0 in their order, by the ids of a batch's ranks."""
        steps = [self.tars(rank) for rank in range(dp)]
        return [key for step in zip(*steps) for path in step for key in keys_of_tar(path)]

    def test_other_samples_once_some_are_consumed(self):
        self.begin()
        self.save("consumed", "12")
        other = self.temporary("other")
        write_shards(other)
        with tarfile.open(sorted(glob.glob(other + "/*.tar"))[0], "a") as more:
            more.addfile(tarfile.TarInfo("one-more.txt"))
        self.save("source.json", json.dumps({"shards": [other]}))
        wait_for(lambda: self.status()["state"] == "refused", self.status())
        told = "".join(self.mount.ptc("status", self.job.name).stdout.split())
        self.assertIn("dataset" + "refused:" + "".join(self.status()["error"].split()), told)
        self.save("source.json", json.dumps({"shards": [self.data]}))
        wait_for(lambda: self.status()["state"] == "ready", self.status())
        self.assertNotIn("data set", self.mount.ptc("status", self.job.name).stdout)

    def test_names(self):
        self.begin()
        self.assertEqual(os.listdir(self.at()), ["head", "order.json", "source.json", "consumed",
                                                 "plan.json", "status.json", "gen"])
        self.assertEqual(sorted(os.listdir(self.at("head"))), ["global", "rank-000", "rank-001", "rank-002"])
        self.assertEqual(sorted(os.listdir(self.at("head/rank-000"))), ["files", "ids.u64", "tar"])
        self.assertEqual(mount.read_text(self.at("consumed")), "0\n")
        self.assertEqual(self.status()["source"]["samples"], SAMPLES)
        self.assertIn("shardshuffle=False", mount.read_text(self.at("head/rank-000/tar/README")))
        plan = mount.read_json(self.at("plan.json"))
        self.assertEqual(plan["segments"][0]["dp"], 3)

    def test_every_sample_once_over_changes(self):
        self.begin()
        order = self.global_order(3)
        self.assertEqual(sorted(order), list(range(SAMPLES)))
        self.assertNotEqual(order, sorted(order))
        seen = [key for i in range(2) for rank in range(3) for key in keys_of_tar(self.tars(rank)[i])]
        self.save("consumed", "12")
        self.set_dp(2, "000002")
        seen += [key for i in range(1) for rank in range(2) for key in keys_of_tar(self.tars(rank)[i])]
        self.save("consumed", "18\n")
        self.save("order.json", json.dumps({"batch": 8, "seed": 5}))
        self.assertEqual(os.readlink(self.at("head")), "gen/000003")
        seen += self.global_order(2)
        self.assertEqual(seen, order)
        # The first generation is still what it was.
        steps = [self.tars(rank, "gen/000001") for rank in range(3)]
        self.assertEqual([key for step in zip(*steps) for path in step for key in keys_of_tar(path)], order)

    def test_readers_in_processes_over_a_change(self):
        self.begin()
        paths = [path for rank in range(3) for path in self.tars(rank)]
        held = open(paths[-1], "rb")
        with multiprocessing.Pool(4) as pool:
            first = pool.map_async(keys_of_tar, paths * 5)
            self.save("consumed", "6")
            self.set_dp(1, "000002")
            second = pool.map_async(keys_of_tar, self.tars(0))
            first, second = first.get(60), second.get(60)
        self.assertEqual(sorted(key for keys in first for key in keys), sorted(list(range(SAMPLES)) * 5))
        self.assertEqual(len([key for keys in second for key in keys]), SAMPLES - 6)
        with held, open(paths[-1], "rb") as again:
            self.assertEqual(held.read(), again.read())

    def test_files_and_ids(self):
        numpy = mount.require("numpy")
        self.begin(epochs=2)
        for rank in range(3):
            ids = ids_of(self.at(f"head/rank-{rank:03}/ids.u64"))
            self.assertEqual(numpy.memmap(self.at(f"head/rank-{rank:03}/ids.u64"), "<u8", "r").tolist(), ids)
            names = sorted(os.path.basename(path)
                           for path in glob.glob(self.at(f"head/rank-{rank:03}/files/e000/*/*.json")))
            found = [int(name.split("_")[1].split(".")[0]) for name in names]
            self.assertEqual(found, ids[:len(found)])
            for name in names[:3]:
                key = int(name.split("_")[1].split(".")[0])
                for kind in ("json", "bin", "cls"):
                    path = self.at(f"head/rank-{rank:03}/files/e000/000", name.replace("json", kind))
                    with open(path, "rb") as file:
                        self.assertEqual(file.read(), member(key, kind))
            tar_keys = [key for e in range(2) for path in self.tars(rank, epoch=e) for key in keys_of_tar(path)]
            self.assertEqual(tar_keys, ids)

    def test_sizes_and_offsets(self):
        self.begin()
        path = self.tars(1)[2]
        with open(path, "rb") as file:
            whole = file.read()
        self.assertEqual(os.path.getsize(path), len(whole))
        fd = os.open(path, os.O_RDONLY)
        for offset in range(0, len(whole), 777):
            self.assertEqual(os.pread(fd, 1000, offset), whole[offset:offset + 1000])
        self.assertEqual(os.pread(fd, 10, len(whole)), b"")
        os.close(fd)
        self.assertEqual(mount.error_of(open, path, "r+b"), "EROFS")
        self.assertEqual(mount.error_of(os.unlink, path), "EROFS")
        self.assertEqual(mount.error_of(open, os.path.dirname(path) + "/new", "wb"), "EROFS")

    def test_refusals(self):
        self.begin()
        self.assertIn("unknown key 'bach' (did you mean 'batch'?)", self.refused("order.json", '{"bach": 6}'))
        self.assertIn("order.json: line 1, column 11: a global batch of 7", self.refused("order.json", '{"batch": 7}'))
        self.assertEqual(mount.read_json(self.at("order.json"))["batch"], 6)
        self.assertIn("unknown key", self.refused("source.json", '{"shard": []}'))
        self.assertIn("not a count", self.refused("consumed", "six"))
        self.assertIn("more than the 40 samples", self.refused("consumed", "41"))
        self.save("consumed", "8")
        self.assertIn("less than the 8", self.refused("consumed", "6"))
        # A layout whose dp does not fit, or not here.
        for dp, why in ((4, "does not divide among 4"), (2, "the nearest ends of steps are 6 and 12")):
            self.assertEqual(mount.error_of(lambda: self.job.save_layout(dp=dp)), "EINVAL")
            self.assertIn(why, self.job.error())
        self.assertEqual(mount.read_json(self.job.file("layout.json"))["dp"], 3)
        self.save("consumed", "12")
        self.set_dp(2, "000002")

    def test_back_with_a_checkpoint(self):
        self.begin(dp=1)
        self.save("consumed", "12")
        rank = self.job.incoming("step2") + "/rank/0"
        os.makedirs(rank)
        mount.require("numpy").save(rank + "/w.npy", [1.0, 2.0])
        shutil.copy(self.at("consumed"), rank + "/consumed")
        self.job.commit("step2")
        self.save("consumed", "18")
        self.save("order.json", json.dumps({"batch": 3, "seed": 5}))
        self.save("consumed", "24")
        self.assertIn("goes back only together with a checkpoint", self.refused("consumed", "18"))
        held = self.tars(0)[1]
        with open(held, "rb") as file:
            self.save("consumed", mount.read_text(self.job.checkpoint(
                "step2", "layouts/tp1-pp1-dp1/rank/0/consumed")))
            self.assertTrue(file.read())
        self.assertEqual(os.readlink(self.at("head")), "gen/000003")
        self.assertEqual(os.listdir(self.at("gen")), ["000001", "000003"])
        self.assertEqual(mount.read_json(self.at("plan.json"))["segments"][-1]["from"], 12)

    def test_survives_a_kill(self):
        self.begin()
        self.save("consumed", "6")
        order = self.global_order(3)
        inode = os.stat(self.tars(0)[0]).st_ino
        self.mount.stop(kill=True)
        self.mount.start()
        wait_for(lambda: os.path.lexists(self.at("head")), "an index")
        self.assertEqual(mount.read_text(self.at("consumed")), "6\n")
        self.assertEqual(self.global_order(3), order)
        self.assertEqual(os.stat(self.tars(0)[0]).st_ino, inode)

    def test_a_shard_that_changes(self):
        self.begin(shuffle="none")
        path = self.tars(0)[0]
        with open(f"{self.data}/00000.tar", "r+b") as file:
            file.truncate(2048)
        with open(path, "rb") as file:
            self.assertEqual(mount.error_of(file.read), "EIO")
        self.assertIn("00000.tar", json.dumps(self.status()["read_errors"]))
        told = " ".join(self.mount.ptc("status", self.job.name).stdout.split())
        self.assertIn("a read failed:", told)
        self.assertIn("save source.json again", told)
        self.save("source.json", mount.read_text(self.at("source.json")))
        wait_for(lambda: "read_errors" not in self.status(), "what was indexed anew has not failed yet")

    def test_large_batches_are_gathered(self):
        self.job = self.new_job()
        data = self.temporary("large")
        os.mkdir(data)
        with tarfile.open(f"{data}/0.tar", "w") as tar:
            for key in range(12):
                info = tarfile.TarInfo(f"{key:06}.bin")
                info.size = 300_000 + key
                tar.addfile(info, io.BytesIO(bytes([key]) * info.size))
        self.save("source.json", json.dumps({"shards": [data]}))
        self.save("order.json", json.dumps({"batch": 2, "shuffle": "none"}))
        wait_for(lambda: os.path.lexists(self.at("head")), self.status())
        gathered = self.gathered_bytes()
        paths = self.tars(0)
        for number, path in enumerate(paths[:3]):
            with tarfile.open(path) as tar:
                for key, info in zip((2 * number, 2 * number + 1), tar, strict=True):
                    self.assertEqual(tar.extractfile(info).read(), bytes([key]) * (300_000 + key))
        if mount.read_json(self.mount.path + "/.ptc/stats")["passthrough"]:
            self.assertGreaterEqual(self.gathered_bytes() - gathered, sum(map(os.path.getsize, paths[:3])))
        os.utime(f"{data}/0.tar")
        with open(paths[5], "rb") as file:
            self.assertEqual(mount.error_of(file.read), "EIO")
        self.assertIn("0.tar", json.dumps(self.status()["read_errors"]))

    def gathered_bytes(self):
        text = mount.read_text(self.mount.path + "/.ptc/metrics")
        return int(text.split("\nptcfs_gather_cache_gathered_bytes_total ")[1].split()[0])

    def test_an_editor_replaces_order(self):
        self.begin()
        with open(self.at(".order.tmp"), "w", encoding="utf-8") as file:
            file.write('{"batch": 9, "seed": 5}')
        os.rename(self.at(".order.tmp"), self.at("order.json"))
        self.assertEqual(self.status()["batch"], 9)
        self.assertEqual(mount.error_of(os.mkdir, self.at("gen")), "EEXIST")
        self.assertEqual(mount.error_of(os.unlink, self.at("gen")), "EISDIR")

    def test_a_new_run_is_no_former_one_to_a_cache(self):
        """Hugging Face's datasets know a file by its path and time of modification."""
        def times():
            wait_for(lambda: os.path.lexists(self.at("head")), "a run")
            top = os.path.realpath(self.at("head"))
            return {os.path.relpath(path, top): os.stat(path).st_mtime
                    for path in glob.glob(top + "/rank-000/files/e000/000/*") + glob.glob(top + "/rank-000/tar/e000/*")}
        self.begin(dp=1)
        seen = [times()]
        self.assertEqual(len(set(seen[0].values())), 1)
        self.assertGreater(min(seen[0].values()), 1e9)
        for change in ({"seed": 6}, {"seed": 5}, {"batch": 8}):
            shutil.rmtree(self.at())
            os.mkdir(self.at())
            self.save("source.json", json.dumps({"shards": [self.data]}))
            self.save("order.json", json.dumps({"batch": 6, "seed": 5, **change}))
            seen.append(times())
        self.assertEqual(seen[2], seen[0])  # the same run
        self.assertEqual(len({min(one.values()) for one in seen}), 3)
        # Other samples below the same names.
        shutil.rmtree(self.at())
        path = self.data + "/00000.tar"
        with open(path, "r+b") as file:
            file.seek(512)
            file.write(b"[")
        os.mkdir(self.at())
        self.save("source.json", json.dumps({"shards": [self.data]}))
        self.save("order.json", json.dumps({"batch": 6, "seed": 5}))
        self.assertNotEqual(times(), seen[0])

    def test_saving_source_again_helps(self):
        """As the error says; also where only the content of one file of a folder has changed."""
        self.job = self.new_job()
        self.data = self.temporary("data")
        os.makedirs(self.data)
        for name in "abc":
            with open(f"{self.data}/{name}.txt", "w", encoding="utf-8") as file:
                file.write(f"file {name}")
        source = json.dumps({"shards": self.data, "format": "files"})
        self.save("source.json", source)
        self.save("order.json", '{"batch": 1, "shuffle": "none"}')

        def read():
            wait_for(lambda: os.path.lexists(self.at("head")), "a run")
            paths = sorted(glob.glob(os.path.realpath(self.at("head")) + "/rank-000/files/e000/000/*"))
            return [mount.read_text(path) for path in paths]
        self.assertEqual(read(), ["file a", "file b", "file c"])
        with open(self.data + "/b.txt", "w", encoding="utf-8") as file:
            file.write("FILE b")
        self.assertEqual(mount.error_of(lambda: open(glob.glob(self.at("head/rank-000/files/e000/000/*_1.txt"))[0]).read()),
                         "EIO")
        self.assertIn("save source.json again", mount.read_json(self.at("status.json"))["read_errors"][0])
        self.save("source.json", source)
        wait_for(lambda: os.path.lexists(self.at("head")) and os.readlink(self.at("head")).endswith("2"), "another run")
        self.assertEqual(read(), ["file a", "FILE b", "file c"])
        self.assertEqual(mount.error_of(self.save, "order.json", '{"batch": 2000000000, "tail": "pad"}'), "EINVAL")

    def test_removed_and_begun_anew(self):
        self.begin()
        self.save("consumed", "6")
        self.assertEqual(os.listdir(self.at("gen")), ["000001"])
        self.assertEqual(os.stat(self.at("gen")).st_nlink, 3)
        old = self.tars(0)[0]
        inode = os.stat(old).st_ino
        shutil.rmtree(self.at())
        self.assertFalse(os.path.exists(old))
        self.assertNotIn("dataset", os.listdir(self.job.path))
        os.mkdir(self.at())
        self.assertEqual(mount.read_text(self.at("consumed")), "0\n")
        self.assertFalse(os.path.lexists(self.at("head")))
        self.save("source.json", json.dumps({"shards": [self.data]}))
        self.save("order.json", json.dumps({"batch": 6, "seed": 6}))
        wait_for(lambda: os.path.lexists(self.at("head")), self.status())
        self.assertEqual(sorted(self.global_order(3)), list(range(SAMPLES)))
        self.assertNotEqual(os.stat(old).st_ino, inode)
        shutil.rmtree(self.job.path)
        self.assertFalse(os.path.exists(self.job.path))


if __name__ == "__main__":
    mount.main()
