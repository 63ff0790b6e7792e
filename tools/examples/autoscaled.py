"""Three training jobs share four devices, and `ptc autoscale` decides who has how many.

    autoscaled.py MOUNT [--out DIR]      MOUNT: where ptcfs is mounted on this machine; `ptc` is found by $PATH

The jobs are autoscaled-a, -b and -c; one that is there already is left alone, and nothing is run. c comes late, whoever
is first ends, and the processes of b are killed. elastic.py and train.py run each job; a device is a process of this
machine. Then one process makes the same steps of each job without ptcfs but for its samples' order, and both are
compared. Exit status 1: they differ.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time

import proof
import ptc
import train

SAMPLES = {"a": 964, "b": 644, "c": 484}  # the last batch is a short one
ALLOWED = 1e-5  # relatively: tensor parallelism cuts sums otherwise
HERE = os.path.dirname(os.path.abspath(__file__))
# What a machine with four devices might show: here they are no faster for being more.
PROFILES = """model,batch,tp,pp,dp,iteration_s
llama,4,1,1,1,0.40
llama,8,1,1,2,0.42
llama,8,2,1,2,0.25
"""


def node_of(mount):
    with open(os.path.join(mount, ".ptc/nodes.json"), encoding="utf-8") as file:
        return json.load(file)["nodes"][0]["name"]


class Cluster:
    def __init__(self, mount, out):
        self.mount, self.out, self.names = mount, out, []
        self.trainer = train.first()
        for name, proof.SAMPLES in SAMPLES.items():
            proof.write_samples(self.samples(name))
        with open(os.path.join(out, "profiles.csv"), "w", encoding="utf-8") as file:
            file.write(PROFILES)

    def path(self, name):
        return os.path.join(self.mount, "autoscaled-" + name)

    def samples(self, name):
        return os.path.join(self.out, "samples-" + name)

    def log(self, name):
        return os.path.join(self.out, name + ".log")

    def add(self, *names):
        """Jobs with a first state and a data set, and jobs.json with them."""
        for name in names:
            proof.new_job(self.path(name), self.samples(name), proof.layout_of(), 4, self.trainer)
        self.names += names
        jobs = [{"name": "autoscaled-" + name, "model": "llama", "samples": SAMPLES[name], "batch": [4, 8],
                 "run": {"command": [sys.executable, os.path.join(HERE, "elastic.py"), self.path(name), self.log(name)],
                         "stops_within": 60}} for name in self.names]
        written = os.path.join(self.out, "jobs.json.new")
        proof.write(written, {"cluster": {"nodes": {node_of(self.mount): 4}}, "profiles": "profiles.csv", "jobs": jobs})
        os.replace(written, os.path.join(self.out, "jobs.json"))

    def record(self, name):
        """What the autoscaler has done with it."""
        try:
            with open(os.path.join(self.path(name), "autoscale.json"), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return {"changes": 0}

    def steps(self, name):
        """step → its record, with the ids of the whole batch: of a step that was made again, what was made last."""
        found = {}
        for record in proof.read_log(self.log(name)):  # in the order of writing for each data-parallel rank
            found.setdefault(record["step"], []).append(record)
        steps = {}
        for step, records in sorted(found.items()):
            last = [one for one in records if one["dp"] == 0][-1]
            parts = {one["dp"]: one for one in records if (one["layout"], one["batch"]) == (last["layout"], last["batch"])}
            steps[step] = {**last, "ids": sum((parts[dp]["ids"] for dp in range(last["layout"]["dp"])), [])}
        return steps

    def made(self, name):
        """How many steps so far."""
        return sum(record["dp"] == 0 for record in proof.read_log(self.log(name)))

    def run(self):
        """The story; the exit status of ptc autoscale."""
        self.add("a", "b")
        autoscale = subprocess.Popen(["ptc", "-C", self.mount, "autoscale", os.path.join(self.out, "jobs.json"), "--until-done",
                                      "--logs", self.out, "--price", "1", "--every", "5"])
        try:
            self.until(autoscale, lambda: min(self.made("a"), self.made("b")) >= 3)
            self.add("c")
            self.until(autoscale, lambda: self.record("c")["changes"] > 0)
            self.until(autoscale, lambda: self.record("b").get("state") == "runs")
            os.kill(self.record("b")["pid"], signal.SIGKILL)
            return autoscale.wait()
        except BaseException:
            autoscale.kill()
            autoscale.wait()
            raise
        finally:
            for name in self.names:
                if self.goes_on(name):
                    os.killpg(self.record(name)["pid"], signal.SIGKILL)

    def changed(self, name):
        """How many times its layout, and how many times its batch, was another one than before; first was what it began with."""
        before, layouts, batches = (proof.layout_of(), 4), 0, 0
        for _, step in sorted(self.steps(name).items()):
            layouts += any(step["layout"][size] != before[0][size] for size in ("tp", "pp", "dp"))
            batches += step["batch"] != before[1]
            before = (step["layout"], step["batch"])
        return layouts, batches

    def goes_on(self, name):
        return self.record(name).get("pid") is not None

    @staticmethod
    def until(autoscale, is_so):
        while not is_so() and autoscale.poll() is None:
            time.sleep(0.1)

    def compare(self, name):
        """Prints what was found; whether it holds."""
        steps = self.steps(name)
        order = proof.new_job(self.path(name + "-order"), self.samples(name), proof.layout_of(), 1, self.trainer)
        lines = list(train.Samples.read(order, 0))
        made = [steps[step] for step in sorted(steps)]
        expected = proof.uninterrupted(train.first(), lines, [step["batch"] for step in made])
        differ = [abs(step["loss"] - loss) / abs(loss) for step, loss in zip(made, expected)]
        ways = len({(json.dumps(step["layout"]), step["batch"]) for step in made})
        problems = []
        if sum((step["ids"] for step in made), []) != [json.loads(line)["id"] for line in lines]:
            problems.append("not every sample was seen exactly once, in the one order")
        if sorted(steps) != list(range(1, len(steps) + 1)):
            problems.append("a step is missing")
        if max(differ) > ALLOWED:
            problems.append(f"the loss differs by {max(differ):.2e}, and {ALLOWED:g} is allowed")
        print(f"{name}: {len(made)} steps in {ways} layouts and batches, started {self.record(name)['changes']} times; loss "
              f"{made[0]['loss']:.3f} to {made[-1]['loss']:.3f}, differs by {max(differ):.1e} at most. "
              + ("; ".join(problems) or "good"), flush=True)
        return not problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mount")
    parser.add_argument("--out", default="autoscaled")
    options = parser.parse_args()
    out, mount = os.path.abspath(options.out), os.path.abspath(options.mount)
    if not os.path.isdir(os.path.join(mount, ".ptc")):
        sys.exit(f"autoscaled.py: {mount} is no mount of ptcfs")
    os.makedirs(out, exist_ok=True)
    cluster = Cluster(mount, out)
    taken = [name for one in "abc" for name in (one, one + "-order") if os.path.lexists(cluster.path(name))]
    if taken:
        sys.exit("autoscaled.py: there is a job of that name already, and it is left alone: ptc rm --force "
                 + " ".join("autoscaled-" + name for name in taken))
    for name in "abc":
        for left in [path for path in os.listdir(out) if path.startswith(name + ".log")]:
            os.remove(os.path.join(out, left))
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(os.path.dirname(ptc.__file__)), os.environ.get("PYTHONPATH", "")])
    begun = time.monotonic()
    status = cluster.run()
    if status != 0:
        sys.exit(f"autoscaled.py: ptc autoscale ended with {status}")
    found = [cluster.compare(name) for name in cluster.names]
    layouts, batches = (sum(all_of) for all_of in zip(*map(cluster.changed, cluster.names)))
    print(f"{layouts} changes of layout and {batches} of batch in {time.monotonic() - begun:.0f} s")
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
