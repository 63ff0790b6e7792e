"""ptc spase plan beside what others do with the same tasks: Saturn's claim, on profiles that others have published.

    tests/bench/planner.py [--time S] [--longest S] [--seed N] [--seeds N] [--parts LIST] [--ptc PROGRAM]

Parts, with commas between them:
plans: twelve jobs (models × batches or lengths × learning rates) on 8 GPUs, 4 × 8, and nodes of 2, 2, 4 and 8; beside them on 2 × 8,
and nodes of 8 and 4. Of each: the makespan divided by that of current practice, by the best baseline's, and by the lower bound; which
part of the reduction below current practice that the bound allows was reached; and which part of all it would be to profile first,
where each trial takes 72 s, as Saturn's do, side by side. Then by the number of jobs, by model, and by the number of nodes.
quality: how good an answer is by the time it took, on one core.
deciding: what `ptc autoscale` takes to decide for 400 jobs on 400 GPUs, divided by the shortest change that is counted with, 5 s.
introspection: in simulated time, where jobs take from 2/3 to 3/2 of what their profiles say (or 1/2 to 2): what allocation, technique and
introspection each bring, and introspection by its interval and threshold. Seeds are --seed and those after it.

A goal that is missed has its reason behind it.
"""
import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import tempfile
import time

from goals import verdict

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "data")
CLUSTERS = {"8": [8], "4x8": [8] * 4, "2,2,4,8": [2, 2, 4, 8]}
OF_END_TO_END = {"2x8": [8] * 2, "8,4": [8, 4]}  # of the paper's runs; its claims here are of the others
PARTS = ("plans", "quality", "deciding", "introspection")
SIX = ["vit", "bert", "roberta", "t5", "gpt2", "llama7"]  # by their parameters
TRIAL_S = 72
SHORTEST_CHANGE_S = 5
T4_BATCHES = {"bert": [12, 192], "cifar10": [128, 4096], "deepspeech2": [20, 640], "imagenet": [200, 12800], "yolov3": [8, 512]}
THRESHOLDS = (0, 500, 2000)


