"""tools/python: what becomes of saves that something comes between, on a real mount."""
import fcntl
import os
import signal
import statistics
import subprocess
import sys
import time
import unittest

import mount
import prometheus
import ranks

sys.path.insert(0, ranks.PACKAGE)
torch = mount.require("torch")
import ptc  # noqa: E402  pylint: disable=wrong-import-position
import ptc.state  # noqa: E402  pylint: disable=wrong-import-position


class Saving(ranks.TestCase):
    def test_the_group_is_destroyed_meanwhile(self):
        """As at the end of a script: no rank commits alone, and all are told. Afterwards a new group saves."""
        job = ptc.Job.create(self.mount.path + "/destroyed", dp=2)
        self.run_ranks(2, """
import threading
from ptc import group
job, go_on = ptc.Job(path), threading.Event()
group.in_background(lambda: go_on.wait(60))
future = job.save({"w": torch.ones(2), "who": rank}, "a", wait=False)
dist.destroy_process_group()
go_on.set()
try:
    raise SystemExit(future.result(60))
except ptc.PtcError as error:
    assert "destroyed before" in str(error), error
assert job.checkpoints() == []
dist.init_process_group("gloo", init_method="file://" + meet + ".again", rank=rank, world_size=size)
job.save({"w": torch.ones(2)}, "a")
""", job.path)
        self.assertEqual(job.checkpoints(), ["a"])

    def test_training_waits_for_no_more_than_the_copy(self):
        """Steps that change the parameters go on as soon as a save is copied, and each checkpoint has those of its own step. How
        long they waited is told as so many copies of as many bytes into fresh memory, made in between; nothing is required of it."""
        job = ptc.Job.create(self.mount.path + "/training")
        model = {f"layers.{number}.w": torch.full((2 << 20,), float(number)) for number in range(4)}  # 32 MiB
        blocked, copies, futures = [], [], []
        for step in range(1, 7):
            for tensor in model.values():
                tensor.add_(1)
            begun = time.monotonic()
            copy = [torch.empty_like(tensor).copy_(tensor) for tensor in model.values()]
            copies.append(time.monotonic() - begun)
            del copy
            if step % 2:
                continue
            begun = time.monotonic()
            futures.append(job.save({"model": model, "step": step}, f"step{step}", wait=False))
            blocked.append(time.monotonic() - begun)
        begun = time.monotonic()
        for future in futures:
            future.result(120)
        print(f"blocked for {statistics.median(blocked) / statistics.median(copies):.2f} copies of 32 MiB (a copy: "
              f"{statistics.median(copies) * 1e3:.1f} ms); {(time.monotonic() - begun) * 1e3:.0f} ms behind the last")
        for step in (2, 4, 6):
            saved = ptc.load(job.file("checkpoints", f"step{step}"))
            self.assertEqual(saved["step"], step)
            for number in range(4):
                self.assertTrue(torch.equal(saved["model"][f"layers.{number}.w"], torch.full((2 << 20,), float(number + step))), (step, number))

    def test_a_rank_that_has_ended(self):
        job = ptc.Job.create(self.mount.path + "/ended", dp=2)
        self.run_ranks(2, """
import time
job = ptc.Job(path)
job.save({"w": torch.ones(2)}, "a")
if rank == 1:
    time.sleep(0.2)
    os._exit(0)
try:
    raise SystemExit(job.save({"w": torch.ones(2)}, "b", wait=False).result(60))
except ptc.PtcError as error:
    assert "rank 0 has waited for the others in vain" in str(error) and "ank 1" in str(error), error
os._exit(0)
""", job.path)
        self.assertEqual(job.checkpoints(), ["a"])

    def test_who_is_killed_while_he_writes(self):
        """What he leaves may be as long as all of it, but is nothing that could be committed."""
        job = ptc.Job.create(self.mount.path + "/killed")
        code = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch, ptc
