"""ptc simulate: the claims of "Effective Elastic Scaling of Deep Learning Workloads", on times that Pollux's authors measured.

    tests/bench/elastic.py [--seeds N] [--gpus N] [--parts LIST] [--ptc PROGRAM]

Jobs of five models that take 20 to 60 minutes on one GPU come to 10 nodes with 4 T4s each. Beside the autoscaler, which chooses
GPUs and batch, stand the same optimiser with a batch that stays: the largest, the smallest, one that is drawn, the largest with
accumulated gradients. Of each: its mean time from arrival to end, divided by the autoscaler's; and the autoscaler's jobs that
ended within the window, divided by its. A decision each minute, 30 s a change and a start.

Parts, with commas between them: grid (load, horizon, whether jobs wait or go), prices (what pricing changes wins), classes (of
jobs), lengths (of jobs), gpus (400 instead of 40, one seed).
"""
import argparse
import csv
import json
import os
import subprocess
import tempfile

from goals import verdict

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "pollux")
# As far as Pollux let them grow; of BERT as far as 16 GPUs hold.
BATCHES = {"bert": [12, 192], "cifar10": [128, 4096], "deepspeech2": [20, 640], "imagenet": [200, 12800], "yolov3": [8, 512]}
OTHERS = ("max-batch", "min-batch", "random-batch", "max-batch+accumulation")
PARTS = ("grid", "prices", "classes", "lengths", "gpus")
USUAL_GPUS = 40
LOADS = {"low, 30 an hour": ((), 30), "45 an hour": ((), 45), "high, 60 an hour": ((), 60),
         "bursts, 50 an hour": (("--arrivals", "bursty"), 50), "75 an hour": ((), 75)}  # per hour on 40 GPUs
ARRIVALS = ("low", "high", "bursty", "extreme")  # half of what the cluster would bear, all, all in a quarter of the time, twice as much
# By the part of a step on 16 GPUs that goes into exchanging gradients, which is printed beside.
CLASSES = {"compute bound": (["imagenet"], "20-60"), "balanced": (["cifar10", "deepspeech2"], "20-60"),
           "communication bound": (["bert", "yolov3"], "20-60"), "long": (list(BATCHES), "180-360")}
LENGTHS = {"5 to 15 min": "5-15", "20 to 60 min": "20-60", "1 to 3 h": "60-180"}


