"""Several ptcfs on one machine, each in a network of its own, and etcd beside them.

    with cluster.Cluster(3, rate="1gbit") as nodes:
        job = nodes.job(0, "llama")            # the job as node w0 shows it
        nodes.kill(1); nodes.wait_settled("llama"); nodes.start(1)

A node is a network namespace with two links: eth0 to the other nodes, eth1 to etcd. So bytes between
nodes are counted apart from those to etcd, and each can be cut alone. All that a cluster is lies
below one directory, a tmpfs: mounts, stores, logs, pids. The namespaces have its name before theirs.
"""
import atexit
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import mount  # noqa: E402
from authority import Authority  # noqa: E402

SETTLE_SECONDS = 60
PORT = 7070
ETCD = "10.2.0.254:2379"


def require():
    if os.getuid() != 0:
        mount.skip("network namespaces need root")
    for program in ("ip", "nsenter", "setpriv", "nft", "etcd", "etcdctl"):
        mount.require_program(program)
    mount.bin_dir()
    probe = f"ptcfs-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        done = subprocess.run(["ip", "-n", probe, "link", "add", "probe", "type", "bridge"],
                              capture_output=True, text=True, check=False)
        subprocess.run(["ip", "netns", "del", probe], check=False)
    if done.returncode != 0:
        mount.skip("no network namespaces with bridges here: " + done.stderr.strip())


def until(true, what, seconds=None):
    deadline = time.monotonic() + (seconds or SETTLE_SECONDS)
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError("in vain waited until " + what)
        time.sleep(0.05)


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def namespace(top, name):
    return f"{os.path.basename(top)}-{name}"


def bytes_carried(top, name, link, way):
    """What the link has carried to the node ("rx") or from it ("tx"), with all headers, since the cluster began."""
    links = json.loads(run("ip", "-n", namespace(top, name), "-s", "-j", "link", "show", link))
    return links[0]["stats64"][way]["bytes"]


def is_ours(pid, top):
    """Whether the process is one of the cluster's: its command line names the directory."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return top.encode() + b"/" in file.read()
    except OSError:
        return False


def pids(top):
    """name → pid of the cluster's processes that live."""
    found = {}
    for name in sorted(os.listdir(top)) if os.path.isdir(top) else []:
        path = os.path.join(top, name, "pid")
        if os.path.exists(path) and is_ours(pid := int(mount.read_text(path)), top):
            found[name] = pid
    return found


def daemons(top):
    """pid → name of the cluster's processes that live, also of those that were started by hand: programs of its kind
    whose command line, or a file that they have open, is below its directory."""
    found = {pid: name for name, pid in pids(top).items()}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            command = mount.read_bytes(f"/proc/{pid}/cmdline").split(b"\0")
            if os.path.basename(command[0]) not in (b"ptcfs", b"etcd"):
                continue
            paths = [word.decode("utf-8", "replace") for word in command]
            files = f"/proc/{pid}/fd"
            for name in os.listdir(files):
                with contextlib.suppress(OSError):
                    paths.append(os.readlink(os.path.join(files, name)))
            names = [path[path.index(top + "/") + len(top) + 1:].split("/")[0] for path in paths if top + "/" in path]
            # What all nodes share, as the secret, tells nothing.
            names = [name for name in names if os.path.isdir(os.path.join(top, name))]
            if names:
                found.setdefault(pid, names[0])
    return found


