"""tools/deploy/*.yaml: against the schemas that Kubernetes publishes, against ptcfs' own words, and that mounts come to
pods as it is said there."""
import glob
import os
import re
import subprocess
import unittest

import mount

try:
    import kubernetes_validate
    import yaml
except ImportError:
    mount.skip("Python has no kubernetes-validate here (tests/run installs it where it can be had)")

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
DEPLOY = os.path.join(ROOT, "tools/deploy")
OPERATORS = "monitoring.coreos.com"  # what the Prometheus operator brings, which is not Kubernetes


def documents():
    """Of all files, as pairs with their names."""
    return [(os.path.basename(path), document) for path in sorted(glob.glob(DEPLOY + "/*.yaml"))
            for document in yaml.safe_load_all(mount.read_text(path))]


def of_kind(kind):
    (found,) = [document for _, document in documents() if document["kind"] == kind]
    return found


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ptcfs = os.path.join(mount.bin_dir(), "ptcfs")
        cls.help = subprocess.run([cls.ptcfs, "--help"], capture_output=True, text=True, check=True).stdout
        cls.pod = of_kind("DaemonSet")["spec"]["template"]
        (cls.container,) = cls.pod["spec"]["containers"]

    def options(self):
        """Name → value."""
        return dict(word.split("=", 1) for word in self.container["args"] if "=" in word)

    def test_schemas(self):
        for name, document in documents():
            if document["apiVersion"].startswith(OPERATORS):
                continue
            for version in ("1.28", kubernetes_validate.latest_version()):
                with self.subTest(name, kind=document["kind"], version=version):
                    kubernetes_validate.validate(document, version, strict=True)

    def test_schemas_refuse_what_is_wrong(self):
        daemon_set = of_kind("DaemonSet")
        (container,) = daemon_set["spec"]["template"]["spec"]["containers"]
        container["livenessProbe"]["httpGet"]["pth"] = container["livenessProbe"]["httpGet"].pop("path")
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(daemon_set, "1.28", strict=True)

    def test_options(self):
        named = {word.split("=")[0] for word in self.container["args"] if word.startswith("--")}
        self.assertLessEqual(named, set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+)", self.help)))
        asked = set(re.findall(r"\$\((\w+)\)", " ".join(self.container["args"])))
        self.assertEqual(asked, {variable["name"] for variable in self.container["env"]})
        self.assertEqual(self.pod["metadata"]["labels"], of_kind("DaemonSet")["spec"]["selector"]["matchLabels"])
        version = subprocess.run([self.ptcfs, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
        self.assertRegex(self.container["image"], rf"^[a-z0-9./-]+/ptcfs:{re.escape(version)}$")

    def test_places(self):
        """Each volume is mounted, each path of an option lies on one, and propagates where mounts must be seen."""
        volumes = {volume["name"]: volume for volume in self.pod["spec"]["volumes"]}
        mounted = {place["mountPath"]: place for place in self.container["volumeMounts"]}
        self.assertEqual({place["name"] for place in mounted.values()}, set(volumes))
        where = {"mnt": self.container["args"][-1], "store": self.options()["--store"], "data": self.options()["--data-root"],
                 "secret": self.options()["--secret"]}
        for name, path in where.items():
            (place,) = [place for place in mounted.values() if place["name"] == name]
            self.assertEqual(os.path.commonpath([path, place["mountPath"]]), place["mountPath"])
            if "hostPath" in volumes[name]:
                self.assertEqual(volumes[name]["hostPath"]["path"], place["mountPath"])  # the same on the machine
        for name, propagation in {"mnt": "Bidirectional", "store": "Bidirectional", "data": "HostToContainer"}.items():
            (place,) = [place for place in mounted.values() if place["name"] == name]
            self.assertEqual(place["mountPropagation"], propagation)
        for one in [self.container, *self.pod["spec"]["initContainers"]]:
            if any(place.get("mountPropagation") == "Bidirectional" for place in one["volumeMounts"]):
                self.assertTrue(one["securityContext"]["privileged"])  # else it is refused

    def test_memory_holds_the_store(self):
        """Of the container is what it writes into its tmpfs."""
        sizes = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

        def size(text):
            return int(text.rstrip("i")[:-1]) * sizes[text.rstrip("i")[-1]]
        limit = size(self.container["resources"]["limits"]["memory"])
        self.assertEqual(self.container["resources"]["requests"]["memory"], self.container["resources"]["limits"]["memory"])
        self.assertGreaterEqual(limit, size(self.options()["--memory"]) + size(self.options()["--cache"]) + size("4G"))

    def test_probes(self):
        sources = "".join(mount.read_text(path) for path in glob.glob(ROOT + "/fs/http/*.cc"))
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        self.assertEqual(ports["http"], int(self.options()["--http"].rsplit(":", 1)[1]))
        self.assertEqual(ports["nodes"], int(self.options()["--listen"].rsplit(":", 1)[1]))
        wanted = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
        for probe, path in wanted.items():
            self.assertEqual(self.container[probe]["httpGet"], {"path": path, "port": "http"})
            self.assertIn(f'"{path}"', sources)
        patience = int(re.search(r"--patience SECONDS.*?\(default:\s+(\d+)\)", self.help, re.DOTALL)[1])
        startup, liveness = self.container["startupProbe"], self.container["livenessProbe"]
        self.assertGreaterEqual(liveness["periodSeconds"] * liveness["failureThreshold"], patience)
        self.assertGreaterEqual(startup["periodSeconds"] * startup["failureThreshold"], 300)

    def test_metrics_are_found(self):
        service, monitor = of_kind("Service"), of_kind("ServiceMonitor")
        self.assertEqual(set(monitor), {"apiVersion", "kind", "metadata", "spec"})
        self.assertEqual(monitor["apiVersion"], "monitoring.coreos.com/v1")
        self.assertEqual(set(monitor["spec"]), {"selector", "namespaceSelector", "endpoints"})
        self.assertLessEqual(monitor["spec"]["selector"]["matchLabels"].items(), service["metadata"]["labels"].items())
        self.assertEqual(monitor["spec"]["namespaceSelector"]["matchNames"], [service["metadata"]["namespace"]])
        self.assertLessEqual(service["spec"]["selector"].items(), self.pod["metadata"]["labels"].items())
        (port,) = service["spec"]["ports"]
        (endpoint,) = monitor["spec"]["endpoints"]
        self.assertEqual((endpoint["port"], port["targetPort"], port["port"]), (port["name"], "http", 9090))
        self.assertLessEqual(set(endpoint), {"port", "path", "interval", "scrapeTimeout", "honorLabels", "relabelings"})
        self.assertIn(f'"{endpoint["path"]}"', mount.read_text(ROOT + "/fs/http/http_pages.cc"))
        self.assertLessEqual(int(endpoint["scrapeTimeout"][:-1]), int(endpoint["interval"][:-1]))

    def test_the_pod_that_reads(self):
        pod = of_kind("Pod")
        (volume,) = pod["spec"]["volumes"]
        (mine,) = [one for one in self.pod["spec"]["volumes"] if one["name"] == "mnt"]
        self.assertEqual(volume["hostPath"]["path"], mine["hostPath"]["path"])  # above the mount
        point = self.container["args"][-1]
        for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
            (place,) = container["volumeMounts"]
            self.assertEqual((place["mountPath"], place["mountPropagation"]), (volume["hostPath"]["path"], "HostToContainer"))
            self.assertIn(point + "/", " ".join(container["command"]))


class Namespaced(mount.Mount):
    """In a namespace of mounts that those of the machine come to and go from, as with Bidirectional."""
    launcher = ("unshare", "--mount", "--propagation", "unchanged")

    def __init__(self):
        super().__init__()
        self.path = os.path.join(self.top, "parent", "jobs")
        os.makedirs(self.path)


class Propagation(unittest.TestCase):
    def test_a_pod_sees_a_later_mount_below_what_it_was_given(self):
        if os.getuid() != 0:
            self.skipTest("only root makes namespaces of mounts")
        mounted = Namespaced()
        parent = os.path.dirname(mounted.path)
        subprocess.run(["mount", "--bind", parent, parent], check=True)
        self.addCleanup(subprocess.run, ["umount", "-l", parent], check=False)
        subprocess.run(["mount", "--make-shared", parent], check=True)
        pods = {}

        def pod(name, source):
            """Its container begins here: a copy of the machine's mounts, in which `source` is at `name`."""
            at = os.path.join(mounted.top, name)
            os.mkdir(at)
            text = f'mount --rbind "{source}" "{at}" && mount --make-rslave "{at}" && echo && exec sleep 1000'
            process = subprocess.Popen(["unshare", "--mount", "--propagation", "slave", "sh", "-c", text], stdout=subprocess.PIPE)
            self.addCleanup(process.stdout.close)
            self.addCleanup(process.wait)
            self.addCleanup(process.kill)
            self.assertEqual(process.stdout.readline(), b"\n")
            pods[name] = process.pid

        def sees(name, path):
            command = ["nsenter", "--mount", "--target", str(pods[name]), "cat", os.path.join(mounted.top, name, path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.stdout.startswith("ptcfs ") or done.stderr.strip().rsplit(": ", 1)[1]
        pod("early", parent)
        self.assertEqual(sees("early", "jobs/.ptc/version"), "No such file or directory")
        with mounted:
            pod("late", parent)
            pod("itself", mounted.path)
            for name, path in (("early", "jobs/.ptc/version"), ("late", "jobs/.ptc/version"), ("itself", ".ptc/version")):
                self.assertIs(sees(name, path), True, name)
            mounted.stop(kill=True)
            mounted.start()
            self.assertIs(sees("early", "jobs/.ptc/version"), True)
            self.assertIs(sees("late", "jobs/.ptc/version"), True)
            self.assertEqual(sees("itself", ".ptc/version"), "Transport endpoint is not connected")


if __name__ == "__main__":
    mount.main()
