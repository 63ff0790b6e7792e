"""kill -9 just before the N-th call that changes a file, for N spread over a whole story.

The story: make a job, save a layout, write a checkpoint, commit, reshard, write and commit another,
reshard again, remove the first. Wherever the daemon dies, after a start:
  * every step that had returned is still so; the step that was cut off happened wholly or not at all;
  * what is readable is what the writer wrote, under the layout in force and under its own;
  * the story can be told to its end;
  * when all is removed, the store holds nothing.

PTC_KILL_POINTS=40     how many points (or "all")
PTC_KILL_ONLY=117      one point
"""
import os
import shutil
import struct
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
import models  # noqa: E402
import mount   # noqa: E402

MODEL = models.Llama()


class Story:
    """Steps with names; `done` are those that have returned."""

    def __init__(self, daemon):
        self.mount = daemon
        self.job = mount.Job(daemon, "job")
        self.done = []

    STEPS = ("make", "layout2", "write_a", "commit_a", "layout_pp", "settle", "write_b", "commit_b",
             "settle_b", "layout_both", "settle_both", "remove_a")
    LAYOUTS = {"layout2": (2, 1), "layout_pp": (1, 2), "layout_both": (2, 2)}

    def run(self):
        for step in self.STEPS:
            if step not in self.done:
                getattr(self, step)()
                self.done.append(step)

    def make(self):
        if not os.path.isdir(self.job.path):
            os.mkdir(self.job.path)

    def save(self, step):
        with open(self.job.file("layout.json"), "w", encoding="utf-8") as file:
            file.write(self.text(step))

    @classmethod
    def text(cls, step):
        return '{"tp": %d, "pp": %d, "dp": 1}\n' % cls.LAYOUTS[step]

    def layout2(self):
        self.save("layout2")
        self.job.wait()

    def layout_pp(self):
        self.save("layout_pp")

    def layout_both(self):
        self.save("layout_both")

    def settle(self):
        self.job.wait()

    settle_b = settle_both = settle

    def write(self, name):
        if os.path.isdir(self.job.checkpoint(name)):
            return
        tp, pp = self.LAYOUTS["layout2"] if name == "a" else self.LAYOUTS["layout_pp"]
        shutil.rmtree(self.job.incoming(name), ignore_errors=True)
        MODEL.write_ranks(self.job.incoming(name), tp, pp)

    def write_a(self):
        self.write("a")

    def write_b(self):
        self.write("b")

    def commit(self, name):
        if not os.path.isdir(self.job.checkpoint(name)):
            self.job.commit(name)

    def commit_a(self):
        self.commit("a")

    def commit_b(self):
        self.commit("b")

    def remove_a(self):
        if os.path.isdir(self.job.checkpoint("a")):
            shutil.rmtree(self.job.checkpoint("a"))


