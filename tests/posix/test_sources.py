"""Whose rights a data set's shards are read with: those of the user who saved source.json, wherever --data-root allows.

Only root can run this: it makes calls as other users, on a mount that lets all in.
"""
import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import mount  # noqa: E402
import users  # noqa: E402
from users import ANN, BOB, read_text, run_as, write_text  # noqa: E402

TEAM = 42009  # a group
SETTLES = 30


def write(path, text, mode=0o644, owner=None):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
    if owner:
        os.chown(path, *owner)
    return path


class Sources(users.TestCase):
    mount_options = ("-o", "allow_other")

    def setUp(self):
        super().setUp()
        os.chmod(self.scratch, 0o755)
        self.job = self.new_job()
        self.give(self.job, ANN)

    def give(self, job, owner):
        for name in ("", "dataset", "incoming"):
            os.chown(os.path.join(job.path, name), *owner)

    def at(self, *parts):
        return self.job.file("dataset", *parts)

    def save(self, source, user=ANN, groups=()):
        return run_as(user, write_text, self.at("source.json"), json.dumps(source), groups=groups)

    def error(self):
        return mount.read_json(self.at("status.json"))["error"]

    def wait(self, what, check):
        end = time.monotonic() + SETTLES
        while not check():
            self.assertLess(time.monotonic(), end, what + mount.read_text(self.at("status.json")))
            time.sleep(0.05)

    def wait_state(self, *states):
        self.wait(f"not {states}: ", lambda: mount.read_json(self.at("status.json"))["state"] in states)

    def begin(self, source, user=ANN, groups=()):
        """Samples by the file that holds them; each file is one."""
        self.assertEqual(self.save(source, user, groups), "")
        self.assertEqual(run_as(ANN, write_text, self.at("order.json"), '{"batch": 1, "shuffle": "none"}'), "")
        self.wait("no head: ", lambda: os.path.lexists(self.at("head")))
        return self.files()

    def files(self):
        top = os.path.realpath(self.at("head")) + "/rank-000/files/e000/000"
        return [f"{top}/{name}" for name in sorted(os.listdir(top))]

    def refused(self, source, why, user=ANN):
        self.assertEqual(self.save(source, user), "EACCES")
        self.assertIn(why, self.error())
        # The kernel tells of the last close after close() has returned.
        self.wait("it is shown: ", lambda: not os.path.exists(self.at("source.json")))

    def test_a_file_of_root_alone(self):
        secret = write(self.temporary("secret/shadow"), "root:$y$secret\n", 0o600)
        hidden = write(self.temporary("hidden/part-0.txt"), "secret\n")
        os.chmod(self.temporary("hidden"), 0o700)
        for shards in (secret, [secret], self.temporary("hidden"), hidden, self.temporary("hidden/*.txt"),
                       self.temporary("hidden/part-{0..3}.txt")):
            self.refused({"shards": shards, "format": "files"}, "Permission denied")
        # What a directory, which may be read, holds, and where a link leads, is found when it is indexed.
        os.symlink(secret, self.temporary("secret/link"))
        os.mkdir(self.temporary("secret/below"), 0o700)
        for shards in (self.temporary("secret"), self.temporary("secret/*")):
            self.assertEqual(self.save({"shards": shards, "format": "files"}), "")
            self.wait_state("refused")
            self.assertIn("Permission denied", self.error())
        # The same saved by root is a source of root's.
        files = self.begin({"shards": secret, "format": "files"}, user=(0, 0))
        self.assertEqual([read_text(path) for path in files], ["root:$y$secret\n"])

    def test_by_a_supplementary_group(self):
        data = write(self.temporary("team/a.txt"), "of the team\n", 0o640, (0, TEAM))
        self.refused({"shards": data, "format": "files"}, "Permission denied")
        files = self.begin({"shards": data, "format": "files"}, groups=[TEAM])
        self.assertEqual(run_as(ANN, read_text, files[0]), "of the team\n")
        # That is agreed on, and outlives the daemon.
        self.mount.stop(kill=True)
        self.mount.start()
        self.wait("no head: ", lambda: os.path.lexists(self.at("head")))
        self.assertEqual(run_as(ANN, read_text, self.files()[0]), "of the team\n")

    def saved_again(self, source, groups=()):
        """What is shown when the source is indexed anew."""
        before = os.path.realpath(self.at("head")) + "/rank-000/files/e000/000"
        shown = os.stat(before).st_mode, os.stat(before).st_gid
        self.assertEqual(self.save(source, groups=groups), "")
        self.wait("nothing changes: ", lambda: os.path.lexists(self.at("head")) and shown !=
                  (os.stat(os.path.dirname(self.files()[0])).st_mode, os.stat(os.path.dirname(self.files()[0])).st_gid))
        return self.files()

    def shown(self, path):
        facts = os.stat(path)
        return facts.st_uid, facts.st_gid, oct(facts.st_mode & 0o7777)

    def test_whom_the_shards_let_read(self):
        """No file made of them lets more read it than each of them."""
        of_team = [write(self.temporary(f"data/{i}.txt"), f"sample {i}\n", mode, (0, TEAM)) for i, mode in enumerate((0o640, 0o664, 0o750))]
        source = {"shards": self.temporary("data"), "format": "files"}
        files = self.begin(source, groups=[TEAM])
        tar = os.path.realpath(self.at("head")) + "/rank-000/tar/e000/000000.tar"
        for path in (*files, tar):
            self.assertEqual(self.shown(path), (ANN[0], TEAM, "0o440"))
            self.assertEqual(run_as(ANN, lambda path=path: open(path, "rb").close()), "")
            self.assertEqual(run_as(BOB, read_text, path), "EACCES")
        self.assertEqual(self.shown(os.path.dirname(tar)), (ANN[0], TEAM, "0o550"))
        self.assertEqual(run_as(BOB, lambda: str(len(os.listdir(os.path.dirname(tar))))), "EACCES")
        self.assertEqual(run_as(BOB, read_text, files[0], groups=[TEAM]), "sample 0\n")
        # A daemon that begins again finds the same in its index.
        self.mount.stop(kill=True)
        self.mount.start()
        self.wait("no head: ", lambda: os.path.lexists(self.at("head")))
        self.assertEqual(self.shown(self.files()[0]), (ANN[0], TEAM, "0o440"))
        # Of a group each: whoever is in one of them is a stranger to the other.
        os.chown(of_team[0], 0, BOB[1])
        files = self.saved_again(source, groups=[TEAM, BOB[1]])
        self.assertEqual(self.shown(files[1])[::2], (ANN[0], "0o400"))
        self.assertEqual(run_as(BOB, read_text, files[1], groups=[TEAM]), "EACCES")
        self.assertEqual(run_as(ANN, read_text, files[1]), "sample 1\n")
        for path in of_team:
            os.chmod(path, 0o644)
        self.assertEqual(self.shown(self.saved_again(source)[0])[::2], (ANN[0], "0o444"))
        self.assertEqual(run_as(BOB, read_text, self.files()[0]), "sample 0\n")

    def test_whom_the_directories_above_let_read(self):
        shard = write(self.temporary("own/data/0.txt"), "of a home\n", 0o644, (0, TEAM))
        os.chmod(self.temporary("own"), 0o750)
        os.chown(self.temporary("own"), ANN[0], TEAM)
        source = {"shards": shard, "format": "files"}
        files = self.begin(source)
        self.assertEqual(self.shown(files[0]), (ANN[0], TEAM, "0o440"))
        self.assertEqual([run_as(BOB, read_text, files[0], groups=groups) for groups in ([], [TEAM])], ["EACCES", "of a home\n"])
        os.chmod(self.temporary("own"), 0o700)
        self.assertEqual(self.shown(self.saved_again(source)[0])[::2], (ANN[0], "0o400"))
        self.assertEqual(run_as(BOB, read_text, self.files()[0], groups=[TEAM]), "EACCES")
        self.assertEqual(run_as(ANN, read_text, self.files()[0]), "of a home\n")

    def test_whom_a_list_of_access_control_lets_read(self):
        """What the mode then says of the group is the most that anybody in the list may."""
        shard = write(self.temporary("listed/0.txt"), "of a list\n", 0o600, (0, TEAM))
        entries = ((1, 6, -1), (2, 4, ANN[0]), (4, 0, -1), (0x10, 4, -1), (0x20, 0, -1))  # Ann reads, TEAM does not
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        if mount.error_of(os.setxattr, shard, "system.posix_acl_access", acl) == "EOPNOTSUPP":
            self.skipTest("the file system here knows no lists of access control")
        self.assertEqual(os.stat(shard).st_mode & 0o777, 0o640)
        self.assertEqual(run_as(BOB, read_text, shard, groups=[TEAM]), "EACCES")
        files = self.begin({"shards": shard, "format": "files"})
        self.assertEqual(self.shown(files[0]), (ANN[0], TEAM, "0o400"))
        self.assertEqual(run_as(BOB, read_text, files[0], groups=[TEAM]), "EACCES")
        self.assertEqual(run_as(ANN, read_text, files[0]), "of a list\n")

    def test_by_mv_and_by_another_who_may_write(self):
        """Who renames a file over source.json, or writes it, saves it: not the job's owner, nor who made the file."""
        secret = write(self.temporary("secret"), "of root\n", 0o600)
        source = json.dumps({"shards": secret, "format": "files"})
        write(self.at("new.json"), source)
        self.assertEqual(run_as(ANN, os.rename, self.at("new.json"), self.at("source.json")), "EACCES")
        self.assertIn("Permission denied", self.error())
        # Through a descriptor of Ann's, which root writes to and closes.
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)

        def give():
            fd = os.open(self.at("source.json"), os.O_WRONLY | os.O_CREAT)
            socket.send_fds(theirs, [b"x"], [fd])

        self.assertEqual(run_as(ANN, give), "")
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        os.write(fd, source.encode())
        self.assertEqual(mount.error_of(os.fsync, fd), "EACCES")
        self.assertEqual(mount.error_of(os.close, fd), "EACCES")
        deadline = time.monotonic() + 10  # the kernel says by and by that nobody has it open any more
        while os.path.exists(self.at("source.json")):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def test_permission_that_is_lost(self):
        names = [write(self.temporary(f"data/{i}.txt"), f"sample {i}\n", owner=BOB) for i in range(3)]
        files = self.begin({"shards": self.temporary("data"), "format": "files"})
        tar = os.path.realpath(self.at("head")) + "/rank-000/tar/e000/000000.tar"
        with open(files[1], encoding="utf-8") as open_before, open(tar, "rb") as tar_before:
            self.assertIn(b"sample 0", tar_before.read())
            self.assertEqual([run_as(ANN, read_text, path) for path in files], [f"sample {i}\n" for i in range(3)])
            for name in names:
                os.chmod(name, 0o600)
            time.sleep(1)
            for path in files:
                self.assertEqual(run_as(ANN, read_text, path), "EACCES")
                self.assertEqual(mount.error_of(lambda: open(path).close()), "EACCES")
            self.assertEqual(mount.error_of(lambda: open(tar).close()), "EACCES")
            del open_before  # like a file of a disk: who has it open, has it
        self.assertIn("Permission denied", json.dumps(mount.read_json(self.at("status.json"))["read_errors"]))
        for name in names:
            os.chmod(name, 0o644)
        self.assertEqual(run_as(ANN, read_text, files[0]), "sample 0\n")
        # A directory above them, which changes nothing of the files.
        os.chmod(self.temporary("data"), 0o700)
        time.sleep(1)
        for path in files + [tar]:
            self.assertEqual(mount.error_of(lambda: open(path).close()), "EACCES", path)
        os.chmod(self.temporary("data"), 0o755)
        self.assertEqual(run_as(ANN, read_text, files[2]), "sample 2\n")

    def test_formats_with_shards(self):
        """Not only files: what is listed, indexed and mapped is read as Ann, too."""
        lines = write(self.temporary("lines/0.jsonl"), '{"a": 1}\n{"a": 2}\n')
        files = self.begin({"shards": self.temporary("lines")})
        jsonl = os.path.realpath(self.at("head")) + "/rank-000/jsonl/e000"
        jsonl = f"{jsonl}/{sorted(os.listdir(jsonl))[0]}"
        self.assertEqual(run_as(ANN, read_text, jsonl), '{"a": 1}\n')
        os.chown(lines, *BOB)
        os.chmod(lines, 0o600)
        time.sleep(1)
        self.assertEqual(run_as(ANN, read_text, jsonl), "EACCES")
        self.assertEqual(run_as(ANN, read_text, files[0]), "EACCES")

    def test_what_ptcfs_itself_has_open(self):
        """A process may follow its own /proc/self/fd/N to whatever it has open, as whomever it acts: no source leads there."""
        bobs = self.mount.job("bobs")
        self.give(bobs, BOB)
        os.chmod(bobs.path, 0o700)
        self.assertEqual(run_as(BOB, os.mkdir, bobs.file("incoming", "base")), "")
        secret = bobs.file("incoming", "base", "secret.txt")
        self.assertEqual(run_as(BOB, write_text, secret, "of Bob\n"), "")
        shard = write(self.temporary("bob/a.jsonl"), '{"of": "Bob"}\n', owner=BOB)
        os.chown(os.path.dirname(shard), *BOB)
        os.chmod(os.path.dirname(shard), 0o700)
        source = json.dumps({"shards": os.path.dirname(shard)})
        self.assertEqual(run_as(BOB, write_text, bobs.file("dataset", "source.json"), source), "")
        self.assertEqual(run_as(BOB, write_text, bobs.file("dataset", "order.json"), '{"batch": 1}'), "")
        self.wait("no head: ", lambda: os.path.lexists(bobs.file("dataset", "head")))
        lines = os.path.realpath(bobs.file("dataset", "head")) + "/rank-000/jsonl/e000"
        lines = f"{lines}/{os.listdir(lines)[0]}"
        with open(secret, encoding="utf-8"), open(lines, encoding="utf-8") as shown:
            self.assertEqual(shown.read(), '{"of": "Bob"}\n')
            fds = f"/proc/{self.mount.process.pid}/fd"
            mine = [fd for fd in os.listdir(fds) if os.readlink(f"{fds}/{fd}") == shard]
            self.assertNotEqual(mine, [])
            self.assertEqual(run_as(ANN, read_text, shard), "EACCES")
            os.makedirs(self.temporary("ann"))
            os.symlink(f"/proc/self/fd/{mine[0]}", self.temporary("ann/link.txt"))
            through = [f"/proc/self/fd/{mine[0]}", f"/proc/self/task/../fd/{mine[0]}", self.temporary("ann/link.txt"),
                       f"/proc/thread-self/fd/{mine[0]}", f"/dev/fd/{mine[0]}", "/proc/self/cwd", "/proc/self/root/etc"]
            for shards in through:
                self.assertEqual(self.save({"shards": shards, "format": "files"}), "ELOOP", shards)
                self.assertIn("one of the kernel's own", self.error())
            for shards in ("/proc/self/fd", "/proc/self/fd/*/", "/proc/self/environ", "/proc/self/maps", "/sys/kernel",
                           "/proc/self/../self/fd/[0-9]*"):
                self.refused({"shards": shards, "format": "files"}, "procfs")
            self.assertEqual(self.save({"shards": [self.temporary("ann")], "format": "files"}), "")
            self.assertEqual(self.save({"shards": [self.temporary("ann/*")], "format": "files", "on_error": "skip"}), "")
            self.wait("not refused: ", lambda: "one of the kernel's own" in mount.read_text(self.at("status.json")))

    def test_a_terminal_is_not_opened(self):
        """Of a leader of a session a terminal that is opened becomes its own: ^C there would end it."""
        self.mount.stop()
        self.mount.launcher = ("setsid",)
        self.addCleanup(setattr, self.mount, "launcher", ())
        self.mount.start()
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        self.addCleanup(os.close, slave)
        os.chmod(os.ttyname(slave), 0o666)
        os.makedirs(self.temporary("d"))
        os.symlink(os.ttyname(slave), self.temporary("d/a.jsonl"))
        os.mkfifo(self.temporary("d/b.jsonl"))
        for shards in (self.temporary("d"), self.temporary("d/a.jsonl"), self.temporary("d/*"), os.ttyname(slave)):
            self.save({"shards": shards, "format": "jsonl"})
            self.wait("is indexed: ", lambda: mount.read_json(self.at("status.json"))["state"] != "indexing")
            with open(f"/proc/{self.mount.process.pid}/stat", encoding="utf-8") as file:
                terminal = int(file.read().rsplit(")", 1)[1].split()[4])
            self.assertEqual(terminal, 0, shards)


