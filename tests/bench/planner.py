"""ptc spase plan beside what others do with the same tasks: Saturn's claim, on profiles that others have published.

    tests/bench/planner.py [--time S] [--ptc PROGRAM]

Twelve jobs (models × batches or lengths × learning rates) on 8 GPUs, 4 × 8, and nodes of 2, 2, 4 and 8. Of each: the
makespan divided by that of current practice, by the best baseline's, and by the lower bound; and which part of the
reduction below current practice that the bound allows was reached. Then how good an answer is by the time it took.
"""
import argparse
import json
import os
import statistics
import subprocess
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "data")
CLUSTERS = {"8": [8], "4x8": [8] * 4, "2,2,4,8": [2, 2, 4, 8]}


def plan(ptc, directory, nodes, profiles, jobs, *options):
    path = os.path.join(directory, "jobs.json")
    with open(path, "w", encoding="ascii") as file:
        json.dump({"cluster": {"nodes": nodes}, "profiles": profiles, "jobs": jobs}, file)
    return json.loads(subprocess.run([ptc, "spase", "plan", path, "--json", *map(str, options)], check=True,
                                     stdout=subprocess.PIPE, text=True).stdout)


def profile(ptc, directory, kind, paths):
    target = os.path.join(directory, kind + ".csv")
    subprocess.run([ptc, "profile", "import", kind, *paths, "-o", target], check=True, stdout=subprocess.DEVNULL)
    return target


def rates(ptc, path, model):
    """Samples a second of one GPU, or of the fewest there are."""
    shown = subprocess.run([ptc, "profile", "show", path, model], check=True, capture_output=True, text=True).stdout
    first = shown.splitlines()[1].split()
    return float(first[2]) / int(first[1])


def twelve(ptc, path, models, batches=()):
    """Each model twelve/len times, 2 to 20 hours on one GPU, as by batch, and alike for learning rates."""
    jobs, kinds = [], [(model, batch) for model in models for batch in batches] if batches else [(m, 0) for m in models]
    for number in range(12):
        model, batch = kinds[number % len(kinds)]
        hours = 2 + 18 * (number % 4) / 3
        job = {"name": f"{model}-{number}", "model": model, "samples": rates(ptc, path, model) * 3600 * hours}
        jobs.append(job | ({"batch": batch} if batch else {}))
    return jobs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=1, help="seconds for each plan")
    parser.add_argument("--ptc", default=os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        a800 = profile(arguments.ptc, directory, "morphling",
                       [f"{DATA}/morphling/{m}/placements.csv" for m in ("bert", "gpt2", "llama7", "roberta", "t5", "vit")])
        a100 = profile(arguments.ptc, directory, "elasticflow",
                       sorted(f"{DATA}/elasticflow/{name}" for name in os.listdir(DATA + "/elasticflow")))
        sets = {
            "GPT-2, T5 (A800)": (a800, twelve(arguments.ptc, a800, ["gpt2", "t5"])),
            "six models (A800)": (a800, twelve(arguments.ptc, a800, ["bert", "gpt2", "llama7", "roberta", "t5", "vit"])),
            "CNNs (A100)": (a100, twelve(arguments.ptc, a100, ["resnet50", "vgg16", "inception3"], (64, 128))),
        }
        print("profiles            cluster   ÷ practice  ÷ best other  ÷ bound  of what it allows  ÷ optimus, changing for nothing")
        reached = []
        for name, (path, jobs) in sets.items():
            for cluster, nodes in CLUSTERS.items():
                got = plan(arguments.ptc, directory, nodes, path, jobs, "--time", arguments.time)
                took, bound, others = got["makespan_s"], got["lower_bound_s"], got["instead_s"]
                practice, anew = others["current practice"], others.pop("optimus, dynamic", float("nan"))
                part = (practice - took) / (practice - bound)
                reached.append(part)
                print(f"{name:19} {cluster:9} {took / practice:9.2f}  {took / min(others.values()):11.2f} "
                      f"{took / bound:10.3f}  {part:12.1%}  {took / anew:12.2f}")
        print(f"of the reduction that the bound allows: {statistics.median(reached):.1%} in the median, {min(reached):.1%} at least "
              "(goals: 93 %, 80 %)\n")

        print("12 jobs, six models, 4x8: by time, ÷ the answer of 20 s")
        path, jobs = sets["six models (A800)"]
        times = {seconds: plan(arguments.ptc, directory, [8] * 4, path, jobs, "--time", seconds)["makespan_s"]
                 for seconds in (0.01, 0.1, 1, 20)}
        for seconds, makespan in times.items():
            print(f"  {seconds:5} s  {makespan / times[20]:.4f}" + ("   (goal: 1.01)" if seconds == 1 else ""))
        for count, gpus, goal in ((100, 64, 1.06), (500, 256, 1.08)):
            many = [dict(jobs[i % 12], name=f"j{i}", samples=jobs[i % 12]["samples"] * (1 + i % 7)) for i in range(count)]
            got = plan(arguments.ptc, directory, [8] * (gpus // 8), path, many, "--time", 10)
            print(f"{count} jobs on {gpus} GPUs after 10 s: {got['makespan_s'] / got['lower_bound_s']:.3f} × the bound "
                  f"(goal: {goal})")


if __name__ == "__main__":
    main()