def check_layout(job, checkpoint, tp, pp):
    for rank in range(tp * pp):
        path = job.rank_file(checkpoint, f"tp{tp}-pp{pp}-dp1", rank)
        found = models.read_safetensors(path)
        held = {t.name: t for t in MODEL.rank_tensors(tp, pp, rank % tp, rank // tp)}
        assert set(found) == set(held), f"{path}: other tensors"
        for name, tensor in held.items():
            assert found[name] == tensor, f"{path}: {name}"


def check(story):
    """After the restart: what must be so, given what had returned."""
    job, done = story.job, story.done
    began = Story.STEPS[len(done)] if len(done) < len(Story.STEPS) else None
    if "make" not in done and not os.path.isdir(job.path):
        return
    assert os.path.isdir(job.path)
    saved = [step for step in Story.LAYOUTS if step in done]
    text = mount.read_text(job.file("layout.json"))
    allowed = {story.text(saved[-1]) if saved else None}
    if began in Story.LAYOUTS:
        allowed.add(story.text(began))
    assert text in allowed or (not saved and "tp" in text), f"layout.json is {text!r}"

    for name, commit, gone in (("a", "commit_a", "remove_a"), ("b", "commit_b", None)):
        there = os.path.isdir(job.checkpoint(name))
        if gone in done:
            assert not there, f"{name} is back"
        elif commit in done and began != gone:
            assert there, f"checkpoint {name} is missing"
        elif f"write_{name}" in done and commit not in done:
            assert there != os.path.isdir(job.incoming(name)), f"{name}: in both places or in none"
            if not there:
                layout = Story.LAYOUTS["layout2" if name == "a" else "layout_pp"]
                for rank in range(layout[0] * layout[1]):
                    assert os.path.exists(f"{job.incoming(name)}/rank/{rank}/model.safetensors")
        if there:
            for layout in ((1, 1), (2, 1), (1, 2)):
                check_layout(job, name, *layout)
    status = job.wait()
    assert status["layout"] == status["wanted"], status
    if status["checkpoint"]:
        target = os.readlink(job.file("current"))
        assert target == f"checkpoints/{status['checkpoint']}/layouts/{status['layout']}", target
        sizes = {tuple(int(part[2:]) for part in status["layout"].split("-"))[:2]}
        for tp, pp in sizes:
            check_layout(job, status["checkpoint"], tp, pp)


def clear(story):
    """Removes everything; the store must be empty then."""
    job = story.job
    for name in os.listdir(job.file("checkpoints")):
        shutil.rmtree(job.checkpoint(name))
    shutil.rmtree(job.path)
    images = os.listdir(os.path.join(story.mount.store, "images"))
    assert not images, f"left behind: {images}"
    assert not os.listdir(os.path.join(story.mount.store, "jobs"))


def tell(kill_at, count_path):
    """The story with a kill; returns how many calls were made before the end of its first part."""
    with open(count_path, "wb") as file:
        file.write(struct.pack("<Q", 0))
    preload = os.path.join(mount.bin_dir(), "kill_at.so")
    environment = {"LD_PRELOAD": preload, "PTC_KILL_AT": str(kill_at),
                   "PTC_KILL_COUNT": count_path}
    daemon = mount.Mount()
    story = Story(daemon)
    try:
        os.environ.update(environment)
        died = False
        try:
            daemon.start()
        except RuntimeError:
            assert kill_at, "ptcfs does not start"
            died = True
        finally:
            for name in environment:
                del os.environ[name]
        try:
            if not died:
                story.run()
        except OSError as error:
            died = True
            for _ in range(200):  # a kill shows as an error of some call, a moment before wait()
                if daemon.process.poll() is not None:
                    break
                time.sleep(0.01)
            if daemon.process.poll() is None:
                raise AssertionError(f"{story.done}: {error}, but the daemon lives") from error
        if kill_at and not died and daemon.process.poll() is None:
            daemon.process.kill()
        daemon.stop(kill=True)
        daemon.start()
        check(story)
        story.run()
        check(story)
        clear(story)
    except BaseException:
        sys.stderr.write(f"PTC_KILL_ONLY={kill_at}, after {story.done}\n")
        sys.stderr.write(mount.read_text(daemon.log))
        raise
    finally:
        daemon.stop(kill=True)
        shutil.rmtree(daemon.top, ignore_errors=True)
    with open(count_path, "rb") as file:
        return struct.unpack("<Q", file.read(8))[0], story.done


def main():
    count_path = os.path.join("/tmp", f"ptcfs-kill-count-{os.getpid()}")
    try:
        only = os.environ.get("PTC_KILL_ONLY")
        if only:
            tell(int(only), count_path)
            print(f"point {only}: well")
            return
        total, _ = tell(0, count_path)
        wanted = os.environ.get("PTC_KILL_POINTS", "40")
        number = total if wanted == "all" else min(total, int(wanted))
        points = sorted({1 + i * (total - 1) // max(1, number - 1) for i in range(number)})
        print(f"{total} calls that change files in the story, {len(points)} kill points", flush=True)
        for point in points:
            tell(point, count_path)
        print(f"{len(points)} kills survived")
    finally:
        if os.path.exists(count_path):
            os.unlink(count_path)


if __name__ == "__main__":
    main()