def spase(ptc, what, directory, nodes, profiles, jobs, *options):
    path = os.path.join(directory, "jobs.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"cluster": {"nodes": nodes}, "profiles": profiles, "jobs": jobs}, file)
    return json.loads(subprocess.run([ptc, "spase", what, path, "--json", *map(str, options)], check=True,
                                     stdout=subprocess.PIPE, text=True).stdout)


def plan(ptc, *rest):
    return spase(ptc, "plan", *rest)


def profile(ptc, directory, kind, paths):
    target = os.path.join(directory, kind + ".csv")
    subprocess.run([ptc, "profile", "import", kind, *paths, "-o", target], check=True, stdout=subprocess.DEVNULL)
    return target


def rates(ptc, path, model):
    """Samples a second of one GPU, or of the fewest there are."""
    shown = subprocess.run([ptc, "profile", "show", path, model], check=True, capture_output=True, text=True).stdout
    first = shown.splitlines()[1].split()
    return float(first[2]) / int(first[1])


def twelve(ptc, path, models, batches=(), count=12):
    """Each model twelve/len times, 2 to 20 hours on one GPU, as by batch, and alike for learning rates."""
    jobs, kinds = [], [(model, batch) for model in models for batch in batches] if batches else [(m, 0) for m in models]
    for number in range(count):
        model, batch = kinds[number % len(kinds)]
        hours = 2 + 18 * (number % 4) / 3
        job = {"name": f"{model}-{number}", "model": model, "samples": rates(ptc, path, model) * 3600 * hours}
        jobs.append(job | ({"batch": batch} if batch else {}))
    return jobs


def with_practice(path, jobs):
    """As their users would train them: ZeRO where it was measured."""
    with open(path, encoding="utf-8") as file:
        known = {(row["model"], row["technique"]) for row in csv.DictReader(file) if row["iteration_s"] not in ("oom", "")}
    return [job | ({"technique": "zero-dp"} if (job["model"], "zero-dp") in known else {}) for job in jobs]


def profiling_s(path, jobs, nodes):
    """What trials of all of it take that one node has room for, side by side; jobs that differ in length alone share them."""
    wanted = {(job["model"], job.get("batch")) for job in jobs}
    trials = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus = int(row["tp"]) * int(row["pp"]) * int(row["dp"])
            if gpus <= max(nodes) and ((row["model"], None) in wanted or (row["model"], int(row["batch"])) in wanted):
                trials[tuple(row[key] for key in ("model", "technique", "batch", "tp", "pp", "dp"))] = gpus
    return max(TRIAL_S, TRIAL_S * sum(trials.values()) / sum(nodes))


@contextlib.contextmanager
def one_core():
    """For what is started within, too."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rehearsed(arguments, directory, nodes, path, jobs, *options):
    """step → makespans, by seed; and all that was told."""
    told = [spase(arguments.ptc, "rehearse", directory, nodes, path, jobs, "--steps", 20_000, "--seed", seed, *options)
            for seed in range(arguments.seed, arguments.seed + arguments.seeds)]
    return {step: [one[step]["makespan_s"] for one in told] for step in told[0]}, told


def mean_ratio(over, under):
    return statistics.mean(a / b for a, b in zip(over, under))


def introspection(arguments, directory, sets):
    last = arguments.seed + arguments.seeds - 1
    print(f"\nin simulated time, seeds {arguments.seed} to {last}, ÷ current practice; a change costs 30 s")
    print("profiles            cluster   deviation  + allocation  + technique  + introspection  all known before  "
          "optimus, dynamic  ÷ without  changes")
    gains = []
    for name, (path, jobs) in sets.items():
        for cluster, nodes in CLUSTERS.items():
            for deviation in (0.5, 1):
                took, told = rehearsed(arguments, directory, nodes, path, with_practice(path, jobs), "--deviation", deviation)
                gain = mean_ratio(took["+ introspection"], took["+ technique"])
                gains.append(gain)
                steps = ("+ allocation", "+ technique", "+ introspection", "all known before", "optimus, dynamic")
                ratios = [mean_ratio(took[step], took["current practice"]) for step in steps]
                changes = statistics.mean(one["+ introspection"]["changes"] for one in told)
                print(f"{name:19} {cluster:9} {deviation:9}  {ratios[0]:12.2f}  {ratios[1]:11.2f}  {ratios[2]:15.2f}  "
                      f"{ratios[3]:16.2f}  {ratios[4]:16.2f}  {gain:9.3f}  {changes:7.1f}")
    reason = "what is drawn comes after what was decided, and a task that has not run is taken at its profile's word"
    print(f"introspection ÷ without it: in the median {verdict(statistics.median(gains), 0.95, reason, form='.3f')}, at most "
          f"{verdict(max(gains), 1, reason, form='.3f')}")
    name, cluster = "six models (A800)", "4x8"
    path, jobs = sets[name]
    print(f"\n{name}, {cluster}, deviation 1: ÷ without introspection (changes), by interval and threshold")
    print("interval   what it costs" + "".join(f"{threshold:>9} s     " for threshold in THRESHOLDS))
    for interval in (250, 1000, 4000, 16000):
        cells = []
        for threshold in (None, *THRESHOLDS):
            took, told = rehearsed(arguments, directory, CLUSTERS[cluster], path, jobs, "--deviation", 1, "--interval", interval,
                                   *(() if threshold is None else ("--threshold", threshold)))
            changes = statistics.mean(one["+ introspection"]["changes"] for one in told)
            cells.append(f"{mean_ratio(took['+ introspection'], took['+ technique']):8.3f} ({changes:4.1f})")
        print(f"{interval:6} s   " + " ".join(cells), flush=True)


def plan_line(arguments, directory, name, cluster, nodes, path, jobs):
    """Prints how good the plan is. ÷ the best baseline; the part of what the bound allows; what says the bound."""
    got = plan(arguments.ptc, directory, nodes, path, jobs, "--time", arguments.time)
    took, bound, others = got["makespan_s"], got["lower_bound_s"], got["instead_s"]
    practice, anew = others["current practice"], others.pop("optimus, dynamic", float("nan"))
    part = (practice - took) / (practice - bound) if practice > bound else 1
    first = profiling_s(path, jobs, nodes)
    print(f"{name:19} {cluster:9} {took / practice:9.2f}  {took / min(others.values()):11.2f} {took / bound:10.3f}  {part:12.1%}"
          f"  {took / anew:13.2f}  {first / (first + took):12.1%}", flush=True)
    return took / min(others.values()), part, got["lower_bound_by"]


def plans(arguments, directory, sets):
    titles = ("profiles            cluster   ÷ practice  ÷ best other  ÷ bound  of what it allows  ÷ optimus, for nothing  "
              "to profile first")
    print(titles)
    worst, reached, bounds = [], {}, set()
    for name, (path, jobs) in sets.items():
        for cluster, nodes in (CLUSTERS | OF_END_TO_END).items():
            ratio, part, bound_by = plan_line(arguments, directory, name, cluster, nodes, path, jobs)
            if cluster in CLUSTERS:
                worst.append(ratio)
                reached[f"{name}, {cluster}"] = part
                bounds.add(bound_by)
    least = min(reached, key=reached.get)
    reason = f"no schedule need reach the bound, which is of {' or '.join(sorted(bounds))}; least: {least}"
    print(f"÷ the best baseline: at most {verdict(max(worst), 1, 'the search begins with it, and ends with something else')}")
    print("of the reduction that the bound allows, without those of nodes 2x8 and 8,4: in the median "
          f"{verdict(statistics.median(reached.values()), 0.93, reason, at_least=True, form='.1%')}, at least "
          f"{verdict(reached[least], 0.8, reason, at_least=True, form='.1%')}")
    path = sets["six models (A800)"][0]
    print("\nby the number of jobs, by model (by parameters), and by the number of nodes\n" + titles)
    for count in (6, 12, 24, 48):
        plan_line(arguments, directory, f"{count} jobs", "4x8", [8] * 4, path, twelve(arguments.ptc, path, SIX, count=count))
    for model in SIX:
        plan_line(arguments, directory, f"12 x {model}", "4x8", [8] * 4, path, twelve(arguments.ptc, path, [model]))
    for nodes in (1, 2, 4, 8):
        plan_line(arguments, directory, "12 jobs", f"{nodes}x8", [8] * nodes, path, twelve(arguments.ptc, path, SIX))


def quality(arguments, directory, sets):
    path, jobs = sets["six models (A800)"]
    longest = arguments.longest
    with one_core():
        print(f"\n12 jobs, six models, 4x8, one core: by time, ÷ the answer of {longest:g} s")
        times = {seconds: plan(arguments.ptc, directory, [8] * 4, path, jobs, "--time", seconds)["makespan_s"]
                 for seconds in (0.01, 0.1, 1, longest)}
        for seconds, makespan in times.items():
            ratio = makespan / times[longest]
            shown = verdict(ratio, 1.01, "a start that the search came to later was better", form=".4f") if seconds == 1 else f"{ratio:.4f}"
            print(f"  {seconds:5g} s  {shown}")
        for count, gpus, goal in ((100, 64, 1.06), (500, 256, 1.08)):
            many = [dict(jobs[i % 12], name=f"j{i}", samples=jobs[i % 12]["samples"] * (1 + i % 7)) for i in range(count)]
            took = {seconds: plan(arguments.ptc, directory, [8] * (gpus // 8), path, many, "--time", seconds)
                    for seconds in (arguments.few, arguments.many)}
            ratios = {seconds: got["makespan_s"] / got["lower_bound_s"] for seconds, got in took.items()}
            reason = (f"it goes on becoming better: {ratios[arguments.few]:.3f} after {arguments.few:g} s; each of its steps looks at all "
                      f"{count} tasks, and few of them help; the bound is of {took[arguments.many]['lower_bound_by']}")
            print(f"{count} jobs on {gpus} GPUs after {arguments.many:g} s, × the bound: "
                  f"{verdict(ratios[arguments.many], goal, reason, form='.3f')}", flush=True)


def deciding(arguments, directory):
    """All of `ptc autoscale --dry-run` but what it takes for one job: curves of the jobs, the decision, printing it."""
    profiles = profile(arguments.ptc, directory, "pollux", [f"{DATA}/pollux/{model}/placements.csv" for model in T4_BATCHES])
    models = list(T4_BATCHES)

    def seconds_for(count):
        jobs = [{"name": f"j{i}", "model": models[i % len(models)], "batch": T4_BATCHES[models[i % len(models)]],
                 "samples": 1e5 * (1 + i % 97)} | ({"now": {"gpus": 1}} if i % 2 == 0 else {}) for i in range(count)]
        path = os.path.join(directory, "many.json")
        with open(path, "w", encoding="ascii") as file:
            json.dump({"cluster": {"nodes": [4] * 100}, "profiles": profiles, "jobs": jobs}, file)
        took = []
        for _ in range(5):
            began = time.perf_counter()
            told = subprocess.run([arguments.ptc, "autoscale", "--dry-run", path, "--price", str(SHORTEST_CHANGE_S), "--json"],
                                  check=True, stdout=subprocess.PIPE, text=True, cwd=directory).stdout
            took.append(time.perf_counter() - began)
        decided = json.loads(told)["jobs"]
        return min(took), sum(job["changes"] for job in decided), sum(job["then"]["gpus"] for job in decided if job["then"])

    one, _, _ = seconds_for(1)
    many, changes, gpus = seconds_for(400)
    reason = "a decision looks at each job with each number of GPUs that it can have, for each number of those that are left"
    print(f"\ndeciding for 400 jobs on 400 GPUs: {many - one:.3f} s ({changes} jobs change, {gpus} GPUs are given away); ÷ a change of "
          f"{SHORTEST_CHANGE_S} s: {verdict((many - one) / SHORTEST_CHANGE_S, 0.1, reason, form='.3f')}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=1, help="seconds for each plan")
    parser.add_argument("--longest", type=float, default=60, help="seconds of the answer that others are divided by")
    parser.add_argument("--few", type=float, default=1, help="seconds after which many jobs are looked at first")
    parser.add_argument("--many", type=float, default=10, help="and in the end")
    parser.add_argument("--seed", type=int, default=1, help="the first of those that are drawn by")
    parser.add_argument("--seeds", type=int, default=20, help="how many of introspection's runs, each with times of its own")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ptc", default=os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc"))
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for part in parts:
        if part not in PARTS:
            parser.error(f"there is no part '{part}'; there are {', '.join(PARTS)}")
    arguments.ptc = os.path.abspath(arguments.ptc) if os.sep in arguments.ptc else arguments.ptc
    with tempfile.TemporaryDirectory() as directory:
        a800 = profile(arguments.ptc, directory, "morphling", [f"{DATA}/morphling/{model}/placements.csv" for model in sorted(SIX)])
        a100 = profile(arguments.ptc, directory, "elasticflow",
                       sorted(f"{DATA}/elasticflow/{name}" for name in os.listdir(DATA + "/elasticflow")))
        sets = {
            "GPT-2, T5 (A800)": (a800, twelve(arguments.ptc, a800, ["gpt2", "t5"])),
            "six models (A800)": (a800, twelve(arguments.ptc, a800, sorted(SIX))),
            "CNNs (A100)": (a100, twelve(arguments.ptc, a100, ["resnet50", "vgg16", "inception3"], (64, 128))),
        }
        if "plans" in parts:
            plans(arguments, directory, sets)
        if "quality" in parts:
            quality(arguments, directory, sets)
        if "deciding" in parts:
            deciding(arguments, directory)
        if "introspection" in parts:
            introspection(arguments, directory, sets)


if __name__ == "__main__":
    main()
