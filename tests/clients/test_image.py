"""tools/deploy/Dockerfile, as far as it can be replayed without docker: what it copies is there and enough, it installs
just what the programs are linked with, and they run as a container's first process."""
import fnmatch
import functools
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import mount

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
DOCKERFILE = os.path.join(ROOT, "tools/deploy/Dockerfile")


def stages(text):
    """Of a Dockerfile: for each FROM its instructions, as pairs."""
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    found = []
    for instruction in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        name, rest = instruction.split(maxsplit=1)
        if name == "FROM":
            found.append([])
        found[-1].append((name, rest))
    return found


def matches(path, pattern):
    """One of .dockerignore: it, or a directory that it lies in."""
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in path.split("/"))
    depth = pattern.count("/") + 1
    return fnmatch.fnmatchcase("/".join(path.split("/")[:depth]), pattern)


def context():
    """What docker is given: paths of files."""
    patterns = [line for line in mount.read_text(os.path.join(ROOT, ".dockerignore")).splitlines()
                if line and not line.startswith("#")]

    def is_left_out(path):
        out = False
        for pattern in patterns:  # the last that matches
            if matches(path, pattern.removeprefix("!")):
                out = not pattern.startswith("!")
        return out
    found = []
    for where, directories, names in os.walk(ROOT):
        if where == ROOT:
            directories[:] = [name for name in directories if not is_left_out(name)]
        found += [path for path in (os.path.relpath(os.path.join(where, name), ROOT) for name in names) if not is_left_out(path)]
    return found


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def installed():
    """Package → those that it depends on, and whether every Debian has it."""
    found = {}
    for line in output("dpkg-query", "-W", "-f", "${Package}\t${Essential}\t${Priority}\t${Pre-Depends}, ${Depends}\n").splitlines():
        package, essential, priority, depends = line.split("\t")
        needs = {re.split(r"[ :(]", one.strip())[0] for one in re.split(r"[,|]", depends)}
        found[package] = needs - {""}, essential == "yes" or priority == "required"
    return found


def everywhere():
    """What the smallest Debian has, and apt with it."""
    found, left = set(), [name for name, (_, there) in installed().items() if there] + ["apt"]
    while left:
        name = left.pop()
        if name not in found and name in installed():
            found.add(name)
            left += installed()[name][0]
    return found


