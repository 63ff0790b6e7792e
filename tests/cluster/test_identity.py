"""A store and a cluster know each other: whatever etcd says, or says no more, no store loses anything by it."""
import contextlib
import os
import shutil
import signal
import subprocess
import time
import unittest

import cluster
from cluster import mount  # noqa: F401 (it finds tests/clients)
import models
from cases import LEASE, layout_name, read, tree


class TestCase(unittest.TestCase):
    """Every test has a cluster of its own, for it takes that apart."""
    NODES = 2

    def setUp(self):
        self.nodes = cluster.Cluster(self.NODES, "--lease", str(LEASE))
        self.nodes.__enter__()
        self.addCleanup(self.nodes.__exit__)

    def node(self, number):
        return self.nodes.nodes[number]

    def write(self, number, name, seed, alone=False, **layout):
        """A job with one checkpoint, and something in incoming/."""
        job = self.nodes.job(number, name)
        model = models.Llama(seed)
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        if layout:
            job.set_layout(**layout)
        if alone:
            job.wait()
        else:
            self.nodes.wait_settled(name)
        models.write_file(job.incoming("next") + "/rank/0/notes.txt", "staged")
        return model

    def content(self, number, name):
        job = mount.Job(self.node(number), name)
        return tree(job.checkpoint("base", "model"))

    def reads(self, number, name):
        with contextlib.suppress(OSError):
            return len(self.content(number, name)) > 0
        return False

    def staged(self, number, name):
        return read(os.path.join(self.node(number).path, name, "incoming/next/rank/0/notes.txt"))

    def files(self, number):
        """What lies in the store of bytes and of what users wrote, with sizes."""
        found = {}
        for top in ("images", "jobs"):
            for where, _, names in os.walk(os.path.join(self.node(number).store, top)):
                for name in names:
                    path = os.path.join(where, name)
                    with contextlib.suppress(FileNotFoundError):
                        if "/images" in where or "/files/" in where:
                            found[os.path.relpath(path, self.node(number).store)] = os.stat(path).st_size
        return found

    def refuses(self, number, *said):
        self.refuses_to_start(self.node(number), *said)

    def refuses_to_start(self, node, *said):
        with self.assertRaises(RuntimeError):
            node.start()
        node.process = None
        last = mount.read_text(node.log).rstrip().rsplit("\n", 1)[-1]
        for words in said:
            self.assertIn(words, last)

    def clear(self, number):
        """Its store is empty, as on a new machine."""
        shutil.rmtree(self.node(number).store)
        os.mkdir(self.node(number).store)

    def stop_all(self):
        for number in range(self.NODES):
            self.nodes.stop(number)

    def start_all(self):
        for number in range(self.NODES):
            self.nodes.start(number)
        self.nodes.wait_members()

    def end_etcd(self):
        self.nodes.etcd.send_signal(signal.SIGKILL)
        self.nodes.etcd.wait()

    def lose_etcd(self):
        self.end_etcd()
        shutil.rmtree(os.path.join(self.nodes.top, "etcd/data"))
        self.nodes.run_etcd()

    def save_etcd(self):
        self.backup = os.path.join(self.nodes.top, "etcd/backup")
        self.nodes.etcdctl("snapshot", "save", self.backup)

    def restore_etcd(self):
        self.end_etcd()
        data = os.path.join(self.nodes.top, "etcd/data")
        shutil.rmtree(data)
        cluster.run("env", "ETCDCTL_API=3", "etcdctl", "snapshot", "restore", self.backup, "--data-dir", data)
        self.nodes.run_etcd()

    def wait_leases(self):
        """Those of a backup begin anew."""
        cluster.until(lambda: "/nodes/" not in self.nodes.etcdctl("get", "--prefix", "--keys-only", "/ptcfs/"), "leases end")

    def recover(self, number, *options, check=True, stores=None):
        """With --yes, from the store that has seen the latest of all."""
        if stores is None:
            stores = [node.store for node in self.nodes.nodes] if "--yes" in options else [self.node(number).store]
        command = ["ip", "netns", "exec", cluster.namespace(self.nodes.top, f"w{number}"),
                   os.path.join(mount.bin_dir(), "ptc"), "recover", "--etcd", self.nodes.etcd_url,
                   *self.nodes.etcd_tls_options(), *options, *stores]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if check:
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done


