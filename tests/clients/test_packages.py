"""The packages of tools/packages: what is in them, and their whole life in a bare Debian 12.

It packs what is built, with cpack. The Debian is made with mmdebstrap, in a namespace of mounts and processes of its
own that ends with the test. It takes minutes and a mirror of Debian, so that it wants PTC_TEST_PACKAGES=1 (tests/run --packages).
"""
import email
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
import unittest

import models
import mount

BUILD = os.path.dirname(mount.bin_dir())
SOURCES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../..")
MOST_BYTES = 15 << 20  # of a program
MOUNT_POINT = "/mnt/ptc"
# What apt, dpkg and mount remember, of whichever package.
ELSEWHERE = {"dev", "etc/ld.so.cache", "packages", "proc", "run/mount", "tmp", "var/cache", "var/lib/apt", "var/lib/dpkg",
             "var/log"}


def run(*command, check=True, **options):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False,
                          **{"text": True, "timeout": 600, **options})
    if check and done.returncode != 0:
        raise AssertionError(f"{command} gave {done.returncode}: {done.stdout}{done.stderr}")
    return done


def pack(directory):
    """package → its file."""
    run("cpack", "--config", os.path.join(BUILD, "CPackConfig.cmake"), "-G", "DEB", "-B", directory)
    shutil.rmtree(os.path.join(directory, "_CPack_Packages"))
    return {name.split("_")[0]: os.path.join(directory, name) for name in os.listdir(directory)}


def setUpModule():
    if os.environ.get("PTC_TEST_PACKAGES") != "1":
        mount.skip("takes minutes, and a mirror of Debian: tests/run --packages, or PTC_TEST_PACKAGES=1")
    if not os.path.exists(os.path.join(BUILD, "CPackConfig.cmake")):
        mount.skip(f"{BUILD} is no build directory that makes packages")
    for program in ("cpack", "dpkg-deb", "dpkg-shlibdeps", "file", "objcopy"):
        mount.require_program(program)
    top = tempfile.mkdtemp(prefix="ptcfs-packages-")
    unittest.addModuleCleanup(shutil.rmtree, top, ignore_errors=True)
    Packages.top = top
    Packages.packages = pack(os.path.join(top, "packages"))
    Packages.version = run(os.path.join(BUILD, "bin/ptcfs"), "--version").stdout.split()[1]


