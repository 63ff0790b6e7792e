"""ptcfs --http: everything it shows agrees with the mount, and nobody can hold it up."""
import datetime
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse

import models
import mount
import prometheus

URL = re.compile(r"http: (http://(\S+):(\d+)/)")


class HttpMount(mount.Mount):
    """A mount with --http on a port of its own."""

    def __init__(self, address="127.0.0.1:0", options=("--http", "{}")):
        super().__init__(*(option.format(address) for option in options))

    def address(self):
        deadline = time.monotonic() + mount.START_SECONDS
        while time.monotonic() < deadline:
            with open(self.log, encoding="utf-8", errors="replace") as log:
                if found := URL.search(log.read()):
                    return found[2].strip("[]"), int(found[3])
            time.sleep(0.02)
        raise AssertionError("the log names no address: " + mount.read_text(self.log))

    def ask(self, path, method="GET", headers=None, body=None):
        """The answer, with its .body."""
        connection = http.client.HTTPConnection(*self.address(), timeout=60)
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        answer.body = answer.read()
        connection.close()
        return answer

    def start_again(self):
        """At another address."""
        open(self.log, "w", encoding="utf-8").close()
        self.start()

    def raw(self, data=b""):
        connection = socket.create_connection(self.address(), timeout=60)
        connection.sendall(data)
        return connection


def received(connection):
    """All that comes until the other side closes."""
    data = b""
    with connection:
        while part := connection.recv(1 << 16):
            data += part
    return data