class Stores(TestCase):
    NODES = 1

    def test_one_that_was_alone_keeps_its_jobs(self):
        node = self.node(0)
        with_etcd = node.options
        self.nodes.stop(0)
        self.clear(0)
        self.nodes.etcdctl("del", "--prefix", "/ptcfs/")
        node.options = []
        node.start()
        self.write(0, "llama", 1, alone=True)
        whole = self.content(0, "llama")
        node.stop()
        node.options = with_etcd
        node.start()
        self.assertEqual(self.content(0, "llama"), whole)
        self.assertEqual(self.staged(0, "llama"), b"staged")
        job = mount.Job(node, "llama")
        job.set_layout(tp=2)
        self.nodes.wait_settled("llama")
        node.ptc("verify", "llama")
        node.stop(kill=True)
        node.start()
        self.assertEqual(self.content(0, "llama"), whole)
        node.stop()
        node.options = []
        self.refuses(0, "belongs to cluster ptcfs", "--etcd")
        node.options = with_etcd
        node.start()
        self.assertEqual(self.content(0, "llama"), whole)

    def test_a_wrong_name_of_the_cluster(self):
        self.write(0, "llama", 2)
        whole, files = self.content(0, "llama"), self.files(0)
        node = self.node(0)
        node.stop()
        right = node.options
        node.options = [*right, "--cluster", "ptcsf"]
        self.refuses(0, "belongs to cluster ptcfs", "cluster ptcsf", "knows no such cluster")
        self.assertEqual(self.files(0), files)
        node.options = right
        node.start()
        self.assertEqual(self.content(0, "llama"), whole)
        self.assertEqual(self.staged(0, "llama"), b"staged")

    def test_killed_it_joins_again_at_once_whatever_its_address_is_called(self):
        node = self.node(0)
        node.stop()
        at = node.options.index("--listen")
        node.options = (*node.options[:at + 1], "localhost:7070", *node.options[at + 2:])
        node.start()
        self.write(0, "llama", 3)
        node.stop(kill=True)
        began = time.monotonic()
        node.start()
        self.assertLess(time.monotonic() - began, LEASE)
        mount.Job(node, "llama").set_layout(tp=2)

    def alone(self, name):
        """A store that was never in the cluster, with a job, and what it is started with to join as w0."""
        top = os.path.join(self.nodes.top, name)
        os.mkdir(top)
        self.addCleanup(shutil.rmtree, top)
        joins = [option.replace(":7070", ":7171") for option in self.node(0).options]
        other = mount.Mount(top=top)
        other.launcher = self.node(0).launcher
        other.start()
        other.ptc("import", name, self.model)
        other.stop()
        return other, joins

    def named(self, node, options):
        """The same for a node of this name, with a certificate of its own if nodes have these."""
        own = dict(zip(self.nodes.tls_options("w0"), self.nodes.tls_options(node)))
        own["w0"] = node
        return [own.get(option, option) for option in options]

    def test_jobs_do_not_come_under_the_name_of_another_node(self):
        """Refused before anything of them is the cluster's: under a name of its own the node joins."""
        self.write(0, "llama", 4)
        self.model = os.path.join(self.nodes.top, "model")
        models.Llama(5).write_hf(self.model)
        other, joins = self.alone("gpt")
        jobs = self.nodes.etcdctl("get", "--prefix", "--keys-only", "/ptcfs/")
        before = tree(other.store)
        other.options = [*joins, "--join"]
        self.refuses_to_start(other, "node w0 runs at 10.1.0.1:7070: stop it first, or give this node another name (--node)")
        self.nodes.stop(0)
        self.refuses_to_start(other, "has a node w0 already, with another store", "--node")
        self.assertEqual({path: text for path, text in tree(other.store).items() if not path.startswith("meta.db")},
                         {path: text for path, text in before.items() if not path.startswith("meta.db")})
        self.nodes.start(0)
        self.assertEqual("gpt" in self.nodes.etcdctl("get", "--prefix", "--keys-only", "/ptcfs/"), "gpt" in jobs)
        other.options = [*self.named("w7", joins), "--join"]
        other.start()
        self.addCleanup(other.stop)
        cluster.until(lambda: os.path.isdir(self.node(0).path + "/gpt"), "w0 shows what came with w7")

    def test_there_is_a_cluster_to_join(self):
        """Or --cluster is misspelt, and the store would be bound to what begins by that."""
        self.model = os.path.join(self.nodes.top, "model")
        models.Llama(5).write_hf(self.model)
        other, joins = self.alone("gpt")
        for option in (["--join"], ["--join-as", "gpt=gpt-b"]):
            other.options = [*joins, "--cluster", "ptcsf", *option]
            self.refuses_to_start(other, "there is no cluster ptcsf to join", "--cluster")
        other.options = []
        other.start()
        self.assertIn("gpt", os.listdir(other.path))
        other.stop()

    def test_what_was_saved_just_before_a_stop_is_not_lost_with_etcd(self):
        self.write(0, "llama", 4)
        for round_ in range(3):
            rules = f'{{"format": "ptc-rules/1", "extends": "llama", "description": "{round_}"}}'
            models.write_file(self.node(0).path + "/llama/rules.json", rules)
            self.nodes.stop(0)
            self.lose_etcd()
            self.recover(0, "--yes")
            self.nodes.start(0)
            self.assertEqual(mount.read_text(self.node(0).path + "/llama/rules.json"), rules)

    def test_a_copy_beside_the_one_that_runs(self):
        """As after a move to another machine, when the old one is started again by mistake."""
        self.write(0, "llama", 4)
        whole, running = self.content(0, "llama"), self.node(0)
        top = os.path.join(self.nodes.top, "copy")
        os.mkdir(top)
        self.addCleanup(shutil.rmtree, top)
        copy = mount.Mount(*[option.replace(":7070", ":7171") for option in running.options], top=top)
        copy.launcher = running.launcher
        os.rmdir(copy.store)
        shutil.copytree(running.store, copy.store)
        self.refuses_to_start(copy, "node w0 runs at 10.1.0.1:7070, with this store or one that it was copied from")
        self.assertEqual(self.content(0, "llama"), whole)
        mount.Job(running, "llama").set_layout(tp=2)
        self.nodes.wait_settled("llama")
        self.nodes.stop(0)
        self.nodes.start(0)
        self.assertEqual(self.content(0, "llama"), whole)
        self.nodes.stop(0)
        self.refuses_to_start(copy, "is an older copy")
        self.nodes.start(0)
        self.assertEqual(self.content(0, "llama"), whole)