class Packages(unittest.TestCase):
    top, version, packages = "", "", {}

    def setUp(self):
        self.scratch = tempfile.mkdtemp(dir=self.top)

    def unpacked(self, package):
        """The folder of its files, and of what dpkg is told below DEBIAN."""
        folder = os.path.join(self.scratch, package)
        run("dpkg-deb", "--raw-extract", self.packages[package], folder)
        return folder

    def control(self, package):
        return email.message_from_string(run("dpkg-deb", "--field", self.packages[package]).stdout)

    def test_names_and_versions(self):
        self.assertEqual(set(self.packages), {"ptcfs", "ptcfs-dbgsym", "python3-ptcfs"})
        for package, file in self.packages.items():
            control = self.control(package)
            self.assertEqual(control["Version"].rsplit("-", 1)[0], self.version)
            self.assertEqual(os.path.basename(file), f"{package}_{control['Version']}_{control['Architecture']}.deb")

    def test_dependencies(self):
        needed = {word.split()[0] for word in self.control("ptcfs")["Depends"].split(", ")}
        self.assertLessEqual({"fuse3", "libc6", "libfmt9", "libfuse3-3", "libssl3", "libstdc++6"}, needed)
        self.assertEqual(self.control("ptcfs-dbgsym")["Depends"], f"ptcfs (= {self.control('ptcfs')['Version']})")
        self.assertEqual(self.control("python3-ptcfs")["Architecture"], "all")

    def test_installed_files_are_there(self):
        """All that cmake --install puts below /usr, and what Debian wants of a package."""
        prefix = os.path.join(self.scratch, "installed")
        run("cmake", "--install", BUILD, "--prefix", prefix)
        there = {os.path.relpath(os.path.join(where, name), prefix) for where, _, names in os.walk(prefix) for name in names}
        folder = self.unpacked("ptcfs")
        found = {os.path.relpath(os.path.join(where, name), folder) for where, _, names in os.walk(folder) for name in names}
        wanted = {"usr/" + name + (".gz" if "/man/" in name else "") for name in there
                  if not name.startswith(("lib/systemd", "share/ptcfs/python"))}
        documents = ("changelog.Debian.gz", "copyright", "deploy.md", "examples/kubernetes.yaml")
        wanted |= {"lib/systemd/system/ptcfs@.service", "etc/default/ptcfs", "usr/share/lintian/overrides/ptcfs"}
        wanted |= {"usr/share/doc/ptcfs/" + name for name in documents}
        wanted |= {"DEBIAN/" + name for name in ("conffiles", "control", "md5sums", "postinst", "postrm", "prerm")}
        self.assertEqual(found, wanted)
        self.assertIn("ExecStart=/usr/bin/ptcfs ", mount.read_text(folder + "/lib/systemd/system/ptcfs@.service"))
        self.assertIn("No licence has been chosen", mount.read_text(folder + "/usr/share/doc/ptcfs/copyright"))
        self.assertEqual(mount.read_text(folder + "/DEBIAN/conffiles"), "/etc/default/ptcfs\n")
        client = self.unpacked("python3-ptcfs") + "/usr/lib/python3/dist-packages"
        names = set(os.listdir(os.path.join(SOURCES, "tools/python/ptc"))) - {"__pycache__"}
        self.assertEqual(set(os.listdir(client + "/ptc")), names)
        self.assertIn(f"\nVersion: {self.version}\n", mount.read_text(f"{client}/ptcfs-{self.version}.dist-info/METADATA"))

    def test_sums_and_owners(self):
        for package, file in self.packages.items():
            folder = self.unpacked(package)
            for line in mount.read_text(folder + "/DEBIAN/md5sums").splitlines():
                digest, name = line.split("  ")
                self.assertEqual(hashlib.md5(mount.read_bytes(os.path.join(folder, name))).hexdigest(), digest)
            for line in run("dpkg-deb", "--contents", file).stdout.splitlines():
                self.assertRegex(line, r"^(drwxr-xr-x|-rw-r--r--|-rwxr-xr-x|lrwxrwxrwx) root/root ")

    def test_symbols_are_apart(self):
        programs, symbols = self.unpacked("ptcfs"), self.unpacked("ptcfs-dbgsym")
        for name in ("ptc", "ptcfs"):
            program = f"{programs}/usr/bin/{name}"
            self.assertLess(os.path.getsize(program), MOST_BYTES)
            self.assertNotRegex(run("readelf", "--section-headers", "--wide", program).stdout, r"\.symtab|\.debug_info|\.comment")
            build = re.search(r"Build ID: (\w+)", run("readelf", "--notes", program).stdout)[1]
            apart = f"{symbols}/usr/lib/debug/.build-id/{build[:2]}/{build[2:]}.debug"
            main = re.search(r"^(\w+) T main$", run("nm", apart).stdout, re.M)[1]
            self.assertRegex(run("addr2line", "-e", apart, main).stdout, rf"tools/{name}_main\.cc:\d+")

    def test_the_same_again(self):
        again = pack(os.path.join(self.scratch, "again"))
        for package, file in self.packages.items():
            self.assertTrue(mount.same_bytes(file, again[package]), package)

    def test_lintian(self):
        if shutil.which("lintian") is None:
            self.skipTest("lintian is not installed")
        run("lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0", *self.packages.values())