class Http(mount.TestCase):
    mount_type = HttpMount

    def resharded(self, name=None):
        job = self.mount.job(name) if name else self.new_job()
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.wait()
        job.set_layout(tp=2)
        return job

    def get(self, path):
        answer = self.mount.ask(path)
        self.assertEqual(answer.status, 200, path)
        return answer

    def test_files_of_a_job_are_those_of_the_mount(self):
        job = self.resharded('a "b" é%41?')
        for name, kind in (("status.json", "application/json"), ("plan.json", "application/json"),
                           ("plan.svg", "image/svg+xml")):
            answer = self.get(f"/jobs/{urllib.parse.quote(job.name)}/{name}?at=1")
            self.assertEqual(answer.body.decode(), mount.read_text(job.file(name)), name)
            self.assertEqual(answer.headers["Content-Type"], kind)
            self.assertIn("default-src 'none'", answer.headers["Content-Security-Policy"])

    def test_all_in_one_document(self):
        job = self.resharded()
        document = json.loads(self.get("/api/jobs.json").body)
        found = [j for j in document["jobs"] if j["status"]["job"] == job.name]
        self.assertEqual(len(found), 1)
        self.assertEqual(found[0]["status"], job.status())
        self.assertEqual(found[0]["plan"], json.loads(mount.read_text(job.file("plan.json"))))
        self.assertTrue(found[0]["plan"]["flows"])
        self.assertGreater(document["store"]["materialised_bytes"], 0)

    def test_metrics_are_those_of_the_mount(self):
        self.resharded()
        answer = self.get("/metrics")
        self.assertEqual(answer.headers["Content-Type"],
                         "text/plain; version=0.0.4; charset=utf-8")
        served = prometheus.check(answer.body.decode())
        read = prometheus.check(mount.read_text(self.mount.path + "/.ptc/metrics"))
        jobs = {key: value for key, value in read.items() if key[0].startswith("ptcfs_job")}
        self.assertEqual(jobs, {k: v for k, v in served.items() if k[0].startswith("ptcfs_job")})

    def test_head_says_what_get_would_send(self):
        self.resharded()
        for path in ("/metrics", "/api/jobs.json"):
            connection = self.mount.raw(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n"
                                        "Connection: close\r\n\r\n".encode())
            head, body = received(connection).split(b"\r\n\r\n", 1)
            self.assertEqual(body, b"")
            self.assertTrue(head.startswith(b"HTTP/1.1 200 "), head)
            self.assertGreater(int(re.search(rb"Content-Length: (\d+)", head)[1]), 100)

    def test_nothing_else_is_there(self):
        job = self.resharded()
        for path in ("/no", "/jobs", "/jobs/", f"/jobs/{job.name}", f"/jobs/{job.name}/",
                     f"/jobs/{job.name}/layout.json", "/jobs/nobody/status.json",
                     f"/jobs/{job.name}/../../metrics", f"/jobs/{job.name}/..%2fstatus.json",
                     "/../../../etc/passwd", "//etc/passwd", "/%2e%2e/etc/passwd", "/jobs/%/x",
                     "/jobs/%zz/status.json", "/jobs/%00/status.json"):
            self.assertEqual(self.mount.ask(path).status, 404, path)

    def test_health(self):
        for path, lines in (("/healthz", "mount: ok\nrequests: ok\n"),
                            ("/readyz", "mount: ok\nrequests: ok\nleaving: ok\n")):
            answer = self.get(path)
            self.assertEqual(answer.body.decode(), lines)
            self.assertEqual(answer.headers["Content-Type"], "text/plain; charset=utf-8")
            self.assertEqual((answer.headers["Cache-Control"], answer.headers["ETag"]), ("no-store", None))
            self.assertEqual(self.get(path + "?verbose").body, answer.body)
            head = self.mount.ask(path, "HEAD")
            self.assertEqual((head.status, head.body, int(head.headers["Content-Length"])), (200, b"", len(lines)))
            self.assertEqual(self.mount.ask(path, "POST").status, 405)

    def test_nothing_can_be_changed(self):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            answer = self.mount.ask("/metrics", method, body=b"x" * 100_000)
            self.assertEqual((answer.status, answer.headers["Allow"]), (405, "GET, HEAD"), method)
        answer = self.mount.ask("/metrics", "GET", body=b"a body")
        self.assertEqual((answer.status, answer.headers["Connection"]), (200, "close"))

    def test_a_page_elsewhere_does_not_reach_it(self):
        self.assertEqual(self.mount.ask("/metrics", headers={"Host": "evil.example"}).status, 421)
        port = self.mount.address()[1]
        for host in ("localhost", f"localhost:{port}", "127.0.0.1", socket.gethostname()):
            self.assertEqual(self.mount.ask("/metrics", headers={"Host": host}).status, 200, host)

    def test_many_requests_on_one_connection(self):
        connection = http.client.HTTPConnection(*self.mount.address(), timeout=60)
        for _ in range(20):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            self.assertEqual((answer.status, len(answer.read()) > 0), (200, True))
        tag = answer.headers["ETag"]
        for _ in range(50):  # what it says of memory changes when others use the disk
            connection.request("GET", "/api/jobs.json")
            answer = connection.getresponse()
            answer.read()
            connection.request("GET", "/api/jobs.json",
                               headers={"If-None-Match": answer.headers["ETag"]})
            answer = connection.getresponse()
            same = (answer.status, answer.read())
            if same[0] == 304:
                break
        self.assertEqual(same, (304, b""))
        self.assertNotEqual(tag, answer.headers["ETag"])
        connection.close()

    def test_requests_that_come_at_once_are_answered_in_order(self):
        one = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        self.assertEqual(received(self.mount.raw(one * 5 + last)).count(b"HTTP/1.1 200 "), 6)

    def test_a_header_that_is_too_long(self):
        self.assertEqual(self.mount.ask("/metrics", headers={"X": "x" * 100_000}).status, 431)
        self.assertEqual(self.mount.ask("/" + "x" * 100_000).status, 431)

    def test_rubbish_is_refused(self):
        for rubbish in (b"\0" * 100 + b"\r\n\r\n", b"GET /metrics\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                        b"GET /metrics HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
                        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"x" * 200 + b"\r\n"):
            self.assertTrue(received(self.mount.raw(rubbish)).startswith(b"HTTP/1.1 400 "), rubbish)

    def test_a_slow_client_is_cut_off(self):
        connections = [self.mount.raw(b"GET /metrics HT") for _ in range(3)]
        connections.append(self.mount.raw())
        for connection in connections:
            self.assertEqual(received(connection), b"")

    def test_a_hundred_connections(self):
        connections = [self.mount.raw() for _ in range(100)]
        for connection in connections:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        for connection in connections:
            self.assertTrue(received(connection).startswith(b"HTTP/1.1 200 "))

    def test_a_hundred_that_say_nothing_do_not_lock_others_out(self):
        silent = [self.mount.raw() for _ in range(100)]
        self.assertEqual(self.mount.ask("/metrics").status, 200)
        for connection in silent:
            connection.close()


