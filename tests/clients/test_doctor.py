"""ptc doctor on real faults: what it finds, what it says to do, and its exit status.

Other mounts of this machine may be there, of other tests: what is asked is about one mount, or in a mount namespace of
its own that has none.
"""
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import mount

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cluster"))
from authority import Authority, openssl  # noqa: E402

PTC = os.path.join(mount.bin_dir(), "ptc")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def doctor(*arguments, prefix=()):
    """Exit status, and check → finding."""
    done = subprocess.run([*prefix, PTC, "doctor", "--json", *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=False, timeout=30)
    assert done.stdout, done.stderr
    findings = json.loads(done.stdout)
    worst = max(("ok", "warn", "fail").index(finding["level"]) for finding in findings)
    assert done.returncode == (0, 5, 1)[worst], (done.returncode, findings)
    return done.returncode, {finding["check"]: finding for finding in findings}


class Findings(unittest.TestCase):
    def expect(self, findings, check, level, found, advice=""):
        finding = findings[check]
        self.assertEqual(finding["level"], level, finding)
        self.assertIn(found, finding["found"])
        self.assertIn(advice, finding.get("advice", ""))
        self.assertEqual(level == "ok", "advice" not in finding, finding)


@unittest.skipIf(os.getuid() != 0, "only root can make these faults")
class Machine(Findings):
    """Before a first mount, on a machine some of whose files are others."""
    STORES = "mkdir -p /run/ptcfs && mount -t tmpfs none /run/ptcfs && "

    def alone(self, *arguments, script="", **files):
        """With these texts in the place of files, "/" written as "__"."""
        with tempfile.TemporaryDirectory() as top:
            for path, text in files.items():
                with open(os.path.join(top, path), "w", encoding="utf-8") as file:
                    file.write(text)
                script += f"mount --bind {top}/{path} /{path.replace('__', '/')} && "
            away = "for m in $(awk '/fuse.ptcfs/ {print $2}' /proc/self/mounts); do umount -l $m; done; "
            return doctor(*arguments, prefix=("unshare", "-m", "sh", "-c", away + self.STORES + script + 'exec "$@"', "-"))

    def test_alone(self):
        _, found = self.alone()
        self.expect(found, "daemon", "ok", "the machine alone")
        self.expect(found, "leftovers", "ok", "none")
        self.expect(found, "/dev/fuse", "ok", "can be opened")
        self.assertNotIn("nodes", found)
        self.assertNotIn("store", found)

    def test_what_is_wrong(self):
        files = {"proc__meminfo": "MemTotal: 1048576 kB\nMemAvailable: 1024 kB\nSwapTotal: 1048576 kB\nSwapFree: 0 kB\n",
                 "proc__sys__vm__overcommit_memory": "2\n", "proc__sys__vm__max_map_count": "1000\n"}
        if os.path.exists("/sys/kernel/mm/transparent_hugepage/shmem_enabled"):
            files["sys__kernel__mm__transparent_hugepage__shmem_enabled"] = "always never [deny] force\n"
        script = "mkdir /run/ptcfs/mnt-a && touch /run/ptcfs/mnt-a/lock && "
        status, found = self.alone("--memory", "2G", script=script, **files)
        self.assertEqual(status, 5)
        self.expect(found, "memory", "warn", "1.0 MiB available of 1.0 GiB; the store may have 2.0 GiB", "--memory")
        self.expect(found, "swap", "warn", "1.0 GiB of 1.0 GiB used")
        self.expect(found, "overcommit", "warn", "is 2")
        self.expect(found, "mappings", "warn", "is 1000", "sysctl")
        self.expect(found, "huge pages", "warn", "den" if len(files) > 3 else "none")
        self.expect(found, "leftovers", "warn", "/run/ptcfs/mnt-a holds", "ptcfs --discard /mnt/a")

    def test_no_device(self):
        script = "mkdir /run/ptcfs/t && mount --bind /run/ptcfs/t /dev && "
        status, found = self.alone(script=script)
        self.assertEqual(status, 1)
        self.expect(found, "/dev/fuse", "fail", "No such file", "modprobe fuse")

    def test_other_rights(self):
        prefix = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all")
        _, found = doctor("/tmp", prefix=prefix)
        self.expect(found, "daemon", "fail", "no ptcfs is mounted on /tmp")
        self.expect(found, "rights", "warn", "CAP_SYS_ADMIN")
        self.expect(found, "passthrough", "warn", "cannot be had")
        prefix = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
        _, found = doctor("/tmp", prefix=prefix)
        self.assertRegex(found["rights"]["found"], "not root|fusermount3")
        done = subprocess.run([PTC, "doctor", "/no/such/place"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertIn("/no/such/place", done.stderr)


class Daemon(Findings, mount.TestCase):
    def doctor(self, *arguments):
        return doctor(self.mount.path, *arguments)

    def test_well(self):
        status, found = self.doctor()
        self.assertIn(status, (0, 5))
        pid = self.mount.process.pid
        self.expect(found, "daemon", "ok", f"process {pid}, serves {self.mount.path}")
        self.expect(found, "store", found["store"]["level"], self.mount.store)
        self.expect(found, "versions", "ok", "ptcfs")
        told = mount.read_json(self.mount.path + "/.ptc/daemon.json")
        self.assertEqual((told["pid"], told["user"]), (pid, os.getuid()))
        self.assertEqual(told["options"]["mount-point"], self.mount.path)
        self.assertEqual(told["kernel"]["passthrough"], mount.read_json(self.mount.path + "/.ptc/stats")["passthrough"])
        # -C and PTC_MOUNT name it, too.
        done = self.mount.ptc("doctor", check=False)
        self.assertIn(f"process {pid}, serves {self.mount.path}", done.stdout)
        self.assertNotIn("\033", done.stdout)
        columns = {re.match(r"(ok  |warn|FAIL)  \S.*?: +", line).end() for line in done.stdout.splitlines()}
        self.assertEqual(len(columns), 1, done.stdout)
        done = subprocess.run([PTC, "doctor"], capture_output=True, text=True, check=False,
                              env={**os.environ, "PTC_MOUNT": self.mount.path + "/.ptc"})
        self.assertIn(f"process {pid}, serves {self.mount.path}", done.stdout)

    def test_few_descriptors(self):
        pid = str(self.mount.process.pid)
        was = subprocess.run(["prlimit", "--pid", pid, "--nofile", "--output", "SOFT,HARD", "--noheadings"],
                             capture_output=True, text=True, check=True).stdout.split()
        subprocess.run(["prlimit", "--pid", pid, "--nofile=300:" + was[1]], check=True)
        try:
            status, found = self.doctor()
        finally:
            subprocess.run(["prlimit", "--pid", pid, "--nofile=" + ":".join(was)], check=True)
        self.assertEqual(status, 1)
        self.expect(found, "open files", "fail", "at most 300", "LimitNOFILE")

    def test_stopped(self):
        mount.halt(self.mount.process)
        try:
            begin = time.monotonic()
            status, found = self.doctor()
            self.assertLess(time.monotonic() - begin, 12)
        finally:
            self.mount.process.send_signal(signal.SIGCONT)
        self.assertEqual(status, 1)
        self.expect(found, "daemon", "fail", "does not answer", "pgrep")

    def test_killed(self):
        with mount.Mount() as other:
            _, before = self.doctor()
            self.assertNotIn(other.path, before["leftovers"]["found"])
            other.process.kill()
            other.process.wait()
            status, found = doctor(other.path)
            self.assertEqual(status, 1)
            self.expect(found, "daemon", "fail", f"the daemon behind {other.path} is gone", f"ptcfs … {other.path}")
            _, found = self.doctor()
            self.expect(found, "leftovers", "warn", other.path + " is a dead mount", "umount -l " + other.path)

    @unittest.skipIf(os.getuid() != 0, "only root can mount a tmpfs")
    def test_full(self):
        with mount.Mount("--memory", "32M") as other:
            job = other.job("a")
            os.makedirs(job.incoming("b"))
            with open(job.incoming("b") + "/file", "wb") as file:
                file.write(bytes(30 << 20))
            _, found = doctor(other.path)
            self.assertIn(found["store"]["level"], ("warn", "fail"))
            self.assertIn("of 32.0 MiB used", found["store"]["found"])
            self.assertIn("--memory", found["store"]["advice"])


class Etcd:
    """One member, with TLS."""

    def __init__(self, top):
        self.authority = Authority(os.path.join(top, "etcd-certificates"))
        self.url = f"https://127.0.0.1:{free_port()}"
        certificate, key = self.authority.issue("etcd", "IP:127.0.0.1")
        self.log = open(os.path.join(top, "etcd.log"), "wb")  # pylint: disable=consider-using-with
        self.process = subprocess.Popen(
            ["etcd", "--data-dir", os.path.join(top, "etcd"), "--listen-client-urls", self.url,
             "--advertise-client-urls", self.url, "--listen-peer-urls", f"http://127.0.0.1:{free_port()}",
             "--cert-file", certificate, "--key-file", key], stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 20
        while "ready to serve" not in mount.read_text(self.log.name):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("etcd does not start:\n" + mount.read_text(self.log.name))
            time.sleep(0.02)

    def post(self, method, **request):
        context = ssl.create_default_context(cafile=self.authority.ca)
        call = urllib.request.Request(f"{self.url}/v3/{method}", json.dumps(request).encode())
        with urllib.request.urlopen(call, context=context, timeout=10) as answer:
            return json.load(answer)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


class Cluster(Findings):
    """Two nodes and etcd, all with TLS."""

    @classmethod
    def setUpClass(cls):
        for program in ("etcd", "openssl"):
            mount.require_program(program)
        cls.top = tempfile.mkdtemp(prefix="ptcfs-doctor-")
        cls.addClassCleanup(shutil.rmtree, cls.top, ignore_errors=True)
        cls.etcd = Etcd(cls.top)
        cls.addClassCleanup(cls.etcd.end)
        cls.authority = Authority(os.path.join(cls.top, "certificates"))
        cls.secret = os.path.join(cls.top, "secret")
        with open(os.open(cls.secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write("f00d" * 16)
        cls.nodes = [cls.node(name) for name in ("w1", "w2")]
        for node in cls.nodes:
            node.__enter__()
            cls.addClassCleanup(node.__exit__)

    @classmethod
    def node(cls, name):
        certificate, key = cls.authority.issue(name)
        return mount.Mount("--node", name, "--listen", f"127.0.0.1:{free_port()}", "--lease", "2", "--secret", cls.secret,
                           "--etcd", cls.etcd.url, "--etcd-ca", cls.etcd.authority.ca,
                           "--tls-ca", cls.authority.ca, "--tls-cert", certificate, "--tls-key", key)

    def until(self, check, level, found, advice="", node=0):
        deadline = time.monotonic() + 15
        while True:
            status, findings = doctor(self.nodes[node].path)
            if findings[check]["level"] == level or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        self.expect(findings, check, level, found, advice)
        return status, findings

    def test_1_well(self):
        _, found = self.until("nodes", "ok", "2 answer")
        self.until("node clocks", "ok", "1 of other nodes agree")
        self.expect(found, "agreement", "ok", "decides")
        self.expect(found, "versions", "ok", "on all nodes that answer")
        self.assertRegex(found["etcd"]["found"], self.etcd.url + r": etcd [\d.]+ answers in [\d.]+ ms, its database has")
        for check in ("--tls-ca", "--tls-cert", "--etcd-ca", self.etcd.url):
            self.expect(found, check, "ok", "is good until")
        told = mount.read_text(self.nodes[0].path + "/.ptc/daemon.json")
        self.assertIn(self.secret, told)
        self.assertNotIn("f00d", told)
        self.assertNotIn("PRIVATE KEY", told)

    def test_2_certificates(self):
        self.authority.issue("late")
        openssl(self.authority.directory, "x509", "-req", "-in", "late.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-days", "-1", "-out", "late.pem")
        options = ("--tls-cert", self.authority.file("late.pem"), "--tls-ca", self.authority.file("ca.key"))
        status, found = doctor(self.nodes[0].path, *options)
        self.assertEqual(status, 1)
        self.expect(found, "--tls-cert", "fail", "has expired on", "made anew")
        self.expect(found, "--tls-ca", "fail", "holds no certificate", "PEM")
        # The daemon's own, which is exchanged while it runs.
        own = self.authority.file("w1.pem")
        shutil.copy(own, own + ".good")
        shutil.copy(self.authority.file("late.pem"), own)
        status, found = doctor(self.nodes[0].path)
        os.rename(own + ".good", own)
        self.assertEqual(status, 1)
        self.expect(found, "--tls-cert", "fail", own + " has expired")
        _, found = doctor(self.nodes[0].path, "--tls-ca", "/no/such/file")
        self.expect(found, "--tls-ca", "warn", "/no/such/file", "root")

    def test_3_alarm(self):
        member = self.etcd.post("maintenance/status")["header"]["member_id"]
        alarm = {"memberID": member, "alarm": "NOSPACE"}
        self.etcd.post("maintenance/alarm", action="ACTIVATE", **alarm)
        status, found = doctor(self.nodes[0].path)
        self.etcd.post("maintenance/alarm", action="DEACTIVATE", **alarm)
        self.assertEqual(status, 1)
        self.expect(found, "etcd", "fail", "NOSPACE", "etcdctl alarm disarm")
        _, found = doctor(self.nodes[0].path)
        self.expect(found, "etcd", "ok", "answers in")

    def test_4_other_version(self):
        """A daemon that calls itself another version: the same program, with that text changed in it."""
        node = self.nodes[1]
        version = mount.read_text(node.path + "/.ptc/version").split()[1].encode()
        other = version[:-1] + (b"8" if version[-1:] == b"9" else b"9")
        bin_dir = os.path.join(self.top, "bin")
        os.mkdir(bin_dir)
        program = mount.read_bytes(os.path.join(node.bin, "ptcfs")).replace(b"\0" + version + b"\0", b"\0" + other + b"\0")
        with open(os.open(bin_dir + "/ptcfs", os.O_WRONLY | os.O_CREAT, 0o755), "wb") as file:
            file.write(program)
        was, node.bin = node.bin, bin_dir
        node.stop()
        node.start()
        node.bin = was
        self.until("versions", "fail", f"{other.decode()} on w2", "one version on all nodes")
        _, found = doctor(node.path)
        self.expect(found, "daemon", "ok", other.decode())

    def test_5_away(self):
        node = self.nodes[1]
        node.process.kill()
        node.process.wait()
        self.until("nodes", "warn", "w2 is away", "start it")

    def test_6_no_etcd(self):
        self.etcd.process.kill()
        self.etcd.process.wait()
        status, found = self.until("agreement", "fail", "w1 does not reach")
        self.assertEqual(status, 1)
        self.expect(found, "etcd", "fail", "refused", "start etcd")
        self.expect(found, "nodes", "fail", "w1 is cut off")
        _, found = doctor("--etcd", "http://127.0.0.1:1,http://127.0.0.1:2", "/tmp")
        self.expect(found, "etcd", "fail", "refused", "start etcd")


if __name__ == "__main__":
    mount.main()