class Debian:
    """A root of Debian 12, and commands in it, with mounts and processes that nobody else sees."""

    def __init__(self, root, packages):
        self.root = root
        made = run("mmdebstrap", "--variant=minbase", "--quiet", "bookworm", root, check=False)
        if made.returncode != 0:
            mount.skip("no Debian could be made, for want of a mirror or of rights: " + made.stderr.strip()[-300:])
        os.mkdir(root + "/packages")
        for file in packages:
            shutil.copy(file, root + "/packages")
        with open(root + "/dev/fuse", "wb"):
            pass
        # One process holds the namespaces; with it all others end, and with these the mounts.
        script = f"mount --bind /dev/fuse '{root}/dev/fuse' && echo there && exec sleep infinity"
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={root}/proc", "sh", "-c", script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "there\n":
            mount.skip("no namespaces of mounts and processes can be made here")
        self.first = mount.read_text(f"/proc/{self.process.pid}/task/{self.process.pid}/children").strip()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        run("chattr", "-i", self.root + MOUNT_POINT, check=False)  # a test that failed may have left it closed

    def run(self, *command, **options):
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        return run("nsenter", "--target", self.first, "--mount", "--pid", "--", "chroot", self.root, *command, env=env, **options)

    def apt(self, *words):
        return self.run("apt-get", "-qq", "-y", "-o", "Dpkg::Options::=--force-confold", *words)

    def at(self, path):
        return self.root + path

    def files(self):
        """Path → mode and size of all that is on disk, but ELSEWHERE."""
        found = {}
        for where, folders, names in os.walk(self.root):
            at = os.path.relpath(where, self.root)
            folders[:] = [name for name in folders if os.path.normpath(os.path.join(at, name)) not in ELSEWHERE]
            for name in folders + names:
                path = os.path.normpath(os.path.join(at, name))
                if path not in ELSEWHERE:
                    state = os.lstat(os.path.join(where, name))
                    found[path] = (oct(state.st_mode), state.st_size if stat.S_ISREG(state.st_mode) else 0)
        return found

    def daemon(self):
        """The number of ptcfs among the processes there; "" where there is none that has not ended."""
        script = 'for p in /proc/[0-9]*; do case "$(readlink $p/exe)" in */ptcfs*) echo "${p#/proc/}";; esac; done'
        return self.run("sh", "-c", script).stdout.strip()

    def end_daemon(self):
        self.run("sh", "-c", "kill " + self.daemon())
        deadline = time.monotonic() + 30
        while self.daemon():
            if time.monotonic() > deadline:
                raise AssertionError("ptcfs does not end")
            time.sleep(0.1)


