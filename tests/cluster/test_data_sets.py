"""Data sets in a cluster: the same samples on every node, and each once, whoever decides and whoever dies."""
import concurrent.futures
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import models
from cases import BigLlama, TestCase, read
from test_dataset import SAMPLES, ids_of, write_shards

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "crash"))
import points  # noqa: E402

RENAME_SECONDS = 2.0
KILLS = int(os.environ.get("PTC_DATA_SET_KILLS", "9"))


def save(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


class DataSet(TestCase):
    """The shards lie where every node can read them."""

    def begin(self, node=0, dp=2, **order):
        self.data = tempfile.mkdtemp(prefix=self.name, dir=self.nodes.top) + "/shards"
        write_shards(self.data)
        self.addCleanup(shutil.rmtree, os.path.dirname(self.data))
        self.nodes.job(node, self.name).set_layout(dp=dp)
        self.save(node, "source.json", json.dumps({"shards": [self.data]}))
        self.save_order(node, **{"batch": 4, **order})
        self.agree()
        self.end = SAMPLES * order.get("epochs", 1)
        self.seen, self.order = [], self.steps(0, 0, self.end)
        self.expect_each_once(self.order)

    def at(self, node, *parts):
        return self.job(node).file("dataset", *parts)

    def save(self, node, name, text):
        save(self.at(node, name), text)

    def save_order(self, node, **order):
        self.save(node, "order.json", json.dumps({"seed": 5, **order}))

    def consume(self, node, count):
        """What is read between what was consumed and `count`, on this node, is seen."""
        self.note_seen(node, count)
        self.save(node, "consumed", str(count))

    def note_seen(self, node, count):
        self.seen += self.steps(node, len(self.seen), count)

    def status(self, node):
        return mount.read_json(self.at(node, "status.json"))

    def refused(self, node, name, text):
        self.assertEqual(mount.error_of(self.save, node, name, text), "EINVAL")
        return self.status(node)["error"]

    def steps(self, node, begin, end):
        """Samples of all ranks, step after step, from one position to another of the newest generation."""
        segment = mount.read_json(self.at(node, "plan.json"))["segments"][-1]
        batch, dp, start = segment["batch"], segment["dp"], segment["from"]
        head = os.path.realpath(self.at(node, "head"))
        ranks = [ids_of(f"{head}/rank-{rank:03}/ids.u64") for rank in range(dp)]
        each = batch // dp
        return [sample for step in range((begin - start) // batch, -(-(end - start) // batch))
                for ids in ranks for sample in ids[step * each:(step + 1) * each]]

    def shown(self, node):
        """All that tells of the run, and a digest of each file of its newest generation."""
        head = os.readlink(self.at(node, "head"))
        files = mount.digests(os.path.realpath(self.at(node, "head")))
        texts = [read(self.at(node, name)) for name in ("order.json", "source.json", "consumed", "plan.json")]
        return head, texts, files

    def agree(self, what="all show the same run"):
        """Until every living node shows the same, bit for bit."""
        began = time.monotonic()

        def same():
            try:
                plans = {tuple(read(self.at(node, name)) for name in ("consumed", "order.json", "plan.json"))
                         for node in self.alive()}
                heads = {os.readlink(self.at(node, "head")) for node in self.alive()}
            except FileNotFoundError:
                return False
            dp = mount.read_json(self.job(self.alive()[0]).file("layout.json"))["dp"]
            if len(plans) != 1 or len(heads) != 1 or json.loads(next(iter(plans))[2])["segments"][-1]["dp"] != dp:
                return False
            shown = [self.shown(node) for node in self.alive()]  # if they had not all seen it, they do next time
            return all(other == shown[0] for other in shown)
        cluster.until(same, f"{what}: {[self.status(node) for node in self.alive()]}")
        return time.monotonic() - began

    def committed(self, node):
        return int(mount.read_text(self.at(node, "consumed")))

    def expect_history(self):
        """I1: what was committed is a beginning of the one order, whatever the changes were."""
        self.assertEqual(self.seen, self.order[:len(self.seen)])

    def expect_each_once(self, samples):
        for epoch in range(0, self.end, SAMPLES):
            self.assertEqual(sorted(samples[epoch:epoch + SAMPLES]), list(range(SAMPLES)))

    def finish(self, node):
        self.consume(node, self.end)
        self.expect_history()
        self.expect_each_once(self.seen)


class Agreement(DataSet):
    def test_every_node_decides_something(self):
        self.begin(0, dp=2)
        self.consume(1, 8)
        self.agree()
        self.job(2).set_layout(dp=1)
        self.agree()
        self.consume(0, 12)
        self.agree()
        self.save_order(1, batch=6)
        self.agree()
        self.consume(2, 24)
        self.assertEqual(mount.error_of(self.save, 0, "order.json", '{"batch": 6, "seed": 6}'), "EINVAL")
        self.agree()
        self.assertEqual([segment["from"] for segment in mount.read_json(self.at(1, "plan.json"))["segments"]],
                         [0, 8, 12])
        self.finish(1)
        self.agree()

    def test_others_see_it_at_once(self):
        """What one node has saved is read on all others when the save returns."""
        epochs = 4
        self.begin(dp=2, batch=2, epochs=epochs)
        for count in range(2, SAMPLES * epochs, 2):
            self.save(count // 2 % 3, "consumed", str(count))
            self.assertEqual([self.committed(node) for node in self.alive()], [count] * 3)
            if count % 16 == 0:
                batch = 2 + count // 16 % 2 * 2
                self.save_order(count // 16 % 3, batch=batch, epochs=epochs)
                self.assertEqual([mount.read_json(self.at(node, "order.json"))["batch"] for node in self.alive()], [batch] * 3)
                self.assertEqual(len({os.readlink(self.at(node, "head")) for node in self.alive()}), 1)
        self.save(0, "source.json", json.dumps({"shards": [self.data + "/."]}))
        self.assertEqual(len({read(self.at(node, "source.json")) for node in self.alive()}), 1)

    def test_two_nodes_race(self):
        """For order.json and for consumed: a total order, and all end with the same."""
        self.begin()
        batches = (4, 6, 8, 10)

        def write_orders(node):
            for number in range(12):
                error = mount.error_of(lambda: self.save_order(node, batch=batches[(number + node) % 4]))
                self.assertIn(error, ("", "EBUSY", "EAGAIN", "ESTALE"))

        def write_counts(node):
            accepted = []
            for count in range(1, SAMPLES // 2):
                error = mount.error_of(self.save, node, "consumed", str(count * 2))
                self.assertIn(error, ("", "EINVAL"))  # the other one was quicker
                if not error:
                    accepted.append(count * 2)
            return accepted

        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(write_orders, (0, 1)))
            self.agree()
            accepted = list(threads.map(write_counts, (0, 2)))
        self.agree()
        self.assertEqual(self.committed(1), SAMPLES - 2)
        self.assertEqual(sorted(set(accepted[0] + accepted[1])), list(range(2, SAMPLES, 2)))

    def test_back_with_a_checkpoint(self):
        """Data and weights go back together, on all nodes, and further from there."""
        self.begin(dp=1)
        self.consume(0, 12)
        self.agree()
        rank = self.job(1).incoming("step3") + "/rank/0"
        models.Llama(30).write_hf(rank)
        shutil.copy(self.at(1, "consumed"), rank + "/consumed")
        self.job(1).commit("step3")
        self.nodes.wait_settled(self.name)
        self.save(0, "consumed", "16")
        self.save_order(0, batch=2)
        self.save(0, "consumed", "18")
        self.agree()
        self.assertIn("goes back only together with a checkpoint", self.refused(2, "consumed", "16"))
        there = self.job(2).checkpoint("step3", "layouts/tp1-pp1-dp1/rank/0/consumed")
        self.save(2, "consumed", mount.read_text(there))
        self.agree()
        self.assertEqual(mount.read_json(self.at(0, "plan.json"))["segments"][-1]["from"], 12)
        # The same with a count beside the ranks, which two nodes wrote: one that differs is refused.
        self.save(1, "consumed", "20")
        for node, rank in ((0, 0), (2, 1)):
            models.Llama(30).write_hf(self.job(node).incoming("step4") + f"/rank/{rank}")
            models.write_file(self.job(node).incoming("step4") + "/layout.json", '{"tp": 1, "pp": 1, "dp": 2}')
        models.write_file(self.job(0).incoming("step4") + "/consumed", "12")
        models.write_file(self.job(2).incoming("step4") + "/rank/1/consumed", "16")
        self.assertEqual(mount.error_of(self.job(0).commit, "step4"), "ECANCELED")
        self.assertIn("consumed says that 12 samples are consumed, and rank/1/consumed on node w2 that 16 are",
                      self.job(0).commit_error("step4"))
        models.write_file(self.job(2).incoming("step4") + "/rank/1/consumed", "12")
        self.job(0).commit("step4")
        self.nodes.wait_settled(self.name)
        for node in self.alive():
            self.assertEqual(mount.read_text(self.job(node).checkpoint("step4", "consumed")), "12\n")
        shutil.copyfile(self.job(1).checkpoint("step4", "consumed"), self.at(1, "consumed"))
        self.agree()
        self.finish(0)

    def test_rounded_down(self):
        """A change in the midst of a step: named, or repeated and told."""
        self.begin()
        self.consume(0, 8)
        self.save(0, "consumed", "10")
        self.agree()
        self.assertIn("the nearest ends of steps are 8 and 12", self.refused(1, "order.json", '{"batch": 6, "seed": 5}'))
        self.save_order(1, batch=6, round="down")
        self.agree()
        self.assertEqual(self.committed(2), 8)
        last = mount.read_json(self.at(2, "plan.json"))["segments"][-1]
        self.assertEqual((last["from"], last["repeated"]), (8, {"from": 8, "to": 10}))
        self.finish(2)


class Layouts(DataSet):
    """Of another dp: what counts is where the data set is, and not what one node has heard of it."""

    def test_refused_by_what_another_node_just_wrote(self):
        self.begin(dp=2)
        for count in range(1, SAMPLES, 4):
            self.save(0, "consumed", str(count))
            self.assertEqual(mount.error_of(lambda: self.job(2).save_layout(dp=1)), "EINVAL")
            self.assertIn(f"{count} consumed samples are not whole steps", self.job(2).error())
            self.save(0, "consumed", str(count + 3))
        self.job(2).set_layout(dp=1)
        self.agree()

    def test_a_change_that_waits(self):
        """The job went on while its model moved: the next whole step decides."""
        self.commit(0, BigLlama(31), devices=["w0:0"])
        self.begin(dp=1)
        self.nodes.shape(2, "2mbit")
        self.job(0).save_layout(dp=2, devices=["w2:0", "w2:1"])
        cluster.until(lambda: self.job(0).status()["state"] == "resharding", "it is being moved")
        self.save(1, "consumed", "6")
        self.nodes.shape(2, None)
        self.nodes.wait_settled(self.name)
        for node in self.alive():
            cluster.until(lambda node=node: self.status(node)["state"] == "waiting", "all say that the change waits")
            self.assertIn("the nearest ends of steps are 4 and 8", self.status(node)["error"])
            self.assertEqual(os.readlink(self.at(node, "head")), "gen/000001")
        self.consume(2, 8)
        self.agree()
        self.assertEqual(mount.read_json(self.at(0, "plan.json"))["segments"][-1]["dp"], 2)
        self.assertEqual({self.status(node)["state"] for node in self.alive()}, {"ready"})
        self.finish(1)


def shows(path, text):
    """A node that has not heard of the text yet has no such file, where there was none before."""
    try:
        return read(path).decode().strip() == text.strip()
    except FileNotFoundError:
        return False


class Partition(DataSet):
    def test_a_rename_below_a_silent_etcd(self):
        """A rename over a text that is agreed on holds locks of the whole mount: it is over in two seconds, whatever it waits for.
        What it was to save is saved when etcd is back, and the same rename again says so."""
        self.begin(dp=2)
        here = self.job(0)
        rules = json.dumps({"format": "ptc-rules/1", "family": "mine", "rules": [{"names": ["**"], "stage": "all"}]})
        other = self.nodes.job(0, self.name + "-other")
        self.addCleanup(lambda: self.nodes.nodes[0].ptc("rm", "--force", other.name, check=False))
        for name in ("a", "b"):
            os.makedirs(other.file(name))
        layout = {**mount.read_json(here.file("layout.json")), "keep": 3}
        texts = [("layout.json", json.dumps(layout)), ("rules.json", rules),
                 ("dataset/order.json", json.dumps({"seed": 5, "batch": 4, "epochs": 2})), ("dataset/consumed", "8\n")]
        for name, text in texts:
            with self.subTest(name=name):
                source, target = here.file(name + ".new"), here.file(name)
                save(source, text)

                def rename(source=source, target=target):
                    start = time.monotonic()
                    error = mount.error_of(os.rename, source, target)
                    return error, time.monotonic() - start
                mount.halt(self.nodes.etcd)
                try:
                    with concurrent.futures.ThreadPoolExecutor(1) as pool:
                        renamed = pool.submit(rename)
                        time.sleep(0.3)
                        started = time.monotonic()
                        os.rename(other.file("a"), other.file("b", "a"))
                        os.rename(other.file("b", "a"), other.file("a"))
                        self.assertLess(time.monotonic() - started, RENAME_SECONDS)
                        error, seconds = renamed.result()
                    self.assertEqual(error, "EAGAIN")
                    self.assertLess(seconds, RENAME_SECONDS + 0.3)
                    self.assertEqual(read(source).decode(), text)
                finally:
                    self.nodes.etcd.send_signal(signal.SIGCONT)
                cluster.until(lambda: rename()[0] == "", "the same rename again is told that it was done", 20)
                self.assertFalse(os.path.exists(source))
                cluster.until(lambda: all(shows(self.job(node).file(name), text) for node in range(3)), "all nodes have it", 20)
                self.nodes.wait_members()

    def test_cut_off_and_back(self):
        """A node alone reads and decides nothing; it catches up, though history was compacted meanwhile."""
        self.begin()
        before = self.shown(2)
        self.nodes.partition(2)
        cluster.until(lambda: "w2" not in self.nodes.nodes[2].members(), "it knows that it is alone")
        for name, text in (("order.json", '{"batch": 2, "seed": 5}'), ("consumed", "4"),
                           ("source.json", json.dumps({"shards": [self.data + "/."]}))):
            began = time.monotonic()
            self.assertEqual(mount.error_of(self.save, 2, name, text), "EAGAIN", name)
            print(f"{name} refused after {time.monotonic() - began:.3f} s")
            self.assertIn("node w2 is cut off from its cluster", self.status(2)["error"])
        self.assertEqual(self.shown(2), before)
        self.consume(0, 4)
        self.save_order(1, batch=8)
        self.consume(1, 12)
        self.nodes.compact_etcd()
        self.nodes.heal(2)
        self.nodes.wait_members()
        self.agree()
        self.finish(2)
        self.agree()

    def test_a_node_that_was_down(self):
        self.begin()
        self.nodes.kill(1)
        self.consume(0, 8)
        self.job(0).set_layout(dp=1)
        self.save_order(2, batch=5)
        self.nodes.start(1)
        self.nodes.wait_members()
        self.agree()
        self.finish(1)


class Kills(DataSet):
    """SIGKILL of the node that decides, at some call by which it stores or sends something."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        leader = cls.nodes.nodes[0]
        cls.faults = points.Faults(os.path.join(leader.top, "faults"))
        leader.launcher += ("env", *(f"{name}={value}" for name, value in cls.faults.environment.items()))
        cls.nodes.stop(0)
        cls.nodes.start(0)
        cls.nodes.wait_members()

    def points_of(self, change):
        before = self.faults.passed
        change()
        return self.faults.passed - before

    def strike(self, after, change):
        """Kills w0 that many points after `change` is begun. Whether it said that it was done."""
        self.faults.set(self.faults.passed + after, points.SIGNAL, signal.SIGKILL)
        error = mount.error_of(change)
        self.assertIn(error, ("", "ENOTCONN", "ECONNABORTED", "EIO"))
        self.nodes.nodes[0].process.wait()  # it sends something now and then, whatever is done
        self.faults.set(0, 0, 0)
        self.nodes.kill(0)
        waited = self.agree()
        self.nodes.start(0)
        self.nodes.wait_members()
        self.longest = max(self.longest, waited, self.agree())
        return not error

    def decide(self, kind, change, now, wanted, after):
        """It is as it was, or as wanted; that, if somebody was told so. What it is."""
        was = now()
        told = self.strike(after, change)
        found = now()
        self.assertIn(found, [wanted] if told else [was, wanted])
        self.ends.append(f"{kind} {'told' if told else 'done, not told' if found == wanted else 'not done'}")
        return found

    def test_the_node_that_decides_dies(self):
        """In the midst of a new order, of progress, and of another layout, in turn."""
        dice = random.Random(os.environ.get("PTC_SEED", time.time_ns()))
        seed = dice.randrange(1 << 32)
        print("PTC_SEED", seed)
        dice.seed(seed)
        self.longest, self.ends = 0, []
        batch, epochs = 2, KILLS // 3
        self.begin(epochs=epochs)
        spans = [self.points_of(lambda: self.save_order(0, batch=batch, epochs=epochs)),
                 self.points_of(lambda: self.save(0, "consumed", "0" + str(batch)))]
        spans.append(2 * spans[0])  # the layout, and what follows from it
        self.agree()
        self.note_seen(1, batch)
        rounds = -(-KILLS // 3)
        for number in range(KILLS):
            kind = number % 3
            after = 1 + (spans[kind] * (number // 3) + dice.randrange(spans[kind])) // rounds
            if kind == 0:
                other = 6 - batch
                batch = self.decide("order.json", lambda: self.save_order(0, batch=other, epochs=epochs),
                                    lambda: mount.read_json(self.at(1, "order.json"))["batch"], other, after)
            elif kind == 1:
                next_count = len(self.seen) + batch
                count = self.decide("consumed", lambda: self.save(0, "consumed", str(next_count)),
                                    lambda: self.committed(1), next_count, after)
                self.note_seen(1, count)
            else:
                other = 3 - mount.read_json(self.job(1).file("layout.json"))["dp"]
                self.decide("layout.json", lambda: self.job(0).save_layout(dp=other),
                            lambda: mount.read_json(self.job(1).file("layout.json"))["dp"], other, after)
            self.expect_history()
            self.consume(dice.choice((0, 1, 2)), len(self.seen) + batch)
            self.agree()
        print(f"points of a change: {spans}; {', '.join(self.ends)}; all agreed within {self.longest:.1f} s")
        self.finish(2)
        self.agree()


if __name__ == "__main__":
    unittest.main(verbosity=2)