def exchanging(model, gpus=16):
    """Of a step with the batch that is fastest there."""
    with open(f"{DATA}/{model}/placements.csv", encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["placement"] == "4" * (gpus // 4)]
    least, most = BATCHES[model]
    rows = [row for row in rows if least <= int(row["local_bsz"]) * gpus <= most]
    fastest = max(rows, key=lambda row: int(row["local_bsz"]) / float(row["step_time"]))
    return float(fastest["sync_time"]) / float(fastest["step_time"])


class Bench:
    def __init__(self, ptc, directory, seeds):
        self.program, self.at, self.seeds = ptc, directory, seeds
        self.profiles = os.path.join(directory, "t4.csv")
        self.ptc("profile", "import", "pollux", *(f"{DATA}/{model}/placements.csv" for model in BATCHES), "-o", self.profiles)

    def ptc(self, *words):
        return subprocess.run([self.program, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout

    def simulate(self, policies, *words, gpus=USUAL_GPUS, models=tuple(BATCHES), seeds=None):
        jobs = os.path.join(self.at, "jobs.json")
        with open(jobs, "w", encoding="ascii") as file:
            json.dump({"cluster": {"nodes": [4] * (gpus // 4)}, "profiles": self.profiles,
                       "jobs": [{"name": model, "model": model, "samples": 1, "batch": BATCHES[model]} for model in models]}, file)
        return json.loads(self.ptc("simulate", jobs, "--policy", ",".join(policies), "--seeds", seeds or self.seeds, *words, "--json"))

    def line(self, title, *words, **how):
        """Prints it; of each of the others how its time and its jobs compare with ours."""
        of = self.simulate(("elastic", *OTHERS), *words, **how)
        ours, found = of["elastic"], {}
        for name in OTHERS:
            found[name] = (of[name]["mean_completion_s"] / ours["mean_completion_s"],
                           ours["done_in_window"] / max(of[name]["done_in_window"], 1))
        print(f"{title:48}" + "".join(f"{time:14.2f} x / {done:5.2f} x" for time, done in found.values())
              + f"{ours['changes'] / max(ours['jobs'], 1):14.1f}", flush=True)
        return found


def loads(gpus):
    for load, (words, per_hour) in LOADS.items():
        yield load, (*words, "--per-hour", per_hour * gpus / USUAL_GPUS)


def grid(bench, gpus):
    best = {"jobs": (0, "nowhere"), "time": (0, "nowhere")}
    for mode, flags in (("queue", ()), ("drop", ("--drop",))):
        for load, words in loads(gpus):
            for hours in (8, 24):
                where = f"{mode}, {load}, {hours} h"
                time, done = bench.line(where, *words, "--hours", hours, *flags, gpus=gpus)["max-batch"]
                best["jobs"] = max(best["jobs"], (done, where))
                best["time"] = max(best["time"], (time, where))
    reason = "the largest batch keeps up in all of the grid: its queue grows only where the load is near what it can bear, and with time"
    for what, goal in (("jobs", 1.8), ("time", 10)):
        value, where = best[what]
        print(f"most against max batch, {what}: {where}: {verdict(value, goal, reason, at_least=True)}")


def prices(bench, gpus):
    print("\nmean time where changes have a price in what is decided, ÷ where they have none")
    for price in (5, 30, 260):
        cells, most = [], 0
        for load, words in loads(gpus):
            of = bench.simulate(("elastic", "elastic+unpriced"), *words, "--price", price, gpus=gpus)
            ratio = of["elastic"]["mean_completion_s"] / of["elastic+unpriced"]["mean_completion_s"]
            cells.append(f"{load} {ratio:.2f}")
            most = max(most, ratio)
        print(f"{price:5} s a change: " + ", ".join(cells) + "; at most "
              + verdict(most, 1, "a change is weighed by what its own job wins, not by who waits behind it"), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=USUAL_GPUS, help="of all parts but the last, four a node")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ptc", default=os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc"))
    arguments = parser.parse_args()
    parts, gpus = arguments.parts.split(","), arguments.gpus
    for part in parts:
        if part not in PARTS:
            parser.error(f"there is no part '{part}'; there are {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(arguments.ptc, directory, arguments.seeds)
        print(f"{f'{gpus} GPUs':48}" + "".join(f"{name:>24}" for name in OTHERS) + "   elastic's changes a job")
        if "grid" in parts:
            grid(bench, gpus)
        if "prices" in parts:
            prices(bench, gpus)
        if "classes" in parts:
            print("\nby class (queue, 8 h); beside it the part of a step on 16 GPUs in which gradients are exchanged")
            for name, (models, minutes) in CLASSES.items():
                parts_of_steps = [exchanging(model) for model in models]
                for arrivals in ARRIVALS:
                    bench.line(f"{name} ({min(parts_of_steps):.0%} to {max(parts_of_steps):.0%}), {arrivals}", "--arrivals", arrivals,
                               "--minutes", minutes, gpus=gpus, models=models)
        if "lengths" in parts:
            print("\nby length on one GPU (queue, 8 h)")
            for name, minutes in LENGTHS.items():
                for arrivals in ARRIVALS:
                    bench.line(f"{name}, {arrivals}", "--arrivals", arrivals, "--minutes", minutes, gpus=gpus)
        if "gpus" in parts:
            print("\n400 GPUs (8 h, one seed)")
            for mode, flags in (("queue", ()), ("drop", ("--drop",))):
                for arrivals in ARRIVALS:
                    bench.line(f"{mode}, {arrivals}", "--arrivals", arrivals, *flags, gpus=400, seeds=1)


if __name__ == "__main__":
    main()
