"""A run whose parallelism changes under way has the loss of one that is never interrupted, and sees every sample once.

    proof.py MOUNT [--out DIR] [--only NAME]      MOUNT: where ptcfs is mounted

The jobs are proof-<story> and proof-<story>-uninterrupted; one that is there already is left alone, and nothing is run.
For each story below elastic.py runs train.py, or megatron_gpt.py, while this edits layout.json and kills processes. Then one process makes
the same steps from the same beginning, without ptcfs but for its samples' order, and both are compared step by step. A
picture of each story is put into DIR. Exit status 1: they differ.
"""
import argparse
import collections
import glob
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
import time

import elastic
import ptc
import train

SAMPLES, LENGTH, SEED = 288, 32, 7
Phase = collections.namedtuple("Phase", "layout batch steps kill", defaults=(False,))


def layout_of(tp=1, pp=1, dp=1, **more):
    return {"format": "ptc-layout/1", "tp": tp, "pp": pp, "dp": dp, "keep": 3, **more}


def fsdp(ranks):
    return layout_of(dp=ranks, optimizer="fsdp")


# What each is allowed to differ by, relatively: 0 where all sums are made in the same order.
STORIES = {
    "replicas-and-stages": (0, [Phase(layout_of(dp=2), 8, 4), Phase(layout_of(dp=4), 8, 4, True),
                                Phase(layout_of(pp=2, dp=2), 4, 4), Phase(layout_of(pp=4), 4, 0)]),
    "tensors": (1e-5, [Phase(layout_of(tp=2, dp=2), 8, 4), Phase(layout_of(dp=4), 8, 4), Phase(layout_of(tp=4), 4, 4, True),
                       Phase(layout_of(pp=2, tp=2), 4, 0)]),
    "daemon": (0, [Phase(layout_of(pp=2, dp=2), 8, 12, "daemon")]),
    # Each rank's state is on its node alone, and once more on another.
    "node": (0, [Phase(layout_of(pp=4, replicas=1, devices=["w0:0", "w0:1", "w1:0", "w2:0"]), 8, 12, "node"),
                 Phase(layout_of(pp=2, dp=2, replicas=1, devices=["w0:0", "w0:1", "w1:0", "w1:1"]), 8, 0)]),
    # Megatron's own model, schedules, distributed optimizer and files.
    "megatron": (1e-5, [Phase(layout_of(tp=2, dp=2), 8, 4), Phase(layout_of(pp=2, dp=2), 8, 4, True), Phase(layout_of(tp=2, pp=2), 4, 0)]),
    "fsdp": (1e-5, [Phase(fsdp(4), 12, 4), Phase(fsdp(2), 12, 4, True), Phase(fsdp(3), 6, 0)]),
}


def write_samples(directory):
    """Sequences that can be learned: steps of a fixed width around a ring."""
    rng = random.Random(SEED)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "samples.jsonl"), "w", encoding="utf-8") as file:
        for number in range(SAMPLES):
            at, step = rng.randrange(97), rng.randrange(1, 5)
            tokens = [(at + place * step) % 97 + 97 * (step - 1) for place in range(LENGTH + 1)]
            file.write(json.dumps({"id": number, "tokens": tokens}) + "\n")


TESTS_ONLY = ("daemon", "node")  # somebody must kill and start what is mounted: tests/clients/test_elastic.py