class Etcd(TestCase):
    def begin(self):
        self.write(0, "llama", 4, pp=2, devices=["w0:0", "w1:0"])
        self.write(1, "gpt", 5)
        os.mkdir(os.path.join(self.node(0).path, "empty"))
        self.whole = [self.content(0, "llama"), self.content(1, "gpt")]
        self.there = [self.files(number) for number in range(2)]

    def expect_all(self):
        for number in range(2):
            now = self.files(number)
            self.assertEqual({path: now.get(path) for path in self.there[number]}, self.there[number])
            self.assertEqual([self.content(number, "llama"), self.content(number, "gpt")], self.whole)
            self.assertTrue(os.path.isdir(os.path.join(self.node(number).path, "empty")))
        self.assertEqual(self.staged(0, "llama"), b"staged")
        self.assertEqual(self.staged(1, "gpt"), b"staged")
        self.node(0).ptc("verify", "llama")
        mount.Job(self.node(1), "llama").set_layout(tp=2)
        self.nodes.wait_settled("llama")
        self.assertEqual([self.content(0, "llama"), self.content(1, "gpt")], self.whole)

    def expect_doubt(self, *said):
        """Nodes that run read on, decide nothing, and say why."""
        for number in range(2):
            def doubts(number=number):
                report = mount.read_json(self.node(number).path + "/.ptc/nodes.json")
                return "agreement" in report and all(words in report["agreement"]["why"] for words in said)
            cluster.until(doubts, f"w{number} says that etcd is not what it was")
            with self.assertRaises(OSError):
                os.mkdir(os.path.join(self.node(number).path, "new"))
            with self.assertRaises(OSError):
                os.rename(os.path.join(self.node(0).path, "llama/incoming/next"),
                          os.path.join(self.node(0).path, "llama/checkpoints/next"))
        time.sleep(2 * LEASE)
        for number in range(2):
            self.assertEqual([self.content(number, "llama"), self.content(number, "gpt")], self.whole)
            # Of the other node's rank, which the kernel does not know yet.
            job = mount.Job(self.node(number), "llama")
            for rank in range(2):
                read(job.rank_file("base", layout_name(2, 1), rank))
            self.assertIn("not believed", " ".join(job.status()["warnings"]))
            self.assertEqual(set(self.there[number]) - set(self.files(number)), set())

    def test_lost_while_the_nodes_were_stopped(self):
        self.begin()
        self.stop_all()
        self.lose_etcd()
        for number in range(2):
            self.refuses(number, "belongs to cluster ptcfs", "knows no such cluster", "ptc recover")
            self.assertEqual(self.files(number), self.there[number])
        seen = self.recover(0, "--dry-run").stdout
        self.assertIn("jobs: empty, gpt, llama", seen)
        self.assertIn("on w1 (not looked at)", seen)
        warned = "--cluster says ptcsf, and the stores are of the cluster ptcfs"
        for more in ((), ("--cluster", "ptcfs")):
            self.assertNotIn("--cluster", self.recover(0, "--dry-run", *more).stderr)
        for more in (("--dry-run",), ("--yes",)):
            done = self.recover(0, *more, "--cluster", "ptcsf")
            self.assertIn(warned, done.stderr)
            self.assertIn("All of its nodes are to be started with --cluster ptcsf then", done.stderr)
        self.assertIn("done: start the nodes again, with --cluster ptcsf", done.stdout)
        images = os.path.join(self.node(0).store, "images")
        lost = max((os.path.join(images, name) for name in os.listdir(images)), key=os.path.getsize)
        os.rename(lost, self.node(0).store + "/lost")
        self.assertRegex(self.recover(0, "--dry-run").stdout, r"(llama|gpt)/\w+: .* 1 MISSING")
        os.rename(self.node(0).store + "/lost", lost)
        self.refuses(0, "ptc recover")
        self.assertNotEqual(self.recover(0, check=False).returncode, 0)  # nobody said yes
        self.recover(0, "--yes")
        self.start_all()
        self.expect_all()

    def test_lost_while_they_run(self):
        self.begin()
        self.lose_etcd()
        self.expect_doubt()
        refused = self.recover(0, "--yes", check=False)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("a ptcfs daemon has the store", refused.stderr)
        refused = self.recover(0, "--dry-run", check=False, stores=[self.node(0).path])
        self.assertIn("ptcfs is mounted at", refused.stderr)
        self.stop_all()
        self.recover(1, "--yes")
        self.start_all()
        self.expect_all()

    def test_restored_while_the_nodes_were_stopped(self):
        self.save_etcd()
        self.begin()
        self.node(0).ptc("rm", "--force", "empty")
        os.mkdir(os.path.join(self.node(1).path, "empty"))
        self.nodes.wait_settled("empty")
        time.sleep(1)
        self.stop_all()
        self.restore_etcd()
        for number in range(2):
            self.refuses(number, "belongs to cluster ptcfs", "set back", "ptc recover")
        self.wait_leases()
        self.recover(0, "--yes")
        self.start_all()
        self.expect_all()

    def test_restored_while_they_run(self):
        self.write(0, "old", 6)
        self.save_etcd()
        self.begin()
        self.node(0).ptc("rm", "--force", "old")
        self.there = [self.files(number) for number in range(2)]
        self.restore_etcd()
        self.expect_doubt("went back")
        self.stop_all()
        self.wait_leases()
        self.recover(0, "--yes")
        self.start_all()
        self.assertFalse(os.path.exists(os.path.join(self.node(1).path, "old")))
        self.expect_all()

    def test_away_for_a_while_and_then_itself(self):
        self.begin()
        data = os.path.join(self.nodes.top, "etcd/data")
        self.end_etcd()
        os.rename(data, data + "-right")
        self.nodes.run_etcd()
        self.expect_doubt()
        self.end_etcd()
        shutil.rmtree(data)
        os.rename(data + "-right", data)
        self.nodes.run_etcd()
        self.nodes.wait_members()
        cluster.until(lambda: all("agreement" not in mount.read_json(node.path + "/.ptc/nodes.json")
                                  for node in self.nodes.nodes), "it is believed again")
        self.expect_all()

    def test_an_import_while_it_is_away_says_why_and_soon(self):
        model, node = os.path.join(self.nodes.top, "model"), self.node(0)
        models.Llama(5).write_hf(model)
        self.addCleanup(shutil.rmtree, model)
        self.end_etcd()
        cluster.until(lambda: "agreement" in mount.read_json(node.path + "/.ptc/nodes.json"), "w0 knows that it is cut off")
        began = time.monotonic()
        done = node.ptc("import", "new", model, check=False)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("job new cannot be made: agreement is away", done.stderr)
        self.assertIn("node w0 does not reach the agreement store (etcd)", done.stderr)
        self.nodes.run_etcd()
        self.nodes.wait_members()
        node.ptc("import", "new", model)

    def test_what_is_removed_goes_everywhere(self):
        self.begin()
        self.nodes.kill(1)
        self.nodes.wait_members()
        self.node(0).ptc("rm", "--force", "llama")
        self.node(0).ptc("rm", "--force", "gpt")
        self.nodes.start(1)
        self.nodes.wait_members()
        for number in range(2):
            cluster.until(lambda number=number: self.files(number) == {}, f"nothing is left on w{number}")

        def carried_out():
            """The next change takes away what all have said to have done."""
            os.mkdir(os.path.join(self.node(0).path, f"job-{time.monotonic_ns()}"))
            return "/removed/" not in self.nodes.etcdctl("get", "--prefix", "--keys-only", "/ptcfs/")
        cluster.until(carried_out, "no tombstone is left")