class Texts(users.TestCase):
    """What users save, and what is made of it, is read by those whom they let."""
    mount_options = ("-o", "allow_other")

    def setUp(self):
        super().setUp()
        os.chmod(self.scratch, 0o777)
        self.job = self.new_job()
        for name in ("", "dataset", "incoming"):
            os.chown(os.path.join(self.job.path, name), *ANN)

    def save(self, name, text, mask=0o077):
        def save():
            os.umask(mask)
            write_text(self.job.file(name), text)
        return run_as(ANN, save)

    def move(self, name, text, mode, here=True):
        draft = self.job.file("draft") if here else self.temporary("draft")

        def move():
            write_text(draft, text)
            os.chmod(draft, mode)
            moved = subprocess.run(["mv", "-f", draft, self.job.file(name)], check=False, stderr=subprocess.DEVNULL)
            return "refused" if moved.returncode else ""
        return run_as(ANN, move)

    def readers(self, *names):
        return [[run_as(user, read_text, self.job.file(name)) not in ("EACCES", "EPERM") for name in names]
                for user in (ANN, BOB)]

    def check_mode(self, name, mode):
        self.assertEqual(oct(os.stat(self.job.file(name)).st_mode & 0o7777), oct(mode))

    def test_a_new_file_has_the_mode_that_it_was_made_with(self):
        source = write(self.temporary("part-0.txt"), "of ann\n")
        names = ("dataset/source.json", "dataset/status.json", "dataset/plan.json")
        self.assertEqual(self.save("dataset/source.json", json.dumps({"shards": source, "format": "files"})), "")
        self.check_mode("dataset/source.json", 0o600)
        self.assertEqual(self.readers(*names), [[True] * 3, [False] * 3])
        self.assertEqual(run_as(ANN, os.chmod, self.job.file("dataset/source.json"), 0o644), "")
        self.assertEqual(self.readers(*names), [[True] * 3, [True] * 3])

    def test_what_is_refused_is_quoted_to_who_may_read_it(self):
        names = ("rules.json", "status.json", "plan.json", "plan.svg")
        self.assertEqual(self.save("rules.json", '{"rules": "secret"}'), "EINVAL")
        self.assertIn("rules.json", run_as(ANN, read_text, self.job.file("status.json")))
        self.assertEqual(self.readers("status.json"), [[True], [False]])
        good = '{"format": "ptc-rules/1", "extends": "llama", "rules": []}'
        self.assertEqual(self.save("rules.json", good), "")
        self.check_mode("rules.json", 0o600)
        self.assertEqual(self.readers(*names), [[True] * 4, [False] * 4])
        self.assertEqual(run_as(ANN, os.unlink, self.job.file("rules.json")), "")
        self.assertEqual(self.readers(*names[1:]), [[True] * 3, [True] * 3])
        self.assertEqual(self.save("rules.json", good, 0o022), "")
        self.assertEqual(self.readers(*names), [[True] * 4, [True] * 4])

    def test_a_file_that_is_moved_over_one_keeps_its_mode(self):
        layout = read_text(self.job.file("layout.json"))
        for here in (True, False):
            self.assertEqual(self.move("layout.json", layout, 0o600, here), "")
            self.check_mode("layout.json", 0o600)
            self.assertEqual(self.readers("layout.json", "status.json"), [[True] * 2, [False] * 2])
            self.assertEqual(self.move("layout.json", layout, 0o644, here), "")
            self.check_mode("layout.json", 0o644)
            self.assertEqual(self.readers("layout.json", "status.json"), [[True] * 2, [True] * 2])
        for here in (True, False):
            self.assertEqual(self.move("layout.json", '{"secret": 1}', 0o600, here), "refused")
            self.check_mode("layout.json", 0o644 if here else 0o600)
            self.assertNotIn("secret", run_as(BOB, read_text, self.job.file("status.json")))

    def test_a_name_that_is_made_anew_shows_no_former_text(self):
        os.chmod(self.job.path, 0o777)
        os.chmod(self.job.file("dataset"), 0o777)
        write(self.temporary("part-0.txt"), "of ann\n")
        private = json.dumps({"shards": self.temporary("part-0.txt"), "format": "files"})
        self.assertEqual(self.save("dataset/source.json", private), "")
        self.assertEqual(self.save("rules.json", '{"secret": 1}'), "EINVAL")
        layout = read_text(self.job.file("layout.json"))
        os.chmod(self.job.file("layout.json"), 0o600)

        def make_anew(name):
            os.umask(0)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.job.file(name))
            with open(self.job.file(name), "w+", encoding="utf-8"):
                for other in (name, "status.json", "dataset/status.json"):
                    try:
                        text = read_text(self.job.file(other))
                    except PermissionError:
                        continue
                    if text:
                        return other + ": " + text
                os._exit(0)  # without a close that could be refused

        for name in ("dataset/source.json", "layout.json", "rules.json"):
            self.assertIn(run_as(BOB, make_anew, name), ("", "EINVAL"), name)
            self.assertFalse(self.readers("status.json")[1][0])
        self.assertEqual(read_text(self.job.file("layout.json")), layout)

    def test_a_mode_that_is_widened_opens_no_former_refusal(self):
        os.chmod(self.job.file("layout.json"), 0o600)
        self.assertEqual(self.save("layout.json", '{"secret": 1}'), "EINVAL")
        self.assertIn("secret", run_as(ANN, read_text, self.job.file("status.json")))
        self.assertEqual(run_as(BOB, read_text, self.job.file("status.json")), "EACCES")
        self.assertEqual(run_as(ANN, os.chmod, self.job.file("layout.json"), 0o644), "")
        for user in (ANN, BOB):
            text = run_as(user, read_text, self.job.file("status.json"))
            self.assertNotIn("secret", text)
            self.assertIn("is not told", text)

    def test_another_owner_or_group_reads_no_former_refusal(self):
        """Of whichever text, and by whatever way others come to read status.json."""
        good = {"layout.json": '{"tp": 1, "pp": 1, "dp": 1}',
                "rules.json": '{"format": "ptc-rules/1", "extends": "llama", "rules": []}',
                "dataset/order.json": '{"batch": 1, "shuffle": "none"}'}
        team, same = (-1, TEAM), (-1, -1)
        in_team = (BOB[0], TEAM)
        for name, text in good.items():
            statuses = ["status.json"] + (["dataset/status.json"] if name.startswith("dataset") else [])
            # What is changed, step by step: name (of the text, or of the job), owner and mode.
            for steps in ([(".", team, None), (name, team, None)],
                          [(name, team, None), (".", team, None)],
                          [(name, team, None), (".", team, 0o750)],
                          [(".", BOB, None)],
                          [(".", same, 0o700), (name, same, 0o644), (".", same, 0o755)]):
                with self.subTest(name=name, steps=steps):
                    for part in ("", "dataset", "incoming"):
                        os.chown(self.job.file(part), *ANN)
                        os.chmod(self.job.file(part), 0o755)
                    self.assertEqual(self.save(name, text), "")
                    os.chown(self.job.file(name), *ANN)
                    os.chmod(self.job.file(name), 0o640)
                    self.assertEqual(self.save(name, '{"secret": 1}'), "EINVAL")
                    for status in map(self.job.file, statuses):
                        self.assertIn("secret", run_as(ANN, read_text, status))
                        for user in (BOB, in_team):
                            self.assertEqual(run_as(user, read_text, status), "EACCES")
                    for part, owner, mode in steps:
                        os.chown(self.job.file(part), *owner)
                        if mode is not None:
                            os.chmod(self.job.file(part), mode)
                    for status in map(self.job.file, statuses):
                        told = [run_as(user, read_text, status) for user in (BOB, in_team)]
                        self.assertTrue(any("is not told" in text for text in told), told)
                        self.assertFalse(any("secret" in text for text in told), told)
            os.chmod(self.job.file(name), 0o644)

    def test_who_is_let_in_reads_no_former_refusal(self):
        os.chmod(self.job.path, 0o700)
        self.assertEqual(self.save("layout.json", '{"secret": 1}'), "EINVAL")
        self.assertEqual(run_as(ANN, os.chmod, self.job.path, 0o755), "")
        self.assertIn("is not told", run_as(BOB, read_text, self.job.file("status.json")))
        # Whom it was told already, it is told on.
        self.assertEqual(self.save("layout.json", '{"known_to_all": 1}'), "EINVAL")
        for user in (ANN, BOB):
            os.chown(self.job.path, *user)
            self.assertIn("known_to_all", run_as(BOB, read_text, self.job.file("status.json")))

    def test_another_group_does_not_read_it(self):
        os.chown(self.job.path, ANN[0], BOB[1])
        os.chmod(self.job.path, 0o770)
        os.chown(self.job.file("layout.json"), ANN[0], TEAM)
        os.chmod(self.job.file("layout.json"), 0o640)
        self.assertEqual(self.readers("layout.json", "status.json"), [[True] * 2, [False] * 2])
        os.chown(self.job.file("layout.json"), ANN[0], BOB[1])
        os.chmod(self.job.file("layout.json"), 0o644)
        draft = write(self.temporary("draft"), read_text(self.job.file("layout.json")), 0o640, (ANN[0], TEAM))
        inside = shutil.copy2(draft, self.job.file("draft"))
        os.chown(inside, ANN[0], TEAM)
        self.assertEqual(run_as(BOB, read_text, inside), "EACCES")
        os.rename(inside, self.job.file("layout.json"))
        self.check_mode("layout.json", 0o600)
        self.assertEqual(run_as(BOB, read_text, self.job.file("layout.json")), "EACCES")

    def test_what_was_refused_of_a_data_set(self):
        self.assertEqual(self.save("dataset/order.json", '{"secret": 1}'), "EINVAL")
        self.assertIn("secret", run_as(ANN, read_text, self.job.file("status.json")))
        self.assertEqual(self.readers("status.json", "dataset/status.json"), [[True] * 2, [False] * 2])


