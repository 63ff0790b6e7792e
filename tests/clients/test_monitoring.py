"""tools/deploy/monitoring: the alerts and the board name only what a mount serves, and alerts come when a mount is in trouble."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

import models
import mount
import prometheus
from test_http import HttpMount

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/deploy/monitoring")
RULES = os.path.join(HERE, "ptcfs.rules.yml")
METRIC = re.compile(r"\b(?:ptcfs|process)_[a-z0-9_]+")
SELECTOR = re.compile(r"\b((?:ptcfs|process)_[a-z0-9_]+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|on) \(([a-z, ]*)\)")
SCRAPED = ("instance", "job")  # what Prometheus knows of where a metric comes from
OF_A_HISTOGRAM = "_(?:bucket|sum|count)$"


def rule_expressions():
    """Without a YAML reader: each `expr:`, with its further lines."""
    found = re.findall(r"(?m)^( +)expr: (?:\|\n)?((?:.*\n)(?:\1  .*\n)*)", mount.read_text(RULES))
    return [text for _, text in found]


def board():
    return json.loads(mount.read_text(os.path.join(HERE, "grafana.json")))


def board_expressions():
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]


class Names(mount.TestCase):
    mount_type = HttpMount

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        job = cls.mount.job("llama")
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.wait()
        job.set_layout(tp=2)
        os.makedirs(os.path.join(cls.mount.top, "shards"))
        models.write_file(os.path.join(cls.mount.top, "shards/a.jsonl"), b'{"a": 1}\n' * 64)
        with open(job.file("dataset/source.json"), "w", encoding="utf-8") as file:
            json.dump({"shards": os.path.join(cls.mount.top, "shards")}, file)
        with open(job.file("dataset/order.json"), "w", encoding="utf-8") as file:
            json.dump({"batch": 8, "seed": 1}, file)
        deadline = time.monotonic() + 60
        while "ready" != mount.read_json(job.file("dataset/status.json"))["state"]:
            assert time.monotonic() < deadline, mount.read_text(job.file("dataset/status.json"))
            time.sleep(0.1)
        text = cls.mount.ask("/metrics").body.decode()
        _, cls.families = prometheus.parse(text)
        cls.samples = prometheus.check(text)

    def test_all_that_is_asked_for_is_served(self):
        """Families are served without samples, too, where a node is alone."""
        expressions = rule_expressions() + board_expressions()
        self.assertGreater(len(expressions), 60)
        for expression in expressions:
            with self.subTest(expression):
                self.assertTrue(METRIC.search(expression) or expression.startswith("up{"))
                for name in METRIC.findall(expression):
                    self.assertTrue(re.sub(OF_A_HISTOGRAM, "", name) in self.families, name)
                for name, matchers in SELECTOR.findall(expression):
                    labels = [dict(labels) for served, labels in self.samples if served == name]
                    for label, how, value in MATCHER.findall(matchers):
                        if not labels or value.startswith("$"):
                            continue
                        values = {one.get(label) for one in labels}
                        self.assertLessEqual(set(value.split("|")) if how == "=~" else {value}, values, f"{name}: {label}")
                known = {label for _, labels in self.samples for label, _ in labels} | set(SCRAPED) | {"peer"}
                for labels in GROUPED.findall(expression):
                    self.assertLessEqual(set(labels.split(", ")), known)

    def test_rules_are_whole(self):
        text = mount.read_text(RULES)
        self.assertEqual(text.count("- alert: "), len(rule_expressions()))
        for what in ("severity: ", "summary: ", "description: "):
            self.assertEqual(text.count(what), text.count("- alert: "), what)
        tested = mount.read_text(os.path.join(HERE, "ptcfs.rules.test.yml"))
        for name in re.findall("- alert: (.*)", text):
            self.assertIn(f'"{name}"', tested)

    def test_the_board(self):
        whole = board()
        panels = whole["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        variables = {one["name"] for one in whole["templating"]["list"]}
        for panel in panels:
            at = panel["gridPos"]
            self.assertLessEqual(at["x"] + at["w"], 24)
            if panel["type"] == "row":
                continue
            self.assertEqual(panel["datasource"], {"type": "prometheus", "uid": "${datasource}"})
            for target in panel["targets"]:
                asked = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                self.assertLessEqual(asked, variables)
        for one in panels:  # none lies on another
            for other in panels:
                a, b = one["gridPos"], other["gridPos"]
                self.assertFalse(one is not other and a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and
                                 a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"], (one["title"], other["title"]))


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@unittest.skipUnless(shutil.which("promtool"), "promtool is not installed: Debian's package `prometheus` has it, and starts a server")
class Alerts(unittest.TestCase):
    def test_rules_and_their_tests(self):
        for arguments in (("check", "rules", RULES), ("test", "rules", os.path.join(HERE, "ptcfs.rules.test.yml"))):
            done = promtool(*arguments)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def assert_alerts(self, text, expected):
        """When for an hour a mount has said this."""
        asked = {name for expression in rule_expressions() for name in METRIC.findall(expression)}
        series = []
        for (name, labels), value in prometheus.parse(text)[0].items():
            if name in asked:
                all_labels = [*labels, ("instance", "a")]
                series.append({"series": name + "{" + ", ".join(f"{key}={json.dumps(of)}" for key, of in all_labels) + "}",
                               "values": f"{value!r}+0x60"})
        expected = [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in expected.items()]
        test = {"rule_files": [os.path.abspath(RULES)], "evaluation_interval": "1m", "tests": [{
            "interval": "1m", "input_series": series, "promql_expr_test": [{
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "1h", "exp_samples": expected}]}]}
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:  # JSON is YAML
            json.dump(test, file)
            file.flush()
            done = promtool("test", "rules", file.name)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @unittest.skipUnless(os.getuid() == 0, "only root can mount a tmpfs for the store")
    def test_a_store_that_is_full(self):
        with HttpMount(options=("--memory", "64M", "--http", "{}")) as one:
            job = one.job("llama")
            models.Llama().write_hf(job.incoming("base") + "/rank/0")
            job.commit("base")
            job.wait()
            self.assert_alerts(one.ask("/metrics").body.decode(), {})
            os.makedirs(job.incoming("large"))
            with open(job.incoming("large") + "/fill", "wb", buffering=0) as file:
                with self.assertRaises(OSError):
                    while True:
                        file.write(bytes(1 << 20))
            self.assert_alerts(one.ask("/metrics").body.decode(), {"PtcfsStoreNearlyFull": 1, "PtcfsStoreFull": 1})

    def test_a_data_set_that_is_refused(self):
        with HttpMount() as one:
            job = one.job("llama")
            with open(job.file("dataset/source.json"), "w", encoding="utf-8") as file:
                json.dump({"shards": "/nowhere/at/all"}, file)
            deadline = time.monotonic() + 60
            while mount.read_json(job.file("dataset/status.json"))["state"] != "refused" and time.monotonic() < deadline:
                time.sleep(0.1)
            self.assert_alerts(one.ask("/metrics").body.decode(), {"PtcfsDataSetStopped": 1})


if __name__ == "__main__":
    mount.main()
