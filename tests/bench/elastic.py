"""ptc simulate: the claims of "Effective Elastic Scaling of Deep Learning Workloads", on times that Pollux's authors measured.

    tests/bench/elastic.py [--seeds N] [--ptc PROGRAM]

Jobs of five models that take 20 to 60 minutes on one GPU come to 10 nodes with 4 T4s each. Beside the autoscaler, which chooses
GPUs and batch, stand the same optimiser with a batch that stays: the largest, the smallest, one that is drawn, the largest with
accumulated gradients. Of each: its mean time from arrival to end, divided by the autoscaler's; and the autoscaler's jobs that
ended within the window, divided by its. A decision each minute, 30 s a change and a start.
"""
import argparse
import json
import os
import subprocess
import tempfile

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "pollux")
# As far as Pollux let them grow; of BERT as far as 16 GPUs hold.
BATCHES = {"bert": [12, 192], "cifar10": [128, 4096], "deepspeech2": [20, 640], "imagenet": [200, 12800], "yolov3": [8, 512]}
OTHERS = ("max-batch", "min-batch", "random-batch", "max-batch+accumulation")
LOADS = {"low, 30 an hour": ("--per-hour", 30), "45 an hour": ("--per-hour", 45), "high, 60 an hour": ("--per-hour", 60),
         "bursts, 50 an hour": ("--arrivals", "bursty", "--per-hour", 50), "extreme, 75 an hour": ("--per-hour", 75)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ptc", default=os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        def run(*words):
            return subprocess.run([arguments.ptc, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout

        profiles = os.path.join(directory, "t4.csv")
        run("profile", "import", "pollux", *(f"{DATA}/{model}/placements.csv" for model in BATCHES), "-o", profiles)
        jobs = os.path.join(directory, "jobs.json")
        with open(jobs, "w", encoding="ascii") as file:
            json.dump({"cluster": {"nodes": [4] * 10}, "profiles": profiles,
                       "jobs": [{"name": model, "model": model, "samples": 1, "batch": batch}
                                for model, batch in BATCHES.items()]}, file)
        best = {"jobs": (0, ""), "time": (0, "")}
        print(f"{'':9}{'':20}{'':6}" + "".join(f"{name:>24}" for name in OTHERS) + "   elastic's changes a job")
        for mode, flags in (("queue", ()), ("drop", ("--drop",))):
            for load, words in LOADS.items():
                for hours in (8, 24):
                    of = json.loads(run("simulate", jobs, "--policy", ",".join(("elastic", *OTHERS)), *words, "--hours", hours,
                                        "--seeds", arguments.seeds, *flags, "--json"))
                    ours, cells = of["elastic"], ""
                    for name in OTHERS:
                        time = of[name]["mean_completion_s"] / ours["mean_completion_s"]
                        done = ours["done_in_window"] / max(of[name]["done_in_window"], 1)
                        cells += f"{time:14.2f} x / {done:5.2f} x"
                        if name == "max-batch":
                            where = f"{mode}, {load}, {hours} h"
                            best["jobs"] = max(best["jobs"], (done, where))
                            best["time"] = max(best["time"], (time, where))
                    print(f"{mode:9}{load:20}{hours:4} h{cells}{ours['changes'] / ours['jobs']:14.1f}")
        print("\nmean time where changes have a price in what is decided, ÷ where they have none (goal: never above 1)")
        for price in (5, 30, 260):
            cells = []
            for load, words in LOADS.items():
                of = json.loads(run("simulate", jobs, "--policy", "elastic,elastic+unpriced", *words, "--price", price,
                                    "--seeds", arguments.seeds, "--json"))
                cells.append(f"{load} {of['elastic']['mean_completion_s'] / of['elastic+unpriced']['mean_completion_s']:.2f}")
            print(f"{price:5} s a change: " + ", ".join(cells))
        print(f"\nmost against max batch: {best['jobs'][0]:.2f} x the jobs ({best['jobs'][1]}; goal: 1.8), "
              f"{best['time'][0]:.1f} x the time ({best['time'][1]}; goal: 10)")


if __name__ == "__main__":
    main()
