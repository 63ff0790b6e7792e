"""The page of ptcfs --http: as HTML, and in a browser (Chromium) where there is one."""
import html.parser
import http.server
import os
import shutil
import subprocess
import threading
import unittest

import models
import mount
from test_http import HttpMount

EVIL = "<img src=x onerror=alert(1)>"
VOID = ("meta", "link", "br", "img", "input")


class Outline(html.parser.HTMLParser):
    """Checks that elements are closed in order; collects text, ids and what is referred to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.ids, self.references, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on") and name != "style", f"{tag} {name}"
            if name in ("src", "href"):
                self.references.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data):
        if data.strip():
            self.texts.append(data.strip())


class WithHttp(mount.TestCase):
    mount_type = HttpMount

    def committed(self, name=None, checkpoint="base"):
        job = self.mount.job(name) if name else self.new_job()
        models.Llama().write_hf(job.incoming(checkpoint) + "/rank/0")
        job.commit(checkpoint)
        job.wait()
        return job


class Page(WithHttp):
    def test_it_is_complete_without_its_script(self):
        job = self.committed()
        job.set_layout(tp=2)
        answer = self.mount.ask("/")
        self.assertEqual(answer.headers["Content-Type"], "text/html; charset=utf-8")
        policy = answer.headers["Content-Security-Policy"]
        self.assertIn("default-src 'none'; script-src 'self'; style-src 'self'", policy)
        self.assertNotIn("unsafe", policy)
        page = Outline(answer.body.decode())
        for text in (job.name, "base", "tp2-pp1-dp1, revision 2", "Traffic of base", "rank 0", "rank 1"):
            self.assertIn(text, page.texts)
        self.assertEqual(len(page.ids), len(set(page.ids)))
        for reference in page.references:
            self.assertTrue(reference.startswith("/"), reference)
            self.assertEqual(self.mount.ask(reference).status, 200, reference)

    def test_names_are_text(self):
        self.committed(EVIL, "<script>alert(2)<%2Fscript>")
        body = self.mount.ask("/").body.decode()
        page = Outline(body)
        self.assertIn(EVIL, page.texts)
        self.assertNotIn("x", page.references)
        self.assertEqual(page.tags.count("script"), 1)
        self.assertNotIn(b"<script>alert", self.mount.ask(
            "/jobs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E/plan.svg").body)

    def test_names_that_are_no_utf8(self):
        job = self.committed()
        path = os.fsencode(job.incoming("x")) + b"\xff"
        models.Llama().write_hf(os.fsdecode(path) + "/rank/0")
        error = mount.error_of(os.rename, path, os.fsencode(job.checkpoint("x")) + b"\xff")
        self.assertEqual(error, "ECANCELED")
        for page in ("/", "/api/jobs.json"):  # which tell of it
            answer = self.mount.ask(page)
            self.assertEqual(answer.status, 200)
            answer.body.decode()


class Proxy(http.server.ThreadingHTTPServer):
    """Before a mount; calls `before(n)` before the page is asked for the n-th time."""

    def __init__(self, mounted, before):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/":
                    self.server.pages += 1
                    before(self.server.pages)
                answer = mounted.ask(self.path)
                self.send_response(answer.status)
                for name in ("Content-Type", "Content-Security-Policy", "ETag", "Cache-Control"):
                    if answer.headers[name]:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.pages = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()


@unittest.skipUnless(shutil.which("chromium"), "chromium is not installed")
class Browser(WithHttp):
    def chromium(self, url, *options):
        done = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
             "--user-data-dir=" + self.temporary("profile"), *options, url],
            capture_output=True, text=True, check=False, timeout=120)
        if done.returncode != 0:
            self.skipTest("chromium does not run here: " + done.stderr[-300:])
        for line in done.stderr.splitlines():  # of the page, not of the browser
            self.assertNotIn("CONSOLE", line)
        return done.stdout

    def shown(self, before=lambda n: None):
        """The page after some seconds in the browser."""
        with Proxy(self.mount, before) as proxy:
            text = self.chromium(f"http://127.0.0.1:{proxy.server_port}/", "--dump-dom",
                                 "--virtual-time-budget=5000")
            proxy.shutdown()
        self.assertGreaterEqual(proxy.pages, 3)
        return text

    def test_it_follows_what_happens(self):
        job = self.committed()

        def before(request):
            if request == 2:
                job.set_layout(pp=3)
            if request == 3:
                self.mount.job("came later")
        page = Outline(self.shown(before))
        for text in (job.name, "tp1-pp3-dp1, revision 2", "Traffic of base", "rank 2", "came later"):
            self.assertIn(text, page.texts)

    def test_names_do_nothing(self):
        self.committed(EVIL)
        page = Outline(self.shown())
        self.assertIn(EVIL, page.texts)
        self.assertNotIn("x", page.references)

    def test_pictures_can_be_taken(self):
        job = self.committed()
        job.set_layout(tp=2)
        url = "http://%s:%d/" % self.mount.address()
        for path in ("", f"jobs/{job.name}/plan.svg"):
            picture = self.temporary("picture.png")
            self.chromium(url + path, "--screenshot=" + picture, "--window-size=1000,900")
            with open(picture, "rb") as file:
                self.assertEqual(file.read(4), b"\x89PNG")


if __name__ == "__main__":
    mount.main()