def ends(connection):
    """Without an answer. A connection that nobody accepted yet, or read from to its end, is reset."""
    try:
        return received(connection) == b""
    except ConnectionResetError:
        return True


class Starting(mount.TestCase):
    @classmethod
    def setUpClass(cls):
        pass

    def tearDown(self):
        pass

    def test_sigterm_ends_it_with_connections_open(self):
        with HttpMount() as mounted:
            idle, half = mounted.raw(), mounted.raw(b"GET /metrics HT")
            process = mounted.process
            process.send_signal(signal.SIGTERM)
            self.assertTrue(ends(idle))
            self.assertTrue(ends(half))
            self.assertEqual(process.wait(timeout=60), 0)
            self.assertNotIn("does not end", mount.read_text(mounted.log))

    def test_health_where_the_mount_is_not_in_its_place(self):
        if os.getuid() != 0:
            self.skipTest("only root mounts what covers it")
        with HttpMount() as mounted:
            subprocess.run(["mount", "-t", "tmpfs", "none", mounted.path], check=True)
            answer = mounted.ask("/healthz")
            self.assertEqual((answer.status, answer.body.decode()),
                             (503, f"mount: tmpfs is mounted over {mounted.path}\nrequests: ok\n"))
            subprocess.run(["umount", mounted.path], check=True)
            self.assertEqual(mounted.ask("/healthz").status, 200)
            with open(mounted.path + "/.ptc/version", "rb"):
                subprocess.run(["umount", "-l", mounted.path], check=True)  # what is open holds the daemon
                for path in ("/healthz", "/readyz"):
                    answer = mounted.ask(path)
                    self.assertEqual(answer.status, 503, path)
                    self.assertIn(f"mount: nothing is mounted on {mounted.path} any more\n", answer.body.decode())

    def test_health_of_one_that_ends(self):
        with HttpMount() as mounted:
            address = mounted.address()
            with open(mounted.path + "/.ptc/version", "rb"):  # so it waits for a moment
                mounted.process.send_signal(signal.SIGTERM)
                said = ""
                deadline = time.monotonic() + 30
                while "about to end" not in said:
                    self.assertLess(time.monotonic(), deadline, said)
                    answer = mounted.ask("/readyz")
                    said = answer.body.decode()
                self.assertEqual(answer.status, 503)
                self.assertIn("leaving: ptcfs is about to end\n", said)
            self.assertEqual(mounted.process.wait(timeout=60), 0)
            self.assertRaises(OSError, socket.create_connection, address)

    def test_health_where_every_thread_is_stuck(self):
        """On a disk that does not answer: nothing can be written to a file system that is frozen."""
        if os.getuid() != 0 or None in map(shutil.which, ("fsfreeze", "mkfs.ext4")):
            self.skipTest("only root freezes a file system, with fsfreeze and mkfs.ext4")
        with HttpMount(options=("--http", "{}", "--patience", "2")) as mounted:
            mounted.stop()
            disk = mounted.top + "/disk"
            with open(disk, "wb") as file:
                file.truncate(64 << 20)
            subprocess.run(["mkfs.ext4", "-q", disk], check=True)
            if subprocess.run(["mount", "-o", "loop", disk, mounted.store], check=False).returncode != 0:
                self.skipTest("a file cannot be mounted here")
            self.addCleanup(subprocess.run, ["umount", "-l", mounted.store], check=False, stderr=subprocess.DEVNULL)
            mounted.start_again()
            places = [mounted.job(f"job{number}").path for number in range(40)]
            subprocess.run(["fsfreeze", "-f", mounted.store], check=True)
            writers = []
            try:
                writers = [subprocess.Popen(["mkdir", place + "/incoming/x"]) for place in places]
                self.wait_for(mounted, "/healthz", 503)
                answer = mounted.ask("/healthz").body.decode()
                self.assertRegex(answer, r"\Amount: ok\nrequests: all \d+ threads are stuck, .* for [2-9] s\n\Z")
                self.assertEqual(mounted.ask("/readyz").status, 503)
            finally:
                subprocess.run(["fsfreeze", "-u", mounted.store], check=True)
            self.assertEqual([writer.wait(timeout=30) for writer in writers], [0] * len(writers))
            self.assertEqual(mounted.ask("/healthz").body, b"mount: ok\nrequests: ok\n")
            mounted.stop()

    def wait_for(self, mounted, path, status):
        deadline = time.monotonic() + 30
        while mounted.ask(path).status != status:
            self.assertLess(time.monotonic(), deadline, f"{path} is never {status}")
            time.sleep(0.1)

    def test_a_port_that_is_taken(self):
        with HttpMount() as mounted:
            host, port = mounted.address()
            point = self.temporary("mnt")
            os.mkdir(point)
            for options in (["-f"], []):
                done = subprocess.run(
                    [mounted.bin + "/ptcfs", *options, "--store", self.temporary("store"), "--http",
                     f"{host}:{port}", point], capture_output=True, text=True, check=False, timeout=60)
                self.assertEqual(done.returncode, 2)
                self.assertIn("choose another port", done.stderr)
                self.assertFalse(mount.is_mounted(point))
                self.assertFalse(os.path.exists(self.temporary("store")))
            done = subprocess.run([mounted.bin + "/ptcfs", "--http", "nonsense", point],
                                  capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(done.returncode, 1)
            self.assertIn("127.0.0.1:9090", done.stderr)

    def test_off_unless_asked_for(self):
        with mount.Mount() as mounted:
            self.assertNotIn("http", mount.read_text(mounted.log))

    def test_other_addresses(self):
        with HttpMount(":0") as mounted:
            self.assertEqual(mounted.ask("/metrics").status, 200)
            self.assertEqual(mounted.address()[0], "127.0.0.1")
            self.assertNotIn("open to the network", mount.read_text(mounted.log))
        with HttpMount("localhost:0", ("-o", "http={}")) as mounted:  # as in /etc/fstab
            self.assertEqual(mounted.ask("/metrics").status, 200)
        with HttpMount("0.0.0.0:0") as mounted:
            self.assertEqual(mounted.ask("/metrics").status, 200)
            self.assertIn("open to the network", mount.read_text(mounted.log))
        if os.path.exists("/proc/net/if_inet6") and mount.read_text("/proc/net/if_inet6"):
            with HttpMount("[::1]:0") as mounted:
                self.assertEqual(mounted.ask("/metrics").status, 200)


class AccessLog(mount.TestCase):
    mount_type = HttpMount

    def noted(self, *options):
        """A mount that notes its requests in a file."""
        return HttpMount(options=("--http", "{}", "--access-log", self.temporary("access"), *options))

    def lines(self, count):
        """So many, once they are there."""
        def written():
            path = self.temporary("access")
            return mount.read_text(path).splitlines() if os.path.exists(path) else []
        deadline = time.monotonic() + 20
        while len(lines := written()) < count:
            self.assertLess(time.monotonic(), deadline, lines)
            time.sleep(0.02)
        self.assertEqual(len(lines), count)
        return lines

    def asked(self, one):
        """What is asked, and how many bytes come."""
        began = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1)
        sent = ["GET /metrics?a=b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
                "HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
                "POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
                "GET /a%20b\xe4\"c HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", "rubbish\r\n\r\n"]
        answers = [received(one.raw(text.encode("latin-1"))) for text in sent]
        return began, answers

    def assert_noted(self, noted, began, answers):
        """`noted`: tuples of time, client, method, path, status, bytes, seconds."""
        expected = [("GET", "/metrics?a=b"), ("HEAD", "/healthz"), ("POST", "/"), ("GET", '/a%20b\\xE4"c'), ("", "")]
        for (when, client, method, path, status, size, seconds), answer, of in zip(noted, answers, expected):
            when = datetime.datetime.fromisoformat(when)
            self.assertTrue(began <= when <= datetime.datetime.now(datetime.timezone.utc), when)
            self.assertEqual(client, "127.0.0.1")
            self.assertEqual((method, path.replace("xe4", "xE4")), of)
            self.assertEqual((status, size), (int(answer.split()[1]), len(answer)))
            self.assertTrue(0 <= seconds < 10)

    def test_a_line_each(self):
        with self.noted() as one:
            asked = self.asked(one)
            lines = self.lines(5)
        self.assertEqual(os.stat(self.temporary("access")).st_mode & 0o777, 0o600)
        words = [["" if word == "-" else word for word in line.split(" ")] for line in lines]
        self.assert_noted([(*of[:4], int(of[4]), int(of[5]), float(of[6])) for of in words], *asked)

    def test_an_object_each(self):
        with self.noted("--log-format", "json") as one:
            asked = self.asked(one)
            lines = [json.loads(line) for line in self.lines(5)]
        self.assertEqual(list(lines[0]), ["time", "client", "method", "path", "status", "bytes", "seconds"])
        self.assert_noted([tuple(line.values()) for line in lines], *asked)

    def test_a_file_that_is_rotated(self):
        with self.noted() as one:
            one.ask("/healthz")
            self.lines(1)
            os.rename(self.temporary("access"), self.temporary("access.1"))
            one.ask("/readyz")
            (line,) = self.lines(1)
            self.assertIn(" /readyz ", line)
            os.truncate(self.temporary("access"), 0)  # copytruncate
            one.ask("/healthz")
            (line,) = self.lines(1)
            self.assertIn(" /healthz ", line)
            os.remove(self.temporary("access"))
            one.ask("/readyz")
            self.lines(1)
        self.assertEqual(len(mount.read_text(self.temporary("access.1")).splitlines()), 1)

    def test_standard_output(self):
        with HttpMount(options=("--http", "{}", "--access-log", "-")) as one:
            one.ask("/healthz?7")
            deadline = time.monotonic() + 20
            while " GET /healthz?7 200 " not in mount.read_text(one.log):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)

    def test_what_is_not_read_holds_up_nobody(self):
        os.mkfifo(self.temporary("access"))
        reader = os.open(self.temporary("access"), os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        with self.noted() as one:
            connection = http.client.HTTPConnection(*one.address(), timeout=20)
            for _ in range(6000):  # more than a pipe holds, and than may wait
                connection.request("GET", "/healthz")
                self.assertEqual(connection.getresponse().read()[:5], b"mount")
            connection.close()
            began = time.monotonic()
            one.stop()
            self.assertLess(time.monotonic() - began, 8)

    def test_refusals(self):
        point, file = self.temporary("mnt"), self.temporary("access")
        os.mkdir(point)
        for options, status, said in ((("--access-log", file), 1, "--access-log is of --http"),
                                      (("--http", ":0", "--access-log", "-"), 1, "--access-log - wants -f"),
                                      (("-f", "--http", ":0", "--access-log", file + "/none/x"), 2, "the access log")):
            done = subprocess.run([self.mount.bin + "/ptcfs", "--store", self.temporary("store"), *options, point],
                                  capture_output=True, text=True, check=False, timeout=60)
            self.assertEqual(done.returncode, status, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertFalse(mount.is_mounted(point))


if __name__ == "__main__":
    mount.main()
