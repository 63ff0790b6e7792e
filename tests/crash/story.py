"""A story of a job, told to a daemon that may die in it, and what must be true wherever it does.

    make a job, save a layout, write a checkpoint, commit it, reshard, write and commit another, keep rules,
    try to commit rubbish, reshard, commit shards of one rank, remove the first checkpoint, remove a job

After a death and a start (check):
  * every step that had returned is still so; the step that was cut off happened wholly or not at all;
  * what is readable is what the writer wrote, under the layout in force and under others;
  * the story can be told to its end, and when all is removed the store holds nothing (clear).
"""
import functools
import os
import shutil
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import models  # noqa: E402
import mount   # noqa: E402

RULES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "reshard", "rules",
                     "llama.json")
MODELS = {"a": models.Llama(1), "b": models.Llama(2), "c": models.Llama(3)}
WRITTEN_IN = {"a": (2, 1), "b": (1, 2), "c": (1, 1)}  # tp, pp
LAYOUTS = {"layout_tp": (2, 1), "layout_pp": (1, 2), "layout_both": (2, 2)}


def layout_name(tp, pp):
    return f"tp{tp}-pp{pp}-dp1"


@functools.cache
def expected(checkpoint, tp, pp, rank):
    """name → Tensor, that rank's part by the rules."""
    tensors = MODELS[checkpoint].rank_tensors(tp, pp, rank % tp, rank // tp)
    return {tensor.name: tensor for tensor in tensors}


def is_there(path):
    """Not as os.path.exists(): a daemon that is dead has not said that there is none."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


class Story:
    """Steps with names; `done` are those that have returned."""

    STEPS = ("make", "layout_tp", "write_a", "commit_a", "settle_a", "layout_pp", "settle_pp",
             "write_b", "commit_b", "settle_b", "rules", "unrules", "rubbish", "unrubbish",
             "layout_both", "settle_both", "write_c", "commit_c", "settle_c", "remove_a", "make_other",
             "remove_other")

    def __init__(self, daemon):
        self.mount = daemon
        self.job = mount.Job(daemon, "job")
        self.other = mount.Job(daemon, "other")
        self.done = []

    def run(self):
        for step in self.STEPS:
            if step not in self.done:
                verb, _, what = step.partition("_")
                (getattr(self, step, None) or getattr(self, verb))(*[what] if what else [])
                self.done.append(step)

    @property
    def began(self):
        return self.STEPS[len(self.done)] if len(self.done) < len(self.STEPS) else None

    def make(self, what=""):
        path = self.other.path if what else self.job.path
        if not is_there(path):
            os.mkdir(path)

    @staticmethod
    def text(step):
        return '{"tp": %d, "pp": %d, "dp": 1}\n' % LAYOUTS[step]

    def layout(self, what):
        """Now as a shell writes it, now as an editor does, which renames."""
        path = self.job.file("layout.json")
        new = path if what == "tp" else self.job.file("layout.json.new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(self.text("layout_" + what))
        if new != path:
            os.rename(new, path)

    def settle(self, _):
        self.job.wait()

    def write(self, name):
        if is_there(self.job.checkpoint(name)):
            return
        where = self.job.incoming(name)
        shutil.rmtree(where, ignore_errors=True)
        if name != "c":
            MODELS[name].write_ranks(where, *WRITTEN_IN[name])
            return
        MODELS[name].write_hf(where + "/rank/0", sharded=True)
        models.write_file(where + "/layout.json", '{"tp": 1, "pp": 1, "dp": 1}')
        os.symlink("config.json", where + "/rank/0/link")
        os.unlink(where + "/rank/0/link")
        os.link(where + "/rank/0/config.json", self.job.file("config.json"))

    def commit(self, name):
        if not is_there(self.job.checkpoint(name)):
            self.job.commit(name)
        if name == "c" and is_there(self.job.file("config.json")):
            os.unlink(self.job.file("config.json"))

    def rules(self):
        shutil.copyfile(RULES, self.job.file("rules.json"))

    def unrules(self):
        if is_there(self.job.file("rules.json")):
            os.unlink(self.job.file("rules.json"))

    def rubbish(self):
        where = self.job.incoming("bad")
        shutil.rmtree(where, ignore_errors=True)
        models.write_file(where + "/rank/0/model.safetensors", struct.pack("<Q", 99) + b"{}")
        error = mount.error_of(self.job.commit, "bad")
        if error != "ECANCELED":
            raise OSError(error or "rubbish was committed")
        assert is_there(where), "rubbish that was refused is gone"

    def unrubbish(self):
        shutil.rmtree(self.job.incoming("bad"), ignore_errors=True)
        if is_there(self.job.incoming("bad.error")):
            os.unlink(self.job.incoming("bad.error"))

    def remove(self, what):
        if what == "other":
            if is_there(self.other.path):
                os.rmdir(self.other.path)
        elif is_there(self.job.checkpoint(what)):
            shutil.rmtree(self.job.checkpoint(what))

    def after(self, step):
        return step in self.done

    def check(self, settles=True):
        """What must be so, given what had returned. `settles`: the reshard goes on by itself."""
        job = self.job
        if not is_there(job.path):
            assert not self.after("make"), "the job is gone"
            return
        saved = [step for step in LAYOUTS if self.after(step)]
        text = mount.read_text(job.file("layout.json"))
        allowed = {self.text(saved[-1])} if saved else set()
        if self.began in LAYOUTS:
            allowed.add(self.text(self.began))
        assert text in allowed or not saved and '"tp": 1' in text, f"layout.json is {text!r}"
        rules = "rules.json" in os.listdir(job.path)
        if "rules" not in (self.began, None) and self.began != "unrules":
            wanted = self.after("rules") and not self.after("unrules")
            assert rules == wanted, f"rules.json is {'' if rules else 'not '}there, after {self.done} and before {self.began}"
            assert mount.error_of(os.stat, job.file("rules.json")) == ("" if rules else "ENOENT"), "a list and a look differ"
        if rules and self.after("rules"):
            assert mount.same_bytes(job.file("rules.json"), RULES)
        for name in MODELS:
            self.check_place(name, settles)
        if self.began not in ("make_other", "remove_other"):
            assert is_there(self.other.path) == (
                self.after("make_other") and not self.after("remove_other")), "the other job"
        if settles:
            status = job.wait()
            assert status["layout"] == status["wanted"], status
            if status["checkpoint"]:
                target = os.readlink(job.file("current"))
                assert target == f"checkpoints/{status['checkpoint']}/layouts/{status['layout']}", target
                tp, pp = (int(part[2:]) for part in status["layout"].split("-")[:2])
                check_layout(job, status["checkpoint"], tp, pp)

    def check_place(self, name, restarted):
        """A checkpoint is in incoming/ or committed, and whole. What could be neither committed nor put
        back waits for a restart."""
        job, commit, gone = self.job, "commit_" + name, "remove_" + name
        there = is_there(job.checkpoint(name))
        if self.after(gone):
            assert not there, f"{name} is back"
        elif self.after(commit) and self.began != gone:
            assert there, f"checkpoint {name} is missing"
        elif self.after("write_" + name) and not self.after(commit):
            written = is_there(job.incoming(name))
            if there and written and self.began == commit:  # decided after its mv was answered: the same mv again is told so
                written = os.listdir(job.incoming(name)) != []
            assert not (there and written), f"{name}: in both places"
            assert there or written or not restarted, f"{name}: in neither place"
            tp, pp = WRITTEN_IN[name]
            for rank in range(tp * pp if written and name != "c" else 0):
                check_file(f"{job.incoming(name)}/rank/{rank}/model.safetensors", name, tp, pp, rank)
        if there and (restarted or self.began != gone):  # half a removal hides names for a while
            for layout in {(1, 1), WRITTEN_IN[name], (2, 2)}:
                check_layout(job, name, *layout)

    def clear(self):
        """Removes everything; the store must be empty then."""
        for job in (self.job, self.other):
            shutil.rmtree(job.path, ignore_errors=True)
            if is_there(job.path):
                raise AssertionError(f"{job.path} cannot be removed: {os.listdir(job.path)}")
        for directory in ("images", "jobs"):
            left = os.listdir(os.path.join(self.mount.store, directory))
            assert not left, f"left behind in {directory}: {left}"


def check_file(path, checkpoint, tp, pp, rank):
    assert models.read_safetensors(path) == expected(checkpoint, tp, pp, rank), f"{path}: not what it was"


def check_layout(job, checkpoint, tp, pp):
    for rank in range(tp * pp):
        check_file(job.rank_file(checkpoint, layout_name(tp, pp), rank), checkpoint, tp, pp, rank)