class Parted(TestCase):
    """A node without a past works on what was restored, and those that know more only come then."""
    NODES = 3

    def test_each_view_says_what_it_leaves_out_and_one_is_chosen(self):
        self.write(0, "old", 11)
        self.save_etcd()
        self.write(0, "acked", 12)
        whole = self.content(0, "acked")
        time.sleep(1)
        self.stop_all()
        self.restore_etcd()
        self.refuses(0, "set back", "ptc recover")
        self.clear(2)
        self.nodes.start(2)
        fresh = [f"fresh{number:02}" for number in range(20)]  # so that its revisions are the later ones
        for name in fresh:
            os.mkdir(os.path.join(self.node(2).path, name))
        self.refuses(0, "is not what it was")
        self.nodes.stop(2)
        self.wait_leases()
        stores = [node.store for node in self.nodes.nodes]
        seen = self.recover(0, "--dry-run", stores=stores).stdout
        self.assertIn("have seen different things agreed", seen)
        self.assertRegex(seen, r"--from w0 or w1 leaves out:\n    job fresh00 \(known to w2\)")
        self.assertRegex(seen, r"--from w2 leaves out:(\n    .*)*\n    job acked with 1 checkpoint \(known to w0, w1\)")
        there = self.nodes.etcdctl("get", "--prefix", "/ptcfs/")
        refused = self.recover(0, "--yes", check=False)
        self.assertEqual(refused.returncode, 1, refused.stdout)
        self.assertIn("--from NODE", refused.stderr)
        self.assertEqual(self.nodes.etcdctl("get", "--prefix", "/ptcfs/"), there)
        self.assertIn("in etcd now, and not of this: job fresh00, ", self.recover(0, "--dry-run").stdout)

        copies = os.path.join(self.nodes.top, "copies")
        shutil.copytree(self.node(0).store, copies + "/w0")
        done = self.recover(0, "--yes", "--from", "w2").stdout
        self.assertIn(f"stays in {self.node(0).store}, {self.node(1).store}, where", done)
        self.start_all()
        self.assertEqual(sorted(self.jobs(0)), [*fresh, "old"])
        kept = mount.read_json(self.node(0).path + "/.ptc/nodes.json")["kept"]
        self.assertIn("jobs/acked", kept)
        self.assertEqual(read(os.path.join(self.node(0).store, "jobs/acked/files/incoming/next/rank/0/notes.txt")),
                         b"staged")
        self.stop_all()

        # As ptc(1) says: what was left out is read of a copy, in a cluster of another name.
        node = self.node(0)
        self.recover(0, "--yes", "--from", "w0", "--cluster", "other", stores=[copies + "/w0"])
        node.store, node.options = copies + "/w0", [*node.options, "--cluster", "other"]
        node.start()
        self.assertEqual(self.content(0, "acked"), whole)
        node.stop()

    def jobs(self, number):
        return [name for name in os.listdir(self.node(number).path) if not name.startswith(".")]


