#!/usr/bin/env python3
"""Commits of what several nodes wrote: nobody writes it any more when they are decided, whoever had it open; what takes
long holds up nobody; and what fails leaves nothing behind."""
import contextlib
import mmap
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import unittest

import cluster
from cases import BigLlama, LEASE, TestCase, layout_name
from cluster import mount
import models

RENAME_SECONDS = 2.0


class Commits(TestCase):
    def write(self, model, replicas=0):
        """Rank 0 on w0, rank 1 on w1."""
        job = self.nodes.job(0, self.name)
        job.set_layout(pp=2, replicas=replicas, devices=["w0:0", "w1:0"])
        cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
        model.write_ranks(self.nodes.path(2, self.name, "all"), 1, 2)
        for rank in (0, 1):
            target = self.job(rank).incoming("base") + f"/rank/{rank}"
            os.makedirs(os.path.dirname(target))
            cluster.run("cp", "-r", self.nodes.path(2, self.name, "all", "rank", str(rank)), target)
        cluster.run("rm", "-r", self.nodes.path(2, self.name, "all"))

    def rename(self, node, name="base"):
        """Its errno's name, or nothing; and how long it took."""
        job, start = self.job(node), time.monotonic()
        error = mount.error_of(os.rename, job.incoming(name), job.checkpoint(name))
        return error, time.monotonic() - start

    def commit_at_last(self):
        cluster.until(lambda: self.rename(0)[0] == "", "a mv commits", 5 * LEASE)

    def images(self):
        return sum(self.nodes.nodes[node].image_bytes() for node in range(3))

    def file_on(self, node):
        at = self.job(node).incoming("base") + f"/rank/{node}"
        return os.path.join(at, next(name for name in os.listdir(at) if name.endswith(".safetensors")))

    def test_open_on_another_node(self):
        """What w1 has open or mapped for writing w0 does not commit; and afterwards nothing there can be written."""
        model = models.Llama(40)
        self.write(model)
        path = self.file_on(1)
        with open(path, "r+b") as file:
            self.assertEqual(self.rename(0)[0], "EBUSY")
            memory = mmap.mmap(file.fileno(), 0)
        self.assertEqual(self.rename(0)[0], "EBUSY")  # the mapping outlives the descriptor
        before = bytes(memory[:64])
        memory[0:64] = bytes(64)
        memory[0:64] = before
        memory.close()
        reader = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, reader)
        self.job(0).commit("base")
        for call in (lambda: os.open(f"/proc/self/fd/{reader}", os.O_RDWR), lambda: os.truncate(reader, 1),
                     lambda: os.truncate(f"/proc/self/fd/{reader}", 1), lambda: os.fchmod(reader, 0o666)):
            self.assertIn(mount.error_of(call), ("EROFS", "EINVAL", "EPERM", "ESTALE"))
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)
        self.nodes.nodes[2].ptc("verify", self.name)

    def test_the_last_close_is_heard_of_late(self):
        """Of a close the kernel tells after it has returned: on a machine that is busy, long after."""
        model = models.Llama(45)
        self.write(model)
        for node in (0, 1):
            closes = threading.Timer(0.8, open(self.file_on(node), "r+b").close)  # pylint: disable=consider-using-with
            closes.start()
            self.addCleanup(closes.join)
        self.job(0).commit("base")
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)

    def test_refused_is_writable_again(self):
        model = models.Llama(41)
        self.write(model)
        extra = self.job(1).incoming("base") + "/rank/7"
        os.makedirs(extra)
        with open(extra + "/notes.txt", "w", encoding="ascii") as file:
            file.write("there is no rank 7")
        self.assertEqual(self.rename(0)[0], "ECANCELED")  # refused (fs/tree/errno.h)
        with open(self.file_on(1), "r+b") as file:
            first = file.read(1)
            file.seek(0)
            file.write(first)
        cluster.run("rm", "-r", extra)
        self.job(0).commit("base")
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)

    def test_names_that_a_node_keeps_from_others_are_not_told(self):
        """Whatever that node does between its refusal and the question for whom it is."""
        for name, meanwhile, afterwards in (
                ("silent", lambda: self.nodes.pause(1), lambda: self.nodes.resume(1)),
                ("moved", lambda: os.rename(self.job(1).incoming("base"), self.job(1).incoming("elsewhere")), lambda: None)):
            with self.subTest(name):
                self.name = f"secrets-{name}"
                job = self.nodes.job(0, self.name)
                cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
                models.write_file(job.incoming("base") + "/rank/0/a", b"x")
                private = self.job(1).incoming("base") + "/rank/1"
                os.makedirs(private)
                os.symlink("/nowhere", private + "/secret-name")
                os.chmod(private, 0o700)
                self.nodes.pause(2)  # so that the others' answers are not told at once
                moving = threading.Thread(target=self.rename, args=(0,))
                moving.start()
                time.sleep(1)
                meanwhile()
                try:
                    moving.join()
                    self.nodes.resume(2)
                    error = job.incoming("base") + ".error"
                    cluster.until(lambda path=error: os.path.exists(path), "it is refused", 5 * LEASE)
                    self.assertEqual(os.stat(error).st_mode & 0o077, 0)
                    cluster.until(lambda: "says why" in (self.job(0).status()["last_error"] or {}).get("what", ""), "and told",
                                  5 * LEASE)
                    self.assertNotIn("secret-name", self.job(0).status()["last_error"]["what"])
                finally:
                    afterwards()
                self.nodes.wait_members()

    def test_a_stopped_node_holds_up_nobody(self):
        """A rename holds locks of the whole mount: it is over in two seconds, and so is one of another job."""
        model = models.Llama(42)
        self.write(model, replicas=1)
        other = self.nodes.job(0, self.name + "-other")
        self.addCleanup(lambda: self.nodes.nodes[0].ptc("rm", "--force", other.name, check=False))
        for name in ("a", "b"):
            os.makedirs(other.file(name))
        self.nodes.pause(2)
        started = time.monotonic()
        while time.monotonic() < started + LEASE - 1:
            error, seconds = self.rename(0)
            self.assertEqual(error, "EAGAIN")
            self.assertLess(seconds, RENAME_SECONDS + 0.3)
            self.assertTrue(os.path.exists(self.file_on(0)))
            again = time.monotonic()
            os.rename(other.file("a"), other.file("b", "a"))
            os.rename(other.file("b", "a"), other.file("a"))
            self.assertLess(time.monotonic() - again, RENAME_SECONDS)
        self.commit_at_last()  # when w2 counts as dead
        self.nodes.resume(2)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)

    def test_many_that_wait_hold_up_nobody_for_long(self):
        """Nor does their queue: who has waited in vain just now waits for a moment only."""
        self.write(models.Llama(41), replicas=1)
        other = self.nodes.job(0, self.name + "-other")
        self.addCleanup(lambda: self.nodes.nodes[0].ptc("rm", "--force", other.name, check=False))
        for name in ("a", "b"):
            os.makedirs(other.file(name))
        self.nodes.pause(2)
        errors, ended = [], time.monotonic() + LEASE - 1

        def ask_again():
            while time.monotonic() < ended:
                errors.append(self.rename(0)[0])
        asking = [threading.Thread(target=ask_again) for _ in range(8)]
        for thread in asking:
            thread.start()
        longest = 0
        while time.monotonic() < ended:
            again = time.monotonic()
            os.rename(other.file("a"), other.file("b", "a"))
            os.rename(other.file("b", "a"), other.file("a"))
            longest = max(longest, time.monotonic() - again)
        for thread in asking:
            thread.join()
        self.assertGreater(len(errors), len(asking))
        self.assertEqual(set(errors), {"EAGAIN"})
        self.assertLess(longest, 3 * RENAME_SECONDS)  # two, each of which all others may come before
        self.commit_at_last()
        self.nodes.resume(2)
        self.nodes.wait_members()
        self.nodes.wait_settled(self.name)

    def test_who_writes_ends_it(self):
        """Between two renames the files are the user's: on whatever node one is written or removed, nothing is lost."""
        for number in (0, 1):
            with self.subTest(node=number):
                model = models.Llama(43 + number)
                self.write(model)
                self.nodes.pause(2)
                self.assertEqual(self.rename(0)[0], "EAGAIN")
                path = self.file_on(number)
                time.sleep(0.5)

                def write(path=path):
                    with contextlib.suppress(OSError), open(path, "r+b") as file:
                        first = file.read(1)
                        file.seek(0)
                        return file.write(first)
                cluster.until(write, "the file can be written", 5)
                self.nodes.resume(2)
                self.nodes.wait_members()
                self.job(0).commit("base")
                self.nodes.wait_settled(self.name)
                self.expect_everywhere(model, 1, 2)
                self.nodes.nodes[0].ptc("rm", "--force", self.name)
                self.setUp()

    def test_decided_when_nobody_waited_any_more(self):
        """etcd takes longer than a rename may. The same mv again says that it was done, and its source is found until then."""
        model = models.Llama(48)
        self.write(model)
        job = self.job(0)
        mount.halt(self.nodes.etcd)
        try:
            self.assertEqual(self.rename(0)[0], "EAGAIN")
            self.assertEqual(os.listdir(job.file("incoming")), ["base"])
        finally:
            self.nodes.etcd.send_signal(signal.SIGCONT)
        cluster.until(lambda: os.path.isdir(job.checkpoint("base")), "it is decided", 10)
        reader = os.open(job.checkpoint("base") + "/meta.json", os.O_RDONLY)
        self.addCleanup(os.close, reader)
        done = subprocess.run(["mv", job.incoming("base"), job.file("checkpoints") + "/"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(os.listdir(job.file("incoming")), [])
        self.assertIn("layouts", os.listdir(job.checkpoint("base")))
        self.assertGreater(len(os.pread(reader, 1 << 20, 0)), 0)
        self.assertNotEqual(mount.error_of(os.rename, job.incoming("base"), job.checkpoint("base")), "")
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(model, 1, 2)

    def test_imports_of_one_name_on_two_nodes_do_not_mix(self):
        self.nodes.job(0, self.name)
        cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
        sources, done = [os.path.join(self.nodes.top, f"import{node}") for node in range(2)], [None, None]
        for node, source in enumerate(sources):
            models.Llama(50 + node).write_hf(source)
            for file in range(100):
                models.write_file(f"{source}/of-{node}/{file}", str(node))
            self.addCleanup(shutil.rmtree, source)

        def bring_in(node):
            done[node] = self.nodes.nodes[node].ptc("import", self.name, sources[node], "--force", check=False)
        threads = [threading.Thread(target=bring_in, args=(node,)) for node in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [node for node in range(2) if done[node].returncode == 0]
        self.assertEqual(len(won), 1, [one.stderr for one in done])
        self.assertIn("already", done[1 - won[0]].stderr)
        self.nodes.wait_settled(self.name)
        rank = self.job(2).checkpoint("base", "layouts/tp1-pp1-dp1/rank/0")
        self.assertEqual([name for name in os.listdir(rank) if name.startswith("of-")], [f"of-{won[0]}"])
        self.assertEqual(models.read_safetensors(rank + "/model.safetensors"), {t.name: t for t in models.Llama(50 + won[0]).tensors})

    def test_the_next_of_the_same_name_before_all_know_of_the_last(self):
        """w1 has not heard that the first was decided when w0 asks it for the second: it keeps what it gave to the first."""
        first, second = models.Llama(46), models.Llama(47)
        self.write(first)
        self.nodes.partition(1, ("eth1",))
        try:
            self.assertEqual(mount.error_of(os.rename, self.job(0).incoming("base"), self.job(0).checkpoint("first")), "")
            second.write_hf(self.job(0).incoming("base") + "/rank/0")
            mount.error_of(os.rename, self.job(0).incoming("base"), self.job(0).checkpoint("second"))
        finally:
            self.nodes.heal(1, ("eth1",))
        cluster.until(lambda: all(os.path.isdir(self.job(node).checkpoint("first")) for node in range(3)), "all know of the first")
        self.nodes.wait_members()  # it has been away for longer than its lease where all of this took long
        self.nodes.wait_settled(self.name)
        for node in range(3):
            for rank in (0, 1):
                held = models.read_safetensors(self.job(node).rank_file("first", "tp1-pp2-dp1", rank))
                self.assertEqual(held, {tensor.name: tensor for tensor in first.rank_tensors(1, 2, 0, rank)})
        self.assertEqual(self.nodes.nodes[0].ptc("verify", f"{self.name}/first", check=False).returncode, 0)
        self.assertEqual(os.listdir(self.job(1).file("incoming")), [])

    def stage_where_each_rank_has_something(self, name):
        """Rank 0 on w0 has the model, rank 1 on w1 something of its own."""
        models.Llama(46).write_ranks(self.job(0).incoming(name), 1, 1)
        models.write_file(self.job(1).incoming(name + "-tmp") + "/rank/1/rng.bin", f"of {name}")
        time.sleep(1)  # it has been said of that name
        os.rename(self.job(1).incoming(name + "-tmp"), self.job(1).incoming(name))
        cluster.until(lambda: f"/{self.name}/{name}/w1" in self.nodes.etcdctl("get", "--prefix", "--keys-only", ""), "w1 has said so")

    def said(self, name, node):
        return f"/{self.name}/{name}/w{node}" in self.nodes.etcdctl("get", "--prefix", "--keys-only", "")

    def test_what_was_moved_or_linked_in_is_said(self):
        """A directory from elsewhere in the job, one from another directory of incoming/, and a second name of a file."""
        self.nodes.job(0, self.name)
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        job = self.job(1)
        models.write_file(job.path + "/scratch/moved/rank/1/rng.bin", "x")
        os.rename(job.path + "/scratch/moved", job.incoming("moved"))
        models.write_file(job.path + "/scratch/rank/1/rng.bin", "x")
        os.makedirs(job.incoming("within") + "/rank")
        os.rename(job.path + "/scratch/rank/1", job.incoming("within") + "/rank/1")
        models.write_file(job.path + "/scratch/file", "x")
        os.makedirs(job.incoming("linked") + "/rank/1")
        os.link(job.path + "/scratch/file", job.incoming("linked") + "/rank/1/rng.bin")
        for name in ("moved", "within", "linked"):
            cluster.until(lambda name=name: self.said(name, 1), f"w1 has said so of {name}")

    def test_what_a_node_has_that_is_away_is_not_left_out_in_silence(self):
        self.nodes.job(0, self.name).set_layout(dp=2)
        cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
        for name in ("base", "next"):
            self.stage_where_each_rank_has_something(name)
        self.nodes.kill(1)
        self.nodes.wait_members()
        for name in ("base", "next"):
            self.assertEqual(self.rename(0, name)[0], "EAGAIN")
        error = mount.read_text(self.job(0).incoming("base") + ".error")
        self.assertIn("node w1 is away, and has written something into incoming/base", error)
        self.assertTrue(os.path.exists(self.job(0).incoming("base") + "/rank/0/model.safetensors"))

        models.write_file(self.job(0).incoming("next") + ".without", "w1\n")
        cluster.until(lambda: self.rename(0, "next")[0] == "", "it is committed without it")
        self.assertEqual(sorted(os.listdir(os.path.dirname(self.job(0).incoming("base")))), ["base", "base.error"])
        there = self.job(0).checkpoint("next", "layouts", layout_name(1, 1, 2), "rank", "1")
        self.assertNotIn("rng.bin", os.listdir(there))

        self.nodes.start(1)
        self.nodes.wait_members()
        self.commit_at_last()
        there = self.job(2).checkpoint("base", "layouts", layout_name(1, 1, 2), "rank", "1", "rng.bin")
        self.assertEqual(mount.read_text(there), "of base")
        # Nothing is said any more of what was committed.
        cluster.until(lambda: f"/{self.name}/base/" not in self.nodes.etcdctl("get", "--prefix", "--keys-only", ""), "it is forgotten")

    def test_who_saves_anew_goes_without_what_a_dead_node_had_of_it(self):
        """A node dies in the middle of a save, and the job goes on without it, from an earlier step."""
        self.nodes.job(0, self.name).set_layout(dp=2)
        _, job = self.python_job()
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        models.Llama(46).write_ranks(self.job(0).incoming("step100"), 1, 1)
        models.write_file(self.job(1).incoming("step100") + "/rank/1/rng.bin", "of the attempt that died")
        cluster.until(lambda: self.said("step100", 1), "w1 has said so")
        self.nodes.kill(1)
        self.nodes.wait_members()
        self.job(0).set_layout(dp=1)
        cluster.until(lambda: self.job(0).status()["layout"] == layout_name(1, 1, 1), "it is one rank")
        where = job.begin("step100")
        models.Llama(46).write_ranks(where, 1, 1)
        job.rename_into_checkpoints(os.path.basename(where))
        self.assertEqual(os.listdir(os.path.dirname(job.incoming("step100"))), [])

    def test_who_saves_anew_goes_without_what_a_living_node_had_of_it(self):
        """The job goes on with fewer ranks, none of them on a node that still has its part of an attempt that was broken off."""
        self.nodes.job(0, self.name).set_layout(dp=2)
        _, job = self.python_job()
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        models.write_file(self.job(1).incoming("step100") + "/rank/1/rng.bin", "of the attempt that died")
        cluster.until(lambda: self.said("step100", 1), "w1 has said so")
        where = job.begin("step100")
        models.Llama(46).write_ranks(where, 1, 1)  # of a rank alone; the other has no file of its own to save
        job.rename_into_checkpoints(os.path.basename(where))
        there = self.job(0).checkpoint("step100", "layouts", layout_name(1, 1, 2), "rank", "1")
        self.assertNotIn("rng.bin", os.listdir(there))
        self.assertEqual(os.listdir(self.job(1).incoming("step100") + "/rank/1"), ["rng.bin"])

    def python_job(self):
        """The job as tools/python sees it on w0."""
        try:
            sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tools/python"))
            import ptc  # its numpy may be missing
        except ImportError as error:
            self.skipTest(str(error))
        return ptc, ptc.Job(self.job(0).path)

    def test_who_saves_anew_goes_without_what_a_node_lost_with_its_store(self):
        self.go_on_without_a_lost_store()

    def test_the_same_where_it_is_back_within_its_lease(self):
        self.go_on_without_a_lost_store(within_its_lease=True)

    def go_on_without_a_lost_store(self, **how):
        self.nodes.job(0, self.name).set_layout(dp=2)
        _, job = self.python_job()
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        models.write_file(self.job(1).incoming("step100") + "/rank/1/rng.bin", "of the attempt that died")
        cluster.until(lambda: self.said("step100", 1), "w1 has said so")
        self.lose_store(1, **how)
        self.job(0).set_layout(dp=1)
        cluster.until(lambda: self.job(0).status()["layout"] == layout_name(1, 1, 1), "it is one rank")
        for name in ("step100", "step100"):  # and its name may be saved again
            where = job.begin(name, overwrite=True)
            models.Llama(46).write_ranks(where, 1, 1)
            job.rename_into_checkpoints(os.path.basename(where), overwrite=True)
        self.assertEqual(os.listdir(os.path.dirname(job.incoming("step100"))), [])

    def test_what_is_saved_right_after_the_beginning_and_lost_is_not_gone_without(self):
        """w1 has said that it has something, in an attempt a moment before, and need not say it again."""
        self.nodes.job(0, self.name).set_layout(dp=2)
        ptc, job = self.python_job()
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        rng = self.job(1).incoming("step100") + "/rank/1/rng.bin"
        models.write_file(rng, "of the attempt that died")
        cluster.until(lambda: self.said("step100", 1), "w1 has said so")
        shutil.rmtree(self.job(1).incoming("step100") + "/rank")
        models.write_file(self.job(0).incoming("step100") + ".without", "w0\nw1\n")
        models.Llama(46).write_ranks(job.incoming("step100"), 1, 1)
        time.sleep(1)  # it is heeded
        models.write_file(rng, "of rank 1")
        self.lose_store(1)
        for _ in range(2):  # without the directory, and with it
            with self.assertRaisesRegex(ptc.CommitError, "node w1 had written something.*and has lost it"):
                job.rename_into_checkpoints("step100")
            os.makedirs(self.job(1).incoming("step100"), exist_ok=True)
        models.write_file(self.job(0).incoming("step100") + ".without", "w1\n")
        cluster.until(lambda: self.rename(0, "step100")[0] == "", "it is committed without it")

    def test_what_is_saved_after_the_beginning_is_not_gone_without(self):
        """w1 does not reach etcd when a save begins; its rank saves when it is back, and then it dies."""
        self.nodes.job(0, self.name).set_layout(dp=2)
        ptc, job = self.python_job()
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        self.nodes.partition(1, links=("eth1",))
        cluster.until(lambda: "w1" not in self.nodes.nodes[0].members(), "w0 counts it as away")
        where = job.begin("step100")
        models.Llama(46).write_ranks(where, 1, 1)
        begun = os.path.basename(where)
        there = ptc.Job(self.job(1).path)
        with self.assertRaisesRegex(ptc.CommitError, "w1 does not reach .*: what was saved here would be left out"):
            there.check_joined(0)
        self.nodes.heal(1, links=("eth1",))
        self.nodes.wait_members()
        models.write_file(self.job(1).incoming(begun) + "/rank/1/rng.bin", "of rank 1")
        cluster.until(lambda: self.said(begun, 1), "w1 has said so")
        self.nodes.kill(1)
        self.nodes.wait_members()
        with self.assertRaisesRegex(ptc.CommitError, "node w1 is away, and has written something"):
            job.rename_into_checkpoints(begun)
        self.nodes.start(1)
        self.nodes.wait_members()

        def committed():
            with contextlib.suppress(ptc.CommitError):
                return job.rename_into_checkpoints(begun)
        cluster.until(committed, "it is committed when w1 is back")
        there.check_joined(0)
        kept = self.job(2).checkpoint("step100", "layouts", layout_name(1, 1, 2), "rank", "1", "rng.bin")
        self.assertEqual(mount.read_text(kept), "of rank 1")

    def test_what_is_written_while_a_commit_is_decided_is_known_of(self):
        """Each step is staged under the same name; w1 writes early for the next one."""
        self.nodes.job(0, self.name).set_layout(dp=2, replicas=1)
        cluster.until(lambda: os.path.isdir(self.job(1).path), "the job is there")
        BigLlama(47).write_ranks(self.job(0).incoming("latest"), 1, 1)
        for node in (1, 2):
            self.nodes.shape(node, "20mbit")  # the copies take a while
        try:
            self.assertEqual(self.rename(0, "latest")[0], "EAGAIN")
            models.write_file(self.job(1).incoming("latest") + "/rank/1/rng.bin", "of the next step")
            cluster.until(lambda: self.said("latest", 1), "w1 has said so")
        finally:
            for node in (1, 2):
                self.nodes.shape(node, None)
        cluster.until(lambda: self.rename(0, "latest")[0] == "", "the first step is committed")
        cluster.until(lambda: not self.said("latest", 0), "w0 has nothing more there")
        self.assertTrue(self.said("latest", 1))

    def write_flat(self, name, model, ranks):
        """Of `ranks` each the rank's slices, right in incoming/<name> of its node."""
        for rank in range(ranks):
            models.write_safetensors(self.job(rank).incoming(name) + f"/model_rank{rank}.safetensors",
                                     model.rank_tensors(ranks, 1, rank, 0))
        models.write_file(self.job(0).incoming(name) + "/config.json", model.config_text())

    def test_slices_without_rank_on_two_nodes_are_refused(self):
        """Each node alone would be a single process, and the checkpoint before would go for half of a model."""
        job = self.nodes.job(0, self.name)
        job.set_layout(tp=2, keep=1, devices=["w0:0", "w1:0"])
        cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
        good = models.Llama(48)
        good.write_hf(job.incoming("good") + "/rank/0")
        models.write_file(job.incoming("good") + "/layout.json", '{"tp": 1, "pp": 1, "dp": 1}')
        job.commit("good")
        self.nodes.wait_settled(self.name)
        self.write_flat("flat", models.Llama(49), 2)
        for node in (0, 1):
            # The node that led before may still put back what it took.
            cluster.until(lambda node=node: self.rename(node, "flat")[0] == "ECANCELED", "it is refused", 5 * LEASE)
            error = mount.read_text(self.job(node).incoming("flat") + ".error")
            for reason in ("model_rank0.safetensors on node w0", "model_rank1.safetensors on node w1", "may be of several ranks",
                           "rank/0/, rank/1/"):
                self.assertIn(reason, error)
        for node in range(3):
            self.assertEqual(os.listdir(self.job(node).file("checkpoints")), ["good"])
        for rank in (0, 1):
            self.assertIn(f"model_rank{rank}.safetensors", os.listdir(self.job(rank).incoming("flat")))
        held = models.read_safetensors(self.job(2).rank_file("good", "tp2-pp1-dp1", 1))
        self.assertEqual(held, {tensor.name: tensor for tensor in good.rank_tensors(2, 1, 1, 0)})
        # As the error says.
        for rank in (0, 1):
            os.makedirs(self.job(rank).incoming("ranked") + f"/rank/{rank}")
            for name in os.listdir(self.job(rank).incoming("flat")):
                os.rename(self.job(rank).incoming("flat") + "/" + name, self.job(rank).incoming("ranked") + f"/rank/{rank}/"
                          + name.replace(f"_rank{rank}", ""))
        job.commit("ranked")
        self.nodes.wait_settled(self.name)
        held = models.read_safetensors(self.job(2).rank_file("ranked", "tp2-pp1-dp1", 1))
        self.assertEqual(held, {tensor.name: tensor for tensor in models.Llama(49).rank_tensors(2, 1, 1, 0)})

    def test_a_directory_of_the_trainers_on_two_nodes(self):
        """The first node has the model, each the random states of its ranks."""
        job = self.nodes.job(0, self.name)
        cluster.until(lambda: all(os.path.isdir(self.job(node).path) for node in range(3)), "the job is on all nodes")
        model = models.Llama(48)
        model.write_hf(job.incoming("base"))
        for rank in range(4):
            models.write_file(self.job(rank // 2).incoming("base") + f"/rng_state_{rank}.pth", f"of rank {rank}")
        self.job(1).commit("base")
        self.nodes.wait_settled(self.name)
        there = self.job(2).checkpoint("base", "layouts/tp1-pp1-dp1/rank/0")
        self.assertEqual([mount.read_text(f"{there}/rng_state_{rank}.pth") for rank in range(4)], [f"of rank {r}" for r in range(4)])
        self.assertEqual(models.read_safetensors(there + "/model.safetensors"), {t.name: t for t in model.tensors})

    def test_nothing_is_left_of_one_that_fails(self):
        """The node that leads dies in the middle of its commit: its files are there again, no copies anywhere."""
        before, there = self.images(), [node.image_bytes() for node in self.nodes.nodes]
        self.write(BigLlama(45), replicas=1)
        self.nodes.shape(2, "20mbit")  # the copies take a while
        self.assertEqual(self.rename(0)[0], "EAGAIN")
        cluster.until(lambda: self.nodes.nodes[2].image_bytes() > there[2], "w2 copies")
        self.nodes.kill(0)
        self.nodes.shape(2, None)
        # It does not come back for that.
        cluster.until(lambda: [node.image_bytes() for node in self.nodes.alive()] == there[1:], "no living one has any")
        self.assertTrue(os.path.exists(self.file_on(1)))
        self.nodes.start(0)
        self.nodes.wait_members()
        cluster.until(lambda: self.images() == before, "nothing is left")
        self.assertTrue(os.path.exists(self.file_on(0)) and os.path.exists(self.file_on(1)))
        self.job(1).commit("base")
        self.nodes.wait_settled(self.name)
        self.expect_everywhere(BigLlama(45), 1, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