def lives(pid):
    """What has ended, and only nobody has waited for it, does not."""
    try:
        return mount.read_text(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def ended(pids_to_end, seconds=10):
    """Waits for them; returns those that do not end."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids_to_end if lives(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def take_down(top):
    """Ends and removes all there is of the cluster below this directory, whoever began it. Returns pid → name of what
    does not end."""
    ours = daemons(top)
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [line.split()[4] for line in file]
    for path in reversed([path for path in mounts if path.startswith(top + "/")]):
        subprocess.run(["umount", "-l", path], check=False)
    for name in os.listdir("/run/netns") if os.path.isdir("/run/netns") else []:
        # Another cluster's may begin with all of this one's name.
        if re.fullmatch(re.escape(namespace(top, "")) + r"(switch|etcd|w\d+)", name):
            subprocess.run(["ip", "netns", "del", name], check=False)
    left = ended(ours)  # not before: a request may wait for what was unmounted now
    if mount.is_mounted(top):
        subprocess.run(["umount", "-l", top], check=False)
    shutil.rmtree(top, ignore_errors=True)
    return {pid: ours[pid] for pid in left}


class Node(mount.Mount):
    """One daemon, in its namespace."""

    def __init__(self, cluster, index):
        self.name, self.cluster, self.paused = f"w{index}", cluster, False
        self.address = f"10.1.0.{index + 1}"
        self.launcher = cluster.launcher(self.name)
        top = os.path.join(cluster.top, self.name)
        os.mkdir(top)
        super().__init__("--node", self.name, "--listen", f"{self.address}:{PORT}",
                         "--secret", cluster.secret, "--etcd", cluster.etcd_url,
                         *cluster.tls_options(self.name), *cluster.options, top=top)

    def start(self):
        self.cluster.keep_command(self.name, self.command())
        super().start()
        self.cluster.keep_pid(self.name, self.process.pid)

    def members(self):
        """Names of the nodes that this one believes alive."""
        nodes = mount.read_json(self.path + "/.ptc/nodes.json")["nodes"]
        return sorted(node["name"] for node in nodes if node["state"] == "up")

    def image_bytes(self):
        """Of the files that the node holds for all jobs."""
        images, found = os.path.join(self.store, "images"), 0
        for name in os.listdir(images):
            with contextlib.suppress(FileNotFoundError):  # it goes just now
                found += os.stat(os.path.join(images, name)).st_size
        return found

    def unnamed_images(self):
        """Those that the daemon holds though they are in no checkpoint."""
        files = f"/proc/{self.process.pid}/fd"
        links = []
        for name in os.listdir(files):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.append(os.readlink(os.path.join(files, name)))
        return sum("/images/" in link and link.endswith(" (deleted)") for link in links)


class Cluster:
    """`count` nodes, w0 …. `keep`: it outlives this process, and take_down() ends it. `tls`: with certificates
    between nodes and https to etcd; PTC_CLUSTER_TLS=1 or 0 says so where the test does not."""

    def __init__(self, count, *options, rate=None, top=None, keep=False, memory="2G", tls=None):
        require()
        self.options, self.rate, self.keep = options, rate, keep
        self.tls = \
            os.environ.get("PTC_CLUSTER_TLS", os.environ.get("PTC_CLUSTER_TLS_UNLESS_SAID")) == "1" if tls is None else tls
        if self.tls:
            mount.require_program("openssl")
        self.etcd_url = ("https://" if self.tls else "http://") + ETCD
        self.authority = self.etcd_authority = None  # of the nodes' certificates, of etcd's and its clients'
        self.top = top or tempfile.mkdtemp(prefix="ptcfs-cluster-")
        self.secret = os.path.join(self.top, "secret")
        self.count, self.memory = count, memory
        self.nodes = []
        self.etcd = None

    def __enter__(self):
        atexit.register(self.__exit__)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        atexit.unregister(self.__exit__)
        failed = sys.exc_info()[0] is not None
        if failed:
            self.print_logs()
        if self.keep and not failed:
            return
        take_down(self.top)
        for process in [self.etcd, *(node.process for node in self.nodes)]:
            if process is not None:
                process.wait()

    # ---- making -------------------------------------------------------------------------------

    def build(self):
        os.makedirs(self.top, exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", f"size={self.memory},mode=755", "ptcfs-cluster", self.top)
        with open(os.open(self.secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        if self.tls:
            self.authority = Authority(os.path.join(self.top, "certificates"))
            self.etcd_authority = Authority(os.path.join(self.top, "etcd-certificates"))
            self.etcd_authority.issue("client")
        self.add_namespace("switch")
        for bridge in ("nodes", "etcd"):
            self.ip("switch", "link", "add", bridge, "type", "bridge")
            self.ip("switch", "link", "set", bridge, "up")
        self.nft("add table bridge faults")
        self.nft("add chain bridge faults forward { type filter hook forward priority 0; }")
        self.start_etcd()
        for index in range(self.count):
            self.add_node(index)
        self.wait_members()

    def ip(self, name, *arguments):
        return run("ip", "-n", namespace(self.top, name), *arguments)

    def launcher(self, name):
        """A command that runs another in the namespace. The FUSE mount stays visible outside."""
        end_with_us = () if self.keep else ("setpriv", "--pdeathsig", "KILL")
        return ("setsid", "nsenter", "--net=/run/netns/" + namespace(self.top, name), *end_with_us)

    def add_namespace(self, name):
        run("ip", "netns", "add", namespace(self.top, name))
        self.ip(name, "link", "set", "lo", "up")

    def connect(self, name, bridge, link, address):
        port = f"{name}-{link}"
        self.ip("switch", "link", "add", port, "type", "veth", "peer", "name", link,
                "netns", namespace(self.top, name))
        self.ip("switch", "link", "set", port, "master", bridge, "up")
        self.ip(name, "address", "add", address + "/24", "dev", link)
        self.ip(name, "link", "set", link, "up")

    def shape(self, node, rate, link="eth0"):
        """No end of the link sends faster than `rate`; None: as fast as it can."""
        for where, device in ((f"w{node}", link), ("switch", f"w{node}-{link}")):
            tc = ("tc", "-n", namespace(self.top, where), "qdisc")
            subprocess.run([*tc, "del", "dev", device, "root"], stderr=subprocess.DEVNULL, check=False)
            if rate:
                run(*tc, "add", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb",
                    "latency", "50ms")

    def tls_options(self, name):
        if not self.tls:
            return ()
        certificate, key = self.authority.issue(name)
        return ("--tls-ca", self.authority.ca, "--tls-cert", certificate, "--tls-key", key, *self.etcd_tls_options())

    def etcd_tls_options(self):
        if not self.tls:
            return ()
        return ("--etcd-ca", self.etcd_authority.ca, "--etcd-cert", self.etcd_authority.file("client.pem"),
                "--etcd-key", self.etcd_authority.file("client.key"))

    def keep_pid(self, name, pid):
        with open(os.path.join(self.top, name, "pid"), "w", encoding="utf-8") as file:
            file.write(str(pid))

    def keep_command(self, name, command):
        """tools/cluster starts it again with it."""
        with open(os.path.join(self.top, name, "command"), "w", encoding="utf-8") as file:
            json.dump(command, file)

    def start_etcd(self):
        self.add_namespace("etcd")
        self.connect("etcd", "etcd", "eth1", "10.2.0.254")
        os.mkdir(os.path.join(self.top, "etcd"))
        self.run_etcd()

    def run_etcd(self):
        log = os.path.join(self.top, "etcd", "log")
        options = ()
        if self.tls:
            certificate, key = self.etcd_authority.issue("etcd", "IP:10.2.0.254")
            options = ("--cert-file", certificate, "--key-file", key, "--client-cert-auth",
                       "--trusted-ca-file", self.etcd_authority.ca)
        command = [*self.launcher("etcd"), "etcd", "--data-dir", os.path.join(self.top, "etcd/data"),
                   "--listen-client-urls", self.etcd_url, "--advertise-client-urls", self.etcd_url, *options]
        self.keep_command("etcd", command)
        with open(log, "wb") as file:
            self.etcd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.keep_pid("etcd", self.etcd.pid)
        until(lambda: self.etcd.poll() is not None or "ready to serve" in mount.read_text(log),
              "etcd serves", 30)

    def etcdctl(self, *arguments):
        options = ()
        if self.tls:
            options = ("--cacert", self.etcd_authority.ca, "--cert", self.etcd_authority.file("client.pem"),
                       "--key", self.etcd_authority.file("client.key"))
        return run("env", "ETCDCTL_API=3", "ip", "netns", "exec", namespace(self.top, "etcd"),
                   "etcdctl", "--endpoints", self.etcd_url, *options, *arguments)

    def compact_etcd(self):
        """etcd forgets all history: who was cut off cannot be told what happened meanwhile."""
        now = json.loads(self.etcdctl("get", "none", "-w", "json"))["header"]["revision"]
        self.etcdctl("compaction", "--physical", str(now))

    def add_node(self, index):
        name = f"w{index}"
        self.add_namespace(name)
        self.connect(name, "nodes", "eth0", f"10.1.0.{index + 1}")
        self.connect(name, "etcd", "eth1", f"10.2.0.{index + 1}")
        self.shape(index, self.rate)
        self.nodes.append(Node(self, index))
        self.nodes[index].start()

    def print_logs(self):
        for node in self.nodes:
            sys.stderr.write(f"---- log of {node.name}\n" + mount.read_text(node.log))

    # ---- using --------------------------------------------------------------------------------

    def path(self, node, *parts):
        return os.path.join(self.nodes[node].path, *map(str, parts))

    def job(self, node, name):
        """The job as this node shows it, made if there is none."""
        job = mount.Job(self.nodes[node], name)
        os.makedirs(job.path, exist_ok=True)
        return job

    def alive(self):
        """Nodes that run and are not stopped."""
        return [node for node in self.nodes if node.process is not None and not node.paused]

    def start(self, node):
        self.nodes[node].start()

    def stop(self, node):
        self.nodes[node].stop()

    def kill(self, node):
        self.nodes[node].stop(kill=True)

    def pause(self, node):
        self.nodes[node].paused = True
        mount.halt(self.nodes[node].process)

    def resume(self, node):
        self.nodes[node].process.send_signal(signal.SIGCONT)
        self.nodes[node].paused = False

    def partition(self, node, links=("eth0", "eth1")):
        """Cuts the node off from the others (eth0), from etcd (eth1), or both."""
        for link in links:
            self.ip("switch", "link", "set", f"w{node}-{link}", "down")

    def heal(self, node, links=("eth0", "eth1")):
        for link in links:
            self.ip("switch", "link", "set", f"w{node}-{link}", "up")

    def nft(self, rule):
        return run("ip", "netns", "exec", namespace(self.top, "switch"), "nft", rule)

    def lose(self, source, target, percent=100, link="eth0"):
        """That much of what one node sends the other gets lost; the way back is as it was."""
        some = f"numgen random mod 100 < {percent}" if percent < 100 else ""
        self.nft(f"add rule bridge faults forward iifname w{source}-{link} oifname w{target}-{link} "
                 f"{some} drop")

    def lose_nothing(self):
        self.nft("flush chain bridge faults forward")

    def bytes_received(self, node, link="eth0"):
        return bytes_carried(self.top, f"w{node}", link, "rx")

    def bytes_sent(self, node, link="eth0"):
        return bytes_carried(self.top, f"w{node}", link, "tx")

    def wait_members(self):
        """Until every living node sees just the living ones."""
        names = [node.name for node in self.alive()]
        for node in self.alive():
            until(lambda node=node: node.members() == names, f"{node.name} sees {names}")

    def wait_settled(self, name):
        """Until every living node says that the same revision of the layout is in force."""
        def settled():
            if not all(os.path.isdir(os.path.join(node.path, name)) for node in self.alive()):
                return False
            states = [mount.Job(node, name).status() for node in self.alive()]
            if all(status["state"] == "failed" for status in states):
                raise mount.Failed(f"reshard failed: {states[0]['last_error']}")
            return all(status["state"] == "idle" and status["in_force_revision"] == status["revision"]
                       == states[0]["revision"] for status in states)
        try:
            until(settled, f"{name} is settled")
        except AssertionError as error:
            states = [node.ptc("status", name, check=False).stdout for node in self.alive()]
            raise AssertionError(f"{error}\n" + "\n".join(states)) from None