class Joining(TestCase):
    def test_with_jobs_of_its_own_into_a_cluster_that_has_some(self):
        self.write(0, "llama", 7)
        node = self.node(1)
        with_etcd = node.options
        node.stop()
        self.clear(1)
        node.options = []
        node.start()
        self.write(1, "gpt", 8, alone=True)
        whole = self.content(1, "gpt")
        os.mkdir(os.path.join(node.path, "llama"))
        node.stop()
        files = self.files(1)
        node.options = [*with_etcd, "--join"]
        self.refuses(1, "llama", "so has cluster")
        node.options = []
        node.start()
        os.rmdir(os.path.join(node.path, "llama"))
        node.stop()
        node.options = with_etcd
        self.refuses(1, "gpt", "llama", "--join")
        self.assertEqual(self.files(1), files)
        node.options = [*with_etcd, "--join"]
        node.start()
        self.nodes.wait_members()
        cluster.until(lambda: self.reads(0, "gpt"), "w0 reads gpt, too")
        for number in range(2):
            self.assertEqual(self.content(number, "gpt"), whole)
        self.assertEqual(self.staged(1, "gpt"), b"staged")
        node.options = with_etcd
        node.stop()
        node.start()
        cluster.until(lambda: self.reads(0, "gpt"), "w0 reads gpt again")
        self.assertEqual(self.content(0, "gpt"), whole)


if __name__ == "__main__":
    unittest.main(verbosity=2)