writev = os.writev
left = [int(sys.argv[3])]
def some(file, parts):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return writev(file, parts[:1])
os.writev = some
ptc.save({f"l.{i}.w": torch.ones(1 << 20) for i in range(4)}, sys.argv[2])
"""
        for calls in (1, 3):
            where = job.incoming(f"after{calls}")
            killed = subprocess.run([sys.executable, "-c", code, ranks.PACKAGE, where, str(calls)], check=False)
            self.assertEqual(killed.returncode, -9)
            self.assertGreater(os.path.getsize(where + "/rank/0/model.safetensors"), 4 << 20)
            with self.assertRaises(ptc.CommitError):
                ptc.commit(where)
        self.assertEqual(job.checkpoints(), [])

    @unittest.skipUnless(os.getuid() == 0, "only root can mount a file system")
    def test_where_no_space_can_be_taken_at_once(self):
        """ramfs has no fallocate(2), for which the C library would write into each page."""
        where = self.temporary("ramfs")
        os.mkdir(where)
        subprocess.run(["mount", "-t", "ramfs", "ptcfs-test", where], check=True)
        self.addCleanup(subprocess.run, ["umount", where], check=True)

        def calls():
            return int(mount.read_text("/proc/self/io").split("syscw: ")[1].split()[0])
        before = calls()
        ptc.save({"w": torch.arange(4 << 20)}, where)
        self.assertLess(calls() - before, 100)
        self.assertTrue(torch.equal(ptc.load(where)["w"], torch.arange(4 << 20)))

    def test_two_processes_save_one_name(self):
        """Without a group, as a second start of what still runs. The second is told, and nothing of the first is touched."""
        job = ptc.Job.create(self.mount.path + "/twice")
        code = ("import sys; sys.path.insert(0, sys.argv[1]); import torch, ptc\n"
                "try: ptc.Job(sys.argv[2]).save({'w': torch.zeros(4)}, 'a'); print('saved')\n"
                "except ptc.CommitError as error: print(error)")

        def second():
            return subprocess.run([sys.executable, "-c", code, ranks.PACKAGE, job.path], check=True, text=True,
                                  stdout=subprocess.PIPE).stdout.strip()
        where = job.begin("a")
        ptc.save({"w": torch.ones(4)}, where)
        self.assertEqual(second(), f"a is being saved by process {os.getpid()}")
        ptc.commit(where)
        self.assertEqual(ptc.load(job.path)["w"].tolist(), [1, 1, 1, 1])
        self.assertIn("exists already", second())
        job.save({"w": torch.ones(4)}, "b")
        self.assertEqual(os.listdir(job.file("incoming")), [])
        os.makedirs(job.incoming("c"))
        killed = subprocess.Popen([sys.executable, "-c", "import sys; sys.path.insert(0, sys.argv[1]); import ptc, os\n"
                                   "ptc.Job(sys.argv[2]).begin('c'); print(1, flush=True); sys.stdin.read()", ranks.PACKAGE,
                                   job.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with killed:
            killed.stdout.readline()
            with self.assertRaisesRegex(ptc.CommitError, f"process {killed.pid}"):
                job.save({"w": torch.ones(4)}, "c")
            killed.kill()
        job.save({"w": torch.ones(4)}, "c")

    def test_one_that_is_killed_is_not_committed(self):
        """Its files have their whole length from the beginning on."""
        import torch.distributed.checkpoint as dcp
        job = ptc.Job.create(self.mount.path + "/torn")
        state = {"model": {f"a{i}.w": torch.ones(1 << 20) for i in range(4)},
                 "optim": {"state": {"a0.w": {"m": torch.ones(1 << 20)}}}, "step": 3}

        def saved_and_killed(save, bytes_left):
            child = os.fork()
            if child:
                return os.waitpid(child, 0)[1]

            def some(file, parts, write=os.writev):
                nonlocal bytes_left
                for part in parts if bytes_left <= sum(part.nbytes for part in parts) else ():
                    os.write(file, part[:bytes_left])
                    bytes_left -= min(bytes_left, part.nbytes)
                    if not bytes_left:
                        os.kill(os.getpid(), signal.SIGKILL)
                done = write(file, parts)
                bytes_left -= done
                return done
            os.writev = some
            save()
            return os._exit(0)
        for save in (lambda: job.save(state, "a"), lambda: dcp.save(state, storage_writer=ptc.Writer(job, "a"), no_dist=True)):
            for mebibytes in (1, 6, 18):  # in the model's first tensor, its second, the optimizer's
                with self.subTest(mebibytes=mebibytes):
                    self.assertEqual(saved_and_killed(save, mebibytes << 20), signal.SIGKILL)
                    left, = [name for name in os.listdir(job.file("incoming")) if not name.endswith(".error")]
                    with self.assertRaisesRegex(ptc.CommitError, r"\.safetensors: it has no header, as one whose writer was ended"):
                        ptc.commit(job.incoming(left))
        job.save({"model": {"w": torch.ones(4)}}, "a")
        self.assertEqual(ptc.load(job.path)["model"]["w"].tolist(), [1, 1, 1, 1])

    def test_names_of_ones_own_are_no_saves(self):
        """However they end: a date's digits are no mark."""
        job = ptc.Job.create(self.mount.path + "/dated")
        job.save({"w": torch.ones(2)}, "run")
        ptc.save({"w": torch.zeros(2)}, job.incoming("run~20250101"))
        self.assertEqual(ptc.commit(job.incoming("run~20250101")), job.file("checkpoints", "run~20250101"))
        ptc.save({"w": torch.zeros(2)}, job.incoming("night~20250103"))
        job.save({"w": torch.ones(2)}, "night")
        ptc.commit(job.incoming("night~20250103"))
        self.assertEqual(sorted(job.checkpoints()), ["night", "night~20250103", "run", "run~20250101"])
        self.assertEqual(ptc.load(job.file("checkpoints/run/layouts/tp1-pp1-dp1"))["w"].tolist(), [1, 1])
        with self.assertRaisesRegex(ValueError, "at most 229 bytes"):
            job.save({"w": torch.ones(2)}, "n" * 230)
        job.save({"w": torch.ones(2)}, "n" * 229)

    def test_a_lock_on_incoming_stops_nobody(self):
        """Whoever may read it can lock it."""
        job = ptc.Job.create(self.mount.path + "/locked")
        other = os.open(job.file("incoming"), os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX)
            job.save({"w": torch.ones(2)}, "a")
        finally:
            os.close(other)
        self.assertEqual(job.checkpoints(), ["a"])

    def requests(self, operation):
        key = "ptcfs_requests_total", (("operation", operation),)
        return prometheus.check(mount.read_text(self.mount.path + "/.ptc/metrics")).get(key, 0)

    def test_a_name_again(self):
        job = ptc.Job.create(self.mount.path + "/again")
        job.save({"w": torch.ones(4)}, "a")
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            job.save({"w": torch.zeros(4)}, "a")
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            ptc.save({"w": torch.zeros(4)}, job.incoming("a"))
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            ptc.save({"w": torch.zeros(4)}, job.incoming("a"), wait=False).result(60)
        with self.assertRaisesRegex(ptc.CommitError, "exists already"):
            ptc.commit(job.incoming("a"))
        ptc.save({"w": torch.ones(4)}, job.incoming("a"), overwrite=True)
        ptc.commit(job.incoming("a"), overwrite=True)
        before = self.requests("unlink")
        job.save({"w": torch.zeros(4)}, "a", overwrite=True)
        self.assertEqual(self.requests("unlink"), before)  # not name by name
        self.assertEqual((job.checkpoints(), ptc.load(job.path)["w"].tolist()), (["a"], [0, 0, 0, 0]))
        import torch.distributed.checkpoint as dcp
        dcp.save({"w": torch.ones(4)}, storage_writer=ptc.Writer(job, "a", overwrite=True), no_dist=True)
        self.assertEqual((job.checkpoints(), ptc.load(job.path)["w"].tolist()), (["a"], [1, 1, 1, 1]))
        with self.assertRaises(TypeError):
            job.save({"w": torch.ones(4), "x": object()}, "a", overwrite=True)
        self.assertEqual(job.checkpoints(), ["a"])
        where = self.temporary("plain")
        ptc.save({"model": {"w": torch.ones(4)}, "other": {"w": torch.ones(4)}}, where)
        with self.assertRaises(TypeError):
            ptc.save({"model": {"w": torch.ones(4, device="meta")}, "other": {"w": torch.ones(4)}}, where)
        self.assertEqual(sorted(os.listdir(where)), ["other.safetensors", "ptc.json"])

    def test_a_taken_name_is_refused_before_anything_is_written(self):
        """By all ranks alike, and nothing goes that was there. Also what is pinned, where it is to be replaced."""
        job = ptc.Job.create(self.mount.path + "/taken", dp=2)
        os.makedirs(job.incoming("a") + "/rank/0")
        with open(job.incoming("a") + "/rank/0/precious", "w", encoding="utf-8") as file:
            file.write("left by another")
        self.run_ranks(2, """
job = ptc.Job(path)
job.save({"w": torch.ones(2)}, "b")
def refused(call, what="exists already, and nothing was written: save under another name, remove it .ptc rm taken/b., or replace it"):
    import re
    try: call()
    except (ptc.CommitError, dcp.api.CheckpointException) as error: assert re.search(what, str(error)), error
    else: raise SystemExit("not refused")
    dist.barrier()
    assert os.listdir(path + "/incoming/b") == ["old"] and os.listdir(path + "/incoming/b/old") == [], os.listdir(path + "/incoming")
    assert sorted(os.listdir(path + "/incoming")) == ["a", "b"], os.listdir(path + "/incoming")
dist.barrier()
if rank == 0: os.makedirs(path + "/incoming/b/old")
dist.barrier()
def write(*arguments): raise SystemExit("written")
kept, ptc.safetensors.write = ptc.safetensors.write, write
for wait in (True, False):
    refused(lambda: job.save({"w": torch.zeros(2)}, "b", wait=wait))
refused(lambda: job.begin("b"))
refused(lambda: dcp.save({"w": torch.zeros(2)}, storage_writer=ptc.Writer(job, "b")))
pinned = "checkpoint b is pinned, and not replaced; ptc pin taken/b --remove"
if rank == 0: os.setxattr(path + "/checkpoints/b", "user.ptc.pin", b"1")
dist.barrier()
refused(lambda: job.save({"w": torch.zeros(2)}, "b", overwrite=True), pinned)
refused(lambda: dcp.save({"w": torch.zeros(2)}, storage_writer=ptc.Writer(job, "b", overwrite=True)), pinned)
if rank == 0: os.removexattr(path + "/checkpoints/b", "user.ptc.pin")
dist.barrier()
ptc.safetensors.write = kept
job.save({"w": torch.zeros(2)}, "b", overwrite=True)
""", job.path)
        self.assertEqual((job.checkpoints(), ptc.load(job.path, rank=0)["w"].tolist()), (["b"], [0, 0]))
        self.assertEqual(os.listdir(job.file("incoming")), ["a"])

    def test_nothing_of_a_broken_save_is_in_the_next(self):
        """Of more ranks, of other files, in the directory of the name or in one of its own; a framework's save, too."""
        job = ptc.Job.create(self.mount.path + "/mixed", dp=2)
        for call in ('job.save({"model": {"a.w": torch.ones(2)}}, "a")',
                     'dcp.save({"model": {"a.w": torch.ones(2)}}, storage_writer=ptc.Writer(job, "a"))',
                     'where = job.begin("a"); torch.save({"a.w": torch.ones(2)}, os.makedirs(f"{where}/rank/{rank}", exist_ok=True) or '
                     'f"{where}/rank/{rank}/model.pt"); ptc.commit(where)'):
            for left in (job.incoming("a"), job.incoming("a.ptc-save-0123456789abcdef")):
                with self.subTest(call=call, left=left):
                    for rank in range(4):
                        ptc.save({"model": {"a.w": torch.zeros(2)}, "optim": {"state": {"a.w": {"m": torch.zeros(2)}}}}, left, rank=rank)
                    self.run_ranks(2, f"job = ptc.Job(path)\n{call}", job.path)
                    self.assertEqual([one["name"] for one in job.read_json("checkpoints/a/meta.json")["tensors"]], ["a.w"])
                    self.assertEqual(os.listdir(job.file("incoming")), [])
                    job.remove_unpinned("a")

    def test_beside_rows(self):
        """Whole beside DTensors, and one element of each: of all is said what it is, also by a section without DTensors."""
        job = ptc.Job.create(self.mount.path + "/not_rows", dp=4, optimizer="fsdp")
        self.run_ranks(4, """
def sharded(*shape):
    return distribute_tensor(torch.zeros(shape), init_device_mesh("cpu", (4,)), [Shard(0)])
ptc.Job(path).save({"model": {"a.w": sharded(8, 3), "a.b": sharded(4), "a.c": sharded(4, 1), "a.d": sharded(1), "a.n": torch.tensor(4)},
                    "teacher": {"a.w": torch.ones(8, 3)}}, "c")
""", job.path)
        job.set_layout(dp=2)
        state = ptc.load(job.path, rank=0)
        self.assertEqual({name: tuple(tensor.shape) for name, tensor in state["model"].items()},
                         {"a.w": (4, 3), "a.b": (2,), "a.c": (2, 1), "a.d": (1,), "a.n": ()})
        self.assertEqual(tuple(state["teacher"]["a.w"].shape), (4, 3))

    def test_values_are_named_and_kept(self):
        numpy = mount.require("numpy")
        job = ptc.Job.create(self.mount.path + "/values")
        self.addCleanup(setattr, ptc.state, "_MUCH_BYTES", ptc.state._MUCH_BYTES)
        ptc.state._MUCH_BYTES = 64
        with self.assertWarnsRegex(UserWarning, "rng/table: .*kept as text in ptc.json"):
            job.save({"model": {"a.w": torch.ones(2)}, "loss": numpy.float32(0.5), "seen": [numpy.int64(3), numpy.bool_(True)],
                      "rng": {"table": torch.ones(100)}}, "a")
        state = ptc.load(job.path)
        self.assert_equal((state["loss"], state["seen"]), (0.5, [3, True]))
        circle = {"w": torch.ones(2)}
        circle["self"] = circle
        for state, error, reason in (
                ({"model": {"w": torch.ones(2)}, "a": {"b": [1, {2}]}}, TypeError, "a/b/1: a value of type set"),
                ({"model": {"w": torch.ones(2)}, "d": torch.device("cpu")}, TypeError, "d: a value of type device"),
                ({"w": torch.ones(2), "step": 3}, ptc.CommitError, "tensors at the top beside other values are the rank's own"),
                ({"model": circle}, ValueError, "nested too deeply, or holds itself")):
            with self.subTest(reason), self.assertRaisesRegex(error, reason):
                job.save(state, "b")

    def test_a_writer_saves_in_its_job(self):
        import torch.distributed.checkpoint as dcp
        jobs = [ptc.Job.create(self.mount.path + "/" + name) for name in ("mine", "others")]
        writer = ptc.Writer(jobs[0])
        for place in (jobs[1].file("checkpoints/a"), "/nowhere/a"):
            with self.assertRaisesRegex(ValueError, "is not in .*/mine, where"):
                dcp.save({"w": torch.ones(2)}, checkpoint_id=place, storage_writer=writer, no_dist=True)
        dcp.save({"w": torch.ones(2)}, checkpoint_id=jobs[0].file("checkpoints/a"), storage_writer=writer, no_dist=True)
        dcp.save({"w": torch.ones(2)}, checkpoint_id="b", storage_writer=writer, no_dist=True)
        self.assertEqual([job.checkpoints() for job in jobs], [["a", "b"], []])


class FullStore(mount.TestCase):
    mount_options = ("--memory", "96M")

    def test_what_failed_takes_no_room(self):
        job = ptc.Job.create(self.mount.path + "/full")
        import torch.distributed.checkpoint as dcp
        state = {"model": {f"l.{i}": torch.ones(1 << 20) for i in range(32)}}
        for save in (lambda: job.save(state, "a"), lambda: job.save(state, "b", wait=False).result(60),
                     lambda: ptc.save(state, job.incoming("c")),
                     lambda: dcp.save(state, storage_writer=ptc.Writer(job, "d"), no_dist=True)):
            with self.assertRaisesRegex(BaseException, "No space left on device.*model.*safetensors"):
                save()
        self.assertEqual([name for _, _, names in os.walk(job.file("incoming")) for name in names], [])
        job.save({"w": torch.ones(1 << 20)}, "e")


if __name__ == "__main__":
    mount.main()
