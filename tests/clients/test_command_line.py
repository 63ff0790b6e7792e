"""--help, the manual pages and the completions tell the same; wrong command lines name what was meant."""
import os
import re
import shutil
import subprocess
import unittest

import models
import mount

TOOLS = os.path.join(os.path.dirname(__file__), "..", "..", "tools")
BIN = mount.bin_dir()


def run(program, *arguments):
    return subprocess.run([os.path.join(BIN, program), *arguments], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False, timeout=60)


def help_of(program, *command):
    done = run(program, *command, "--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands_in(text):
    _, _, commands = text.partition("\nCommands:\n")
    return re.findall(r"^  (\w+) ", commands.split("\n\n")[0], re.MULTILINE)


def options_in(text):
    """The options that a --help lists, -h aside, which all have."""
    names = set()
    for line in re.findall(r"^  (-.*)", text, re.MULTILINE):
        names.update(re.findall(r"(?:^|, )(--?[\w-]+)", line.split("  ")[0]))
    return names - {"-h", "--help"}


def help_by_command(program):
    """"" and every subcommand ("layout set") → its --help."""
    found = {"": help_of(program)}
    for command in commands_in(found[""]):
        found[command] = help_of(program, command)
        for inner in commands_in(found[command]):
            job = ["JOB"] if " JOB" in found[command].split("\n\n")[0] else []
            found[f"{command} {inner}"] = help_of(program, command, *job, inner)
    return found


def manual(page):
    return mount.read_text(os.path.join(TOOLS, "man", page))


def options_of_manual(text):
    names = set()
    for item in re.findall(r"^\.It (.*Fl .*)", text, re.MULTILINE):
        names.update("-" + name for words in re.findall(r"Fl ((?:\S+ , )*\S+)", item)
                     for name in words.split(" , "))
    return names - {"-h", "--help"}


class Manuals(unittest.TestCase):
    def test_ptcfs_options(self):
        self.assertEqual(options_of_manual(manual("ptcfs.8")), options_in(help_of("ptcfs")))

    def test_ptc_commands_and_options(self):
        first, *sections = re.split(r"^\.Ss ", manual("ptc.1"), flags=re.MULTILINE)
        told = {"": first} | {text.split("\n")[0]: text for text in sections}
        asked = help_by_command("ptc")
        self.assertEqual(list(told), list(asked))
        for command, text in asked.items():
            self.assertEqual(options_of_manual(told[command]), options_in(text), command)

    def test_layout_keys(self):
        source = mount.read_text(os.path.join(TOOLS, "..", "reshard", "ptc", "layout.cc"))
        keys = re.search(r"kKeys = \{(.*?)\}", source, re.DOTALL).group(1)
        self.assertEqual(re.findall(r"^\.It Cm (\w+)", manual("ptcfs-layout.5"), re.MULTILINE),
                         re.findall(r'"(\w+)"', keys))

    def test_exit_statuses(self):
        for program, page in (("ptcfs", "ptcfs.8"), ("ptc", "ptc.1")):
            text = help_of(program)
            told = re.findall(r"\b(\d+) ", text[text.index("Exit status:"):].split("\n\"")[0])
            section = manual(page).split(".Sh EXIT STATUS")[1].split(".Sh")[0]
            self.assertEqual(re.findall(r"^\.It (\d+)", section, re.MULTILINE), told)

    def check_pages(self, program, *options):
        if shutil.which(program) is None:
            self.skipTest(f"{program} is not installed")
        for page in os.listdir(os.path.join(TOOLS, "man")):
            done = subprocess.run([program, *options, os.path.join(TOOLS, "man", page)],
                                  capture_output=True, text=True, check=False,
                                  env={**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80"})
            yield page, done

    def test_mandoc_has_nothing_to_say(self):
        for page, done in self.check_pages("mandoc", "-T", "lint", "-W", "warning"):
            self.assertEqual(done.stdout, "", page)

    def test_man_has_nothing_to_say(self):
        for page, done in self.check_pages("man", "--warnings", "-l"):
            self.assertEqual((done.stderr, done.returncode), ("", 0), page)
            self.assertIn("SEE ALSO", done.stdout)


class Help(unittest.TestCase):
    def test_it_reads_like_a_manual(self):
        for program in ("ptcfs", "ptc"):
            for command, text in help_by_command(program).items():
                usage = text.split("\n")[0]
                self.assertRegex(usage, rf"^Usage: {program} .*\[OPTION\]…")
                for word in command.split():
                    self.assertIn(f" {word}", usage)
                for line in text.split("\n"):
                    self.assertLessEqual(len(line), 80, line)
        self.assertIn("Usage: ptcfs [OPTION]… MOUNTPOINT\n", help_of("ptcfs"))
        self.assertIn("Usage: ptc plan [OPTION]… JOB\n", help_of("ptc", "plan"))

    def test_wrong_words_and_what_was_meant(self):
        for program, line, *said in (
                ("ptc", "statsu", "unknown command 'statsu'; is it 'status'?"),
                ("ptc", "-C /nowhere lss", "unknown command 'lss'; is it 'ls'?"),
                ("ptc", "xyzzy", "unknown command 'xyzzy'"),
                ("ptc", "layout j sett --tp 2", "unknown command 'sett'; is it 'set'?"),
                ("ptc", "layout set j --tp 2", "JOB comes before 'set': ptc layout j set …"),
                ("ptc", "plan j --stage 1,2", "unknown option '--stage'; is it '--stages'?"),
                ("ptc", "plan j --naming=stage --optimiser=zero1", "is it '--optimizer'?"),
                ("ptc", "status --jsno", "unknown option '--jsno'; is it '--json'?"),
                ("ptc", "status a b", "'b' is one argument too many"),
                ("ptc", "plan", "JOB is required"),
                ("ptc", "plan j --tp", "--tp"),
                ("ptc", "plan j --tp two", "--tp"),
                ("ptc", "layout j set", "at least one of --tp"),
                ("ptc", "export j out --rank 1", "--layout"),
                ("ptc", "export j out --hf --model", "--hf", "--model"),
                ("ptc", "wait j --timeout -1", "--timeout"),
                ("ptc", "", "subcommand"),
                ("ptcfs", "", "MOUNTPOINT is required"),
                ("ptcfs", "--listen 10.0.0.1:7070 /mnt/x", "also needs --etcd"),
                ("ptcfs", "--node W_1.example.org /mnt/x", "DNS label", "w-1 would do"),
                ("ptcfs", "--etcd http://e:1 --node -w /mnt/x", "DNS label"),
                ("ptcfs", "--etcd http://e:1 --node w --listen 0.0.0.0:7070 /mnt/x", "--advertise"),
                ("ptcfs", "--etcd http://e:1 --node w --listen 0:7070 /mnt/x", "--advertise"),
                ("ptcfs", "--etcd http://e:1 --node w --listen [::]:7070 /mnt/x", "--advertise"),
                ("ptcfs", "--etcd http://e:1 --node w --listen [::]:7 --advertise 0.0.0.0:7 /mnt/x", "cannot connect"),
                ("ptcfs", "--etcd http://e:1 --node w --advertise nonsense /mnt/x", "no address of a node"),
                ("ptcfs", "--lease 0 /mnt/x", "2 to 3600 seconds"),
                ("ptcfs", "--memroy 1G /mnt/x", "unknown option '--memroy'; is it '--memory'?"),
                ("ptcfs", "--memroy", "unknown option '--memroy'; is it '--memory'?"),
                ("ptcfs", "a b c", "MOUNTPOINT", "received 3"),
                ("ptcfs", "--memory lots /mnt/x", "--memory", "lots"),
                ("ptcfs", "--memory 5 /mnt/x", "--memory: 5 B is too small"),
                ("ptcfs", "--http 1.2.3.4:99999 /mnt/x", "--http"),
                ("ptcfs", "-o memory /mnt/x", "-o memory: a value is missing"),
                ("ptcfs", "-o memry=1G /mnt/x", "-o memry=1G: unknown option, is it 'memory'?"),
                ("ptcfs", "-o ro /mnt/x", "-o ro: a read-only mount is not offered"),
                ("ptcfs", "-o remount,noatime /mnt/x", "-o remount: options cannot change")):
            with self.subTest(f"{program} {line}"):
                done = run(program, *line.split())
                self.assertEqual(done.returncode, 2 if program == "ptc" else 1)
                self.assertEqual(done.stdout, "")
                self.assertTrue(done.stderr.startswith(program + ": "), done.stderr)
                for words in said:
                    self.assertIn(words, done.stderr)

    def test_stores_that_are_not_there(self):
        for place, *said in (("/nowhere/store", "/nowhere/store: No such file or directory"), ("/dev/null/store", "Not a directory"),
                             ("/tmp", "/tmp is no store of a cluster")):
            for more in ((), ("--dry-run",)):
                done = run("ptc", "recover", "--etcd", "http://127.0.0.1:1", *more, place)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                for words in said:
                    self.assertIn(words, done.stderr)

    def test_numbers_out_of_range(self):
        """Each option that takes a number, with the most and the least of all: one short line says what it takes."""
        beyond = ("-1", "1e999", "-1e999", "nan", "inf", "18446744073709551616", "9" * 400, "0x10", "one", "")
        of_ptc = [("plan j", option, "1 to 1048576", "0 1048577 1.5") for option in ("--tp", "--pp", "--dp", "--ep", "--cp")]
        of_ptc += [("layout j set", option, "1 to 1048576", "0 1048577 1.5") for option in ("--tp", "--pp", "--dp", "--ep", "--cp")]
        of_ptc += [(command, "--stages", "0 to 4294967295", "4294967296 2,-1 1,1e999") for command in ("plan j", "layout j set")]
        of_ptc += [(command, option, "0 to 1048576", "1048577 1.5") for command in ("plan j", "layout j set") for option in ("--dp-shard", "--etp")]
        of_ptc += [("layout j set", "--replicas", "0 to 64", "65 0.5"), ("layout j set", "--keep", "0 to 4294967295", "4294967296 0.5"),
                   ("wait j", "--timeout", "0.001 to 1000000000", "0 0.0001 1e10"), ("top", "--delay", "0.05 to 86400", "0 0.01 1e6"),
                   ("top", "--count", "1 to 4294967295", "0 4294967296 0.5"), ("import j d", "--rank", "0 to 1048575", "1048576 0.5"),
                   ("export j d --layout l", "--rank", "0 to 1048575", "1048576 0.5")]
        of_ptcfs = [("", "--lease", "2 to 3600", "0 1 3601 2.5"), ("", "--patience", "1 to 86400", "0 86401 1.5"),
                    ("", "--memory", "", "0 2E"), ("", "--cache", "", "2E"), ("", "--quota-job", "", "1,-1 1,nan none,1e999"),
                    ("", "--quota-user", "", "1,-1 1,nan none,1e999"), ("", "--scrub", "off, daily, or", "0"), ("", "--reserve", "", "-1 x 1E"),
                    ("", "--root-mode", "octal", "8 17777"), ("", "--io-uring", "auto, on, off", "yes"), ("", "--log-format", "text nor json", "xml"),
                    ("", "--transport", "auto, tcp, nccl", "NCCL rdma"),
                    ("", "--http", "", ":65536 :-1 :99999999999999999999")]
        for program, status, table in (("ptc", 2, of_ptc), ("ptcfs", 1, of_ptcfs)):
            for command, option, takes, more in table:
                for value in (*beyond, *more.split()):
                    with self.subTest(f"{program} {command} {option}={value[:30]}"):
                        done = run(program, *command.split(), f"{option}={value}", *(["/nowhere"] if program == "ptcfs" else []))
                        self.assertEqual(done.returncode, status, done.stderr)
                        self.assertTrue(done.stderr.startswith(program + ": "), done.stderr)
                        self.assertLessEqual(done.stderr.count("\n"), 2, done.stderr)
                        self.assertLess(len(done.stderr) - len(value), 250, done.stderr)
                        self.assertIn(option, done.stderr)
                        if value:
                            self.assertIn(takes, done.stderr)

    def test_help_and_version_are_no_errors(self):
        for program in ("ptcfs", "ptc"):
            for option in ("--help", "-h", "--version"):
                done = run(program, option)
                self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertRegex(run(program, "--version").stdout, rf"^{program} \d+\.\d+\.\d+\n$")


class FullDisk(mount.TestCase):
    """What cannot be printed is a failure, whichever command it is."""

    def test_each_command_fails(self):
        job = self.mount.job("printed")
        models.Gpt2().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        for words in ("status", "status --json", "status printed", "ls", "ls printed", "top --once", "plan printed --tp 2",
                      "rules list", "verify printed", "--help", "ls --help", "--version", "--complete s"):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([os.path.join(BIN, "ptc"), *words.split()], stdin=subprocess.DEVNULL, stdout=full,
                                      stderr=subprocess.PIPE, text=True, check=False, timeout=60,
                                      env={**os.environ, "PTC_MOUNT": self.mount.path})
            said = done.stderr.splitlines()
            self.assertEqual((done.returncode, said[-1:]), (1, ["ptc: writing to standard output: No space left on device"]), words)


class Completion(mount.TestCase):
    """The shells' scripts ask `PROGRAM --complete`; bash really does here."""

    def bash(self, program, *words):
        script = ('source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _ptc "$1"; '
                  'printf "%s\\n" "${COMPREPLY[@]}"')
        done = subprocess.run(
            ["bash", "-c", script, "bash",
             os.path.join(TOOLS, "completion", "ptc.bash"), os.path.join(BIN, program), *words],
            cwd=self.scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            env={**os.environ, "PTC_MOUNT": self.mount.path})
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.split()

    def test_commands_and_options_are_those_of_help(self):
        for program in ("ptc", "ptcfs"):
            asked = help_by_command(program)
            above = set()
            for command, text in asked.items():
                words = command.split()
                if len(words) > 1:
                    words.insert(1, "JOB")
                options = {name for name in options_in(text) if name.startswith("--")}
                above = above or options  # -C and --version are taken everywhere
                inner = options_in(asked[command.split()[0]]) if " " in command else set()
                offered = set(self.bash(program, *words, "--")) - {"--help"}
                self.assertEqual(offered - above - inner, options - above, command)
        self.assertEqual(self.bash("ptc", ""), commands_in(help_of("ptc")))
        self.assertEqual(self.bash("ptc", "st"), ["status"])
        self.assertEqual(self.bash("ptc", "layout", "j", ""), ["set", "edit"])
        self.assertIn("-f", self.bash("ptcfs", "-"))

    def test_what_the_mount_holds(self):
        job = self.mount.job("completed")
        models.Gpt2().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2)
        self.assertEqual(self.bash("ptc", "status", ""), ["completed"])
        self.assertEqual(self.bash("ptc", "plan", "--tp", "2", "comp"), ["completed"])
        self.assertEqual(self.bash("ptc", "plan", "--tp=2", "x"), [])
        self.assertEqual(self.bash("ptc", "pin", ""), ["completed/base"])
        nodes = mount.read_json(self.mount.path + "/.ptc/nodes.json")["nodes"]
        self.assertEqual(self.bash("ptc", "drain", ""), [node["name"] for node in nodes])
        self.assertEqual(self.bash("ptc", "rm", "comp"), ["completed", "completed/base"])
        self.assertEqual(self.bash("ptc", "export", "completed", "out", "--layout", ""),
                         ["tp2-pp1-dp1", *(f"{engine}-tp{tp}" for engine in ("sglang", "vllm") for tp in (1, 2, 4, 8))])
        self.assertEqual(self.bash("ptc", "export", "completed", "out", "--layout", "=", "tp2"),
                         ["tp2-pp1-dp1"])
        self.assertEqual(self.bash("ptc", "layout", "completed", "set", "--naming", ""),
                         ["global", "stage"])

    def test_files_and_directories(self):
        os.mkdir(self.temporary("models"))
        models.write_file(self.temporary("my-layout.json"), "{}")
        self.assertEqual(self.bash("ptc", "import", "new", ""), ["models"])
        self.assertIn("my-layout.json", self.bash("ptc", "plan", "j", "--layout", "my"))
        self.assertEqual(self.bash("ptcfs", "--store", "mo"), ["models"])
        self.assertEqual(self.bash("ptcfs", "-o", "me"), ["memory="])
        self.assertEqual(self.bash("ptcfs", "-o", "allow_other,noe"), ["allow_other,noexec"])

    def test_without_a_mount_nothing_is_complained_of(self):
        done = subprocess.run([os.path.join(BIN, "ptc"), "--complete", "-C", "/nowhere", "status", ""],
                              capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "words\n", ""))

    def test_zsh_offers_the_same(self):
        """zsh's own functions are replaced by ones that print what they are given."""
        script = """
function _describe { print -rl -- "${(@P)3}" "${@[4,-1]}"; }
function _files { print -r -- files "$@"; }
function complete_it { source "$1"; }
file=$1; shift; words=("$@"); CURRENT=$#; complete_it "$file"
"""
        zsh = shutil.which("zsh") or self.skipTest("zsh is not installed")

        def offered(program, *words):
            done = subprocess.run(
                [zsh, "-f", "-c", script, "zsh", os.path.join(TOOLS, "completion", "_ptc"),
                 os.path.join(BIN, program), *words],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            return done.stdout.split("\n")[:-1]

        self.assertEqual(offered("ptc", "stat"), ["status:Show what a job, or every job, is doing"])
        self.assertEqual(offered("ptc", "plan", "j", "--naming", ""), ["global", "stage"])
        self.assertEqual(offered("ptcfs", "-o", "mem"), ["memory=", "-S", ""])
        self.assertEqual(offered("ptc", "import", "j", ""), ["files -/"])

    def test_fish_offers_the_same(self):
        fish = shutil.which("fish") or self.skipTest("fish is not installed")
        os.mkdir(self.temporary("models"))

        def offered(line):
            done = subprocess.run(
                [fish, "-N", "-c", "source $argv[1]; complete -C $argv[2]",
                 os.path.join(TOOLS, "completion", "ptc.fish"), line],
                cwd=self.scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                env={**os.environ, "PATH": os.path.abspath(BIN) + ":" + os.environ["PATH"],
                     "HOME": self.scratch})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            return done.stdout.split("\n")[:-1]

        self.assertEqual(offered("ptc stat"), ["status\tShow what a job, or every job, is doing"])
        self.assertEqual(offered("ptc plan j --naming "), ["global", "stage"])
        self.assertEqual(offered("ptc plan j --naming=st"), ["--naming=stage"])
        self.assertEqual(offered("ptcfs -o allow_other,mem"), ["allow_other,memory="])
        self.assertEqual(offered("ptc import j "), ["models/\tDirectory"])


if __name__ == "__main__":
    mount.main()