def package_of(path):
    path = os.path.realpath(path)
    for name in (path, path.removeprefix("/usr")):  # as it was packed
        done = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.split(":")[0]
    raise AssertionError(f"{path} is of no package")


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.bin = mount.bin_dir()
        cls.build, cls.runtime = stages(mount.read_text(DOCKERFILE))

    def run_of(self, stage, word):
        return next(rest for name, rest in stage if name == "RUN" and word in rest)

    def test_what_is_copied_is_enough_to_build(self):
        """All of it but the compiling itself."""
        mount.require_program("ninja")
        files = context()
        for name, rest in self.build:
            if name == "COPY":
                for source in rest.split()[:-1]:
                    self.assertTrue(source == "." or source in files, source)
        self.assertFalse([path for path in files if path.split("/")[0] in ("build", "tests", ".git")])
        configure = shlex.split(self.run_of(self.build, "cmake").split("&&")[0])
        with tempfile.TemporaryDirectory(prefix="ptcfs-image-") as top:
            for path in files:
                os.makedirs(os.path.join(top, os.path.dirname(path)), exist_ok=True)
                shutil.copy(os.path.join(ROOT, path), os.path.join(top, path))
            done = subprocess.run(configure, cwd=top, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            build = os.path.join(top, "build")
            inputs = output("ninja", "-C", build, "-t", "inputs", "bin/ptcfs", "bin/ptc").splitlines()[1:]
            sources = [path for path in inputs if path.startswith(top + "/") and not path.startswith(build + "/")]
            self.assertGreater(len(sources), 10)  # files that programs carry; cmake has looked for all sources
            self.assertEqual([path for path in sources if not os.path.exists(path)], [])
            cached = mount.read_text(os.path.join(top, "build/CMakeCache.txt"))
            for option in configure:  # one that CMakeLists.txt does not know would be a plain variable
                if option.startswith("-DPTC_"):
                    self.assertRegex(mount.read_text(os.path.join(ROOT, "CMakeLists.txt")),
                                     rf"(option|set)\({option[2:].split('=')[0]} ")
                    self.assertRegex(cached, rf"(?m)^{option[2:].split('=')[0]}:(BOOL|STRING)={option.split('=')[1]}$")
        install = shlex.split(self.run_of(self.build, "--install"))
        prefix = install[install.index("--prefix") + 1]
        self.assertIn(("COPY", f"--from=build {prefix} /usr/local"), self.runtime)

    def test_packages_are_what_the_programs_are_linked_with(self):
        for program in ("readelf", "dpkg-query"):
            mount.require_program(program)
        needed = set()
        for program in ("ptcfs", "ptc"):
            path = os.path.join(self.bin, program)
            where = dict(re.findall(r"(\S+) => (\S+)", output("ldd", path)))
            libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", path))
            libraries = [name for name in libraries if not name.startswith("libCbc")]  # the image is without
            needed |= {package_of(where[name]) for name in libraries if name in where}
        self.assertIn("-DPTC_CBC=OFF", self.run_of(self.build, "cmake"))
        command = self.run_of(self.runtime, "apt-get install")
        words = shlex.split(command[command.index("install"):].split("&&")[0])[1:]
        packages = {word for word in words if not word.startswith("-")}
        self.assertEqual(packages, needed - everywhere() | {"fuse3"})
        self.assertIn("DEBIAN_FRONTEND=noninteractive", command)
        for program in ("sh", "mountpoint", "umount", "mkdir"):  # of kubernetes.yaml
            self.assertIn(package_of(mount.require_program(program)), everywhere() | packages)

    def test_labels_and_what_it_runs(self):
        (_, entry), = (pair for pair in self.runtime if pair[0] == "ENTRYPOINT")
        program, *options = re.findall(r'"(.*?)"', entry)
        text = output(os.path.join(self.bin, program), "--help")
        for option in options:
            self.assertRegex(text, rf"(?m)^  {option}, --")
        version = output(os.path.join(self.bin, "ptcfs"), "--version").split()[1]
        self.assertIn(f'image.version="{version}"', dict(self.runtime)["LABEL"])
        known = set(re.findall(r"--[a-z-]+", text))
        said = mount.read_text(DOCKERFILE)
        example = said[said.index(f"ptcfs:{version} --options"):said.index("FROM")]
        self.assertLessEqual(set(re.findall(r"--[a-z-]+", example)), known)

    def test_how_docker_asks_for_its_health(self):
        mount.require_program("bash")
        (command,) = re.findall(r'--health-cmd "(.*)"$', mount.read_text(DOCKERFILE), re.MULTILINE)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["sh", "-c", shlex.split(f'"{command}"')[0].replace("9090", str(port))]

        def ask():
            return subprocess.run(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=10, check=False).returncode
        self.assertNotEqual(ask(), 0)
        with mount.Mount("--http", f"127.0.0.1:{port}") as mounted:
            self.assertEqual(ask(), 0)
            if os.getuid() == 0:
                subprocess.run(["mount", "-t", "tmpfs", "none", mounted.path], check=True)
                self.assertNotEqual(ask(), 0)
                subprocess.run(["umount", mounted.path], check=True)

    def test_it_ends_as_a_first_process(self):
        """To which the kernel delivers no signal that has its default effect."""
        if os.getuid() != 0:
            self.skipTest("only root makes a namespace of processes")

        class First(mount.Mount):
            launcher = ("unshare", "--pid", "--fork", "--kill-child")

            def first(self):
                return int(mount.read_text(f"/proc/{self.process.pid}/task/{self.process.pid}/children"))
        with First() as mounted:
            status = mount.read_text(f"/proc/{mounted.first()}/status")
            self.assertRegex(status, r"(?m)^NSpid:.*\t1$")
            begun = time.monotonic()
            os.kill(mounted.first(), signal.SIGTERM)
            self.assertEqual(mounted.process.wait(timeout=30), 0)
            self.assertLess(time.monotonic() - begun, 10)
            self.assertFalse(mount.is_mounted(mounted.path))


if __name__ == "__main__":
    mount.main()