class Life(unittest.TestCase):
    def setUp(self):
        if os.getuid() != 0:
            self.skipTest("only root can make a Debian, mount and install in it")
        for program in ("mmdebstrap", "unshare", "nsenter"):
            if shutil.which(program) is None:
                self.skipTest(f"{program} is not installed")
        if not os.path.exists("/dev/fuse"):
            self.skipTest("this machine has no /dev/fuse")
        self.model = models.Llama()
        self.debian = Debian(os.path.join(Packages.top, "root"), Packages.packages.values())
        self.addCleanup(self.debian.close)

    def read(self):
        """A rank's file under a layout in which nobody wrote it, against the cuts of models.py."""
        path = f"{MOUNT_POINT}/demo/checkpoints/base/layouts/tp2-pp1-dp1/rank/1/model.safetensors"
        found = models.parse_safetensors(self.debian.run("cat", path, text=False).stdout)
        self.assertEqual({name: tensor.data for name, tensor in found.items()},
                         {tensor.name: tensor.data for tensor in self.model.rank_tensors(2, 1, 1, 0)})

    def install(self):
        return self.debian.apt("install", *("/packages/" + os.path.basename(file) for file in Packages.packages.values()))

    def test_from_installation_to_purge(self):
        debian = self.debian
        debian.apt("update")
        for relation in ("Depends", "Recommends"):
            wanted = [run("dpkg-deb", "--field", Packages.packages[package], relation).stdout.strip()
                      for package in ("ptcfs", "python3-ptcfs")]
            debian.apt("satisfy", ", ".join(filter(None, wanted)))
        os.makedirs(debian.at("/etc/systemd/system/multi-user.target.wants"), exist_ok=True)
        os.mkdir(debian.at(MOUNT_POINT))
        self.model.write_hf(debian.at("/tmp/model"))
        before = debian.files()

        self.install()
        self.assertEqual(debian.run("dpkg", "--verify", "ptcfs", "python3-ptcfs").stdout, "")
        for program in ("ptcfs", "ptc"):
            self.assertEqual(debian.run(program, "--version").stdout, f"{program} {Packages.version}\n")
        with open(debian.at("/etc/default/ptcfs"), "a", encoding="utf-8") as file:
            file.write("# an administrator's\n")
        # As systemctl enable makes it, which a bare root does not have.
        link = "/etc/systemd/system/multi-user.target.wants/ptcfs@mnt-ptc.service"
        os.symlink("/lib/systemd/system/ptcfs@.service", debian.at(link))
        debian.run("ptcfs", "--memory", "64M", MOUNT_POINT)
        debian.run("ptc", "import", "demo", "/tmp/model", "--name", "base")
        self.read()
        code = "import importlib.metadata as m, ptc; print(m.version('ptcfs'), ptc.Job('/mnt/ptc/demo').checkpoints())"
        self.assertEqual(debian.run("python3", "-c", code).stdout, f"{Packages.version} ['base']\n")

        # Neither an installation over it, nor removal, nor purge takes what a daemon has mounted.
        debian.apt("install", "--reinstall", "/packages/" + os.path.basename(Packages.packages["ptcfs"]))
        self.assertIn("an administrator's", mount.read_text(debian.at("/etc/default/ptcfs")))
        self.read()
        debian.apt("remove", "ptcfs")
        self.assertFalse(os.path.exists(debian.at("/usr/bin/ptcfs")))
        self.assertIn("an administrator's", mount.read_text(debian.at("/etc/default/ptcfs")))
        self.read()
        said = debian.apt("purge", "ptcfs").stderr
        self.assertIn("/run/ptcfs/mnt-ptc stays, for a ptcfs that runs uses it", said)
        self.read()

        # A store is found again, whatever became of the package, as long as nobody purges.
        debian.end_daemon()
        self.install()
        debian.run("ptcfs", "--memory", "64M", MOUNT_POINT)
        self.read()
        debian.end_daemon()
        with self.assertRaises(AssertionError):
            debian.run("mkdir", MOUNT_POINT + "/by-mistake")  # it is closed
        debian.apt("remove", "ptcfs")
        self.assertEqual(debian.run("ls", "/run/ptcfs").stdout, "mnt-ptc\n")
        with self.assertRaises(AssertionError):
            debian.run("mkdir", MOUNT_POINT + "/by-mistake")

        os.symlink("/lib/systemd/system/ptcfs@.service", debian.at(link))
        debian.apt("purge", "ptcfs", "python3-ptcfs")
        self.assertNotIn("ptcfs", debian.run("dpkg-query", "--show").stdout)
        self.assertNotIn("ptcfs", debian.run("cat", "/proc/mounts").stdout.replace(debian.root, ""))
        debian.run("mkdir", MOUNT_POINT + "/open-again")
        debian.run("rmdir", MOUNT_POINT + "/open-again")
        self.assertEqual(debian.run("getfattr", "-d", "-m", "-", MOUNT_POINT).stdout, "")
        after = debian.files()
        left = {path: (before.get(path), after.get(path)) for path in before.keys() | after.keys()}
        self.assertEqual({path: states for path, states in left.items() if states[0] != states[1]}, {})


if __name__ == "__main__":
    mount.main()