class DataRoots(Sources):
    """Only below some directories."""
    test_a_file_of_root_alone = test_by_a_supplementary_group = test_by_mv_and_by_another_who_may_write = None
    test_whom_the_shards_let_read = test_whom_the_directories_above_let_read = test_whom_a_list_of_access_control_lets_read = None
    test_permission_that_is_lost = test_formats_with_shards = None
    test_what_ptcfs_itself_has_open = test_a_terminal_is_not_opened = None

    @classmethod
    def setUpClass(cls):
        cls.roots = mount.tempfile.mkdtemp(prefix="ptcfs-roots-")
        cls.addClassCleanup(mount.shutil.rmtree, cls.roots)
        os.chmod(cls.roots, 0o755)
        for name in ("a", "b", "ab"):
            os.mkdir(f"{cls.roots}/{name}")
        cls.mount_options = ("-o", "allow_other", "--data-root", f"{cls.roots}/a:{cls.roots}/b/")
        super().setUpClass()

    def test_only_below_them(self):
        a, b = self.roots + "/a", self.roots + "/b"
        outside = write(self.roots + "/ab/x.txt", "outside\n")
        write(a + "/deep/x.txt", "inside a\n")
        write(b + "/x.txt", "inside b\n")
        for shards in (outside, self.roots, self.roots + "/*/x.txt", a + "/../ab/x.txt", "/etc/hostname", "/"):
            self.refused({"shards": shards, "format": "files"}, "--data-root", (0, 0))
        for name, target in (("up", "../ab"), ("absolute", self.roots + "/ab"), ("file", "../ab/x.txt")):
            os.symlink(target, f"{a}/{name}")
            for shards in [f"{a}/{name}"] + ([f"{a}/{name}/x.txt"] if name != "file" else []):
                self.refused({"shards": shards, "format": "files"}, "leads out of", (0, 0))
            os.unlink(f"{a}/{name}")
        os.symlink("x.txt", a + "/deep/same.txt")
        files = self.begin({"shards": [a + "/deep", b + "/x.txt"], "format": "files"})
        self.assertEqual([mount.read_text(path) for path in files], ["inside a\n", "inside a\n", "inside b\n"])
        # A link that comes later.
        os.unlink(a + "/deep/x.txt")
        os.symlink("../../ab/x.txt", a + "/deep/x.txt")
        time.sleep(1)
        self.assertNotEqual(run_as(ANN, read_text, files[1]), "outside\n")
        self.assertEqual(self.save({"shards": a + "/deep", "format": "files"}, (0, 0)), "")
        self.wait_state("refused")
        self.assertIn("leads out of", self.error())


if __name__ == "__main__":
    mount.main()