def write(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def job_path(mount, story):
    return os.path.join(mount, "proof-" + story)


def new_job(path, samples, layout, batch, trainer):
    """A job with a data set, and the state of a trainer of one process. FileExistsError: it is somebody's already."""
    os.mkdir(path)
    job = ptc.Job(path)
    job.set_layout(layout)
    write(job.file("dataset/source.json"), {"shards": samples})
    write(job.file("dataset/order.json"), {"batch": batch, "seed": SEED})
    while not os.path.lexists(job.file("dataset/head")):
        time.sleep(0.05)
    trainer.save(job, layout_of(), 0, 0)
    return job


class Editor:
    """Whoever changes the layout, and the bad luck: after so many steps of each phase."""

    def __init__(self, job, phases, log, kill):
        self.job, self.phases, self.log, self.kill = job, phases, log, kill
        self.at, self.killed = 0, []

    def __call__(self, layout, processes):
        phase = self.phases[self.at]
        steps = {record["step"] for record in read_log(self.log) if record["layout"] == phase.layout}
        if phase.layout != layout or len(steps) < phase.steps:
            return
        if phase.kill and not any(at == self.at for at, _ in self.killed):
            self.killed.append((self.at, max(steps)))
            if phase.kill == "daemon":
                self.kill()
            else:
                processes[-1].kill()
            if phase.kill != "node":
                return
            node = layout["devices"][-1].split(":")[0]
            for process, device in zip(processes, layout["devices"]):
                if device.split(":")[0] == node:
                    process.kill()
            self.kill(node)
            self.at += 1  # without it the layout does not go on, until somebody comes
            threading.Timer(1, self.job.set_layout, (self.phases[self.at].layout, False)).start()
            return
        if self.at + 1 == len(self.phases):
            return
        if phase.kill is True and len(steps) < 2 * phase.steps:
            return  # some more after it
        self.at += 1
        if self.phases[self.at].batch != phase.batch:
            write(self.job.file("order.next.json"), {"batch": self.phases[self.at].batch, "seed": SEED})
        self.job.set_layout(self.phases[self.at].layout, wait=False)


def read_log(log):
    """What all have written, in the order of writing for each; a line that is being written is left out."""
    records = []
    for path in sorted(glob.glob(log + ".*")):
        with open(path, encoding="utf-8") as file:
            records += [{**json.loads(line), "dp": int(path.rsplit(".", 1)[1])} for line in file if line.endswith("}\n")]
    return records


def history(records, phases):
    """step → its record with the ids of the whole batch. Of a step that was made again, what was made last: in the
    layout it had before, but after a node was lost.
    """
    steps, again = {}, 0
    layouts = {}
    for record in records:
        layouts.setdefault(record["step"], []).append(record)
    for step, found in sorted(layouts.items()):
        at = {[phase.layout for phase in phases].index(one["layout"]) for one in found}
        assert len(at) == 1 or phases[min(at)].kill == "node", f"step {step} was made under two layouts"
        losses = {one["loss"] for one in found}
        assert len(losses) == 1, f"step {step} came out differently when it was made again: {losses}"
        last = [one for one in found if one["layout"] == phases[max(at)].layout]
        ids = {one["dp"]: one["ids"] for one in last}
        again += len(found) > len(ids)
        steps[step] = {**last[-1], "ids": sum((ids[dp] for dp in sorted(ids)), [])}
    return steps, again


def uninterrupted(trainer, lines, batches):
    """The losses of one process that makes all steps; the samples are `lines`, in order."""
    samples = train.Samples.of(lines, 1)
    losses = []
    for batch in batches:
        samples.each = batch
        losses.append(trainer.step(samples.step(), batch).item())
    return losses


def tell(name, mount, samples, out, kill=None, mounts=None):
    """Runs a story; returns whether it holds, and prints what was found.

    `kill`: kills ptcfs and starts it again; of a node, kills it, and returns when the others know. `mounts`: those of
    the nodes that devices name; `mount` is that of one that stays.
    """
    allowed, phases = STORIES[name]
    begun = time.monotonic()
    ranks = importlib.import_module("megatron_gpt" if name == "megatron" else "train")
    trainer = ranks.first()
    job = new_job(job_path(mount, name), samples, phases[0].layout, phases[0].batch, trainer)
    log = os.path.join(out, name + ".log")
    editor = Editor(job, phases, log, kill)

    def jobs(layout, rank):
        if layout is None or mounts is None:
            return job
        return ptc.Job(job_path(mounts[layout["devices"][rank].split(":")[0]], name))
    elastic.run(job, log, editor, jobs, ranks)
    steps, again = history(read_log(log), phases)
    seconds = time.monotonic() - begun

    lines = list(train.Samples.read(new_order(mount, name, samples, trainer), 0))
    order = [json.loads(line)["id"] for line in lines]
    seen = sum((steps[step]["ids"] for step in sorted(steps)), [])
    losses = [steps[step]["loss"] for step in sorted(steps)]
    expected = uninterrupted(trainer, lines, [steps[step]["batch"] for step in sorted(steps)])
    differ = [abs(a - b) / abs(b) for a, b in zip(losses, expected)]
    problems = []
    if sorted(seen) != list(range(SAMPLES)):
        problems.append("not every sample was seen exactly once")
    if seen != order:
        problems.append("samples were not seen in the one order")
    if sorted(steps) != list(range(1, len(steps) + 1)):
        problems.append("a step is missing")
    if len({json.dumps(one["layout"]) for one in steps.values()}) != len(phases):
        problems.append("a layout was never used")
    if max(differ) > allowed:
        problems.append(f"the loss differs by {max(differ):.2e}, and {allowed:g} is allowed")
    if not losses[-1] < 0.8 * losses[0]:
        problems.append(f"nothing was learned: {losses[0]} to {losses[-1]}")
    from picture import draw
    with open(os.path.join(out, name + ".svg"), "w", encoding="utf-8") as file:
        file.write(draw(name, [steps[step] for step in sorted(steps)], expected, [step for _, step in editor.killed]))
    print(f"{name}: {len(steps)} steps, {len(phases)} layouts, {len(editor.killed)} killed, {again} steps made again; loss "
          f"{losses[0]:.3f} to {losses[-1]:.3f}, differs by {max(differ):.1e} at most, equal to the last bit in "
          f"{sum(one == 0 for one in differ)} steps; {seconds:.0f} s. " + ("; ".join(problems) or "good"), flush=True)
    return not problems


def has_megatron():
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def tell_apart(name, mount, out):
    """In a process of its own: others should not have what its ranks import."""
    return subprocess.run([sys.executable, __file__, mount, "--out", out, "--only", name], check=False).returncode == 0


def new_order(mount, name, samples, trainer):
    """A job of one rank that reads the same samples with the same seed."""
    return new_job(job_path(mount, name + "-uninterrupted"), samples, layout_of(), 1, trainer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mount")
    parser.add_argument("--out", default="proof")
    parser.add_argument("--only", choices=[name for name in STORIES if name not in TESTS_ONLY])
    options = parser.parse_args()
    out, mount = os.path.abspath(options.out), os.path.abspath(options.mount)
    stories = [name for name in STORIES if name not in TESTS_ONLY and options.only in (None, name)]
    if "megatron" in stories and not has_megatron():
        if options.only is not None:
            sys.exit("proof.py: there is no megatron.core here: pip install megatron-core")
        print("megatron: left out, for there is no megatron.core here (pip install megatron-core)")
        stories.remove("megatron")
    if not os.path.isdir(os.path.join(mount, ".ptc")):
        sys.exit(f"proof.py: {mount} is no mount of ptcfs")
    taken = [path for name in stories for path in (job_path(mount, name), job_path(mount, name + "-uninterrupted"))
             if os.path.lexists(path)]
    if taken:
        sys.exit("proof.py: there is a job of that name already, and it is left alone: ptc rm --force "
                 + " ".join(os.path.basename(path) for path in taken))
    samples = os.path.join(out, "samples")
    write_samples(samples)
    for name in stories:
        for left in glob.glob(glob.escape(os.path.join(out, name)) + ".log*"):
            os.remove(left)
    sys.exit(not all([tell_apart(name, mount, out) if name == "megatron" and len(stories) > 1 else tell(name, mount, samples, out)
                      for name in stories]))


if __name__ == "__main__":
    main()
