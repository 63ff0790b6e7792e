"""ptc simulate beside Pollux and Rubick: their traces, their clusters, their rules, their policies.

    tests/bench/rivals.py [--ptc PROGRAM]

(a) Pollux's eight workloads (160 jobs in 8 hours) on 16 nodes with 4 T4s. Progress counts goodput, a decision each minute, a job has
at most twice the GPUs that it has trained with, ncf one GPU and a batch of 32 768, a first start and a change take 30 s.
(b) Rubick's trace (406 jobs) on 8 nodes with 8 A800s, a first start and a change take 260 s.
Of both: the same with changes at the price of ptcfs's own plan, first starts as before.
(c) What pricing wins: the same policy that decides as if changes cost nothing, in the same runs.

Of each: the mean time from arrival to end, divided by that of the rival's policy in the same run, and by what its authors
published, or their program printed. Jobs have GPUs of one node, or whole nodes; Rubick's also as many of each of several, where that
was measured. Pollux's and Rubick's policies are made anew from what their programs do. A goal that is missed has its reason behind it.
"""
import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import tempfile

from goals import verdict

DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data")
# Smallest and largest batch, samples a GPU at most, bytes of the state (parameters, and what the optimiser keeps of them), about.
T4 = {"bert": (12, 384, 12, 1.3e9), "cifar10": (128, 4096, 1024, 9e7), "deepspeech2": (20, 640, 80, 1e9),
      "imagenet": (200, 12800, 200, 2e8), "ncf": (256, 32768, 32768, 1e8), "yolov3": (8, 512, 8, 5e8)}
POLLUX_PUBLISHED = {1: 2088.8, 2: 3322.9, 3: 2188.5, 4: 2721.0, 5: 2673.7, 6: 2446.1, 7: 3616.1, 8: 2951.9}
# Batch, and parameters, each of which takes 14 bytes (half precision, a master copy, Adam's moments).
A800 = {"vit": (256, 86e6), "roberta": (64, 355e6), "bert": (32, 336e6), "t5": (16, 1.2e9), "gpt2": (16, 1.5e9), "llama7": (8, 6.7e9),
        "llama30": (4, 32.5e9)}
LLAMAS = {"llama7": (4096, 11008, 32, 32), "llama30": (6656, 17920, 52, 60)}  # hidden, inner, heads, layers
RUBICK_PUBLISHED = {"mean_completion_s": 3638, "makespan_s": 58680}  # its own program, run
COSTS = {"a": "stop=5,start=15,link=1e9,memory=4e9", "b": "stop=5,start=15,link=1e10,memory=1e11"}


def table(path, titles, rows):
    with open(path, "w", encoding="ascii", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        writer.writerows(rows)
    return path


def read(name):
    with open(os.path.join(DATA, name), encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def steps_of(model):
    """Of a number of GPUs that are packed: by samples a GPU, seconds of a step and of its exchange of gradients."""
    of = {}
    path = f"pollux/{model}/placements.csv"
    for row in read(path) if os.path.exists(os.path.join(DATA, path)) else ():
        placement = row["placement"]
        if len(placement) == 1 or set(placement) == {"4"}:
            of.setdefault(sum(map(int, placement)), {})[int(row["local_bsz"])] = (float(row["step_time"]), float(row["sync_time"]))
    for row in read("pollux/scalability.csv"):
        if row["model"] == model:
            of.setdefault(int(row["num_replicas"]), {})[int(row["local_bsz"])] = (float(row["step_time"]), float(row["sync_time"]))
    return of


def between(tried, each):
    """On the line between the two nearest."""
    above = min((x for x in tried if x >= each), default=None)
    below = max((x for x in tried if x <= each), default=None)
    if above is None or below is None:
        return None
    part = 0 if above == below else (each - below) / (above - below)
    return [low + part * (high - low) for low, high in zip(tried[below], tried[above])]


def t4_profiles(path):
    """By Pollux's rule for batches: as many steps as a GPU needs, all but the last without exchange; of one GPU two at least."""
    rows = []
    for model, (least, most, most_each, _) in T4.items():
        for gpus, tried in steps_of(model).items():
            seen, start = set(), max(least, min(tried) * gpus)
            for i in range(50):
                local = min(start * (most / start) ** (i / 49), most) / gpus
                steps = max(math.ceil(local / most_each - 1e-8), 1)
                if gpus == 1 and local > least + 1e-8:
                    steps = max(steps, 2)
                each = min(math.ceil(local / steps - 1e-8), most // (gpus * steps))
                batch, taken = gpus * steps * each, between(tried, each)
                if start > most or taken is None or each > most_each or batch < least or batch in seen:
                    continue
                seen.add(batch)
                seconds = taken[0] + (steps - 1) * (taken[0] - taken[1])
                rows.append((model, batch, gpus, min(gpus, 4), steps, repr(seconds)))
    return table(path, ("model", "batch", "dp", "max_gpus_per_node", "accumulation", "iteration_s"), rows)


def samples_of_t4():
    ends = {}
    for row in read("pollux/validation.csv"):
        key = row["model"], int(row["epoch"])
        ends[key] = min(ends.get(key, math.inf), float(row["steps"]))
    return {model: max(steps for (of, _), steps in ends.items() if of == model) * least for model, (least, *_) in T4.items()}


def llama(directory, name):
    """A directory of a Llama whose files have headers and holes."""
    hidden, inner, heads, layers = LLAMAS[name]
    shapes = {"model.embed_tokens.weight": [32000, hidden], "model.norm.weight": [hidden], "lm_head.weight": [32000, hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": [hidden, hidden] for x in "qkvo"}
        shapes |= {f"{at}mlp.{x}_proj.weight": [inner, hidden] for x in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": [hidden, inner]}
        shapes |= {f"{at}{x}_layernorm.weight": [hidden] for x in ("input", "post_attention")}
    at = os.path.join(directory, name)
    os.mkdir(at)
    with open(os.path.join(at, "config.json"), "w", encoding="ascii") as file:
        json.dump({"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
                   "num_key_value_heads": heads, "intermediate_size": inner, "vocab_size": 32000, "tie_word_embeddings": False}, file)
    state = {f"{kind}.{key}": shape for kind in ("exp_avg", "exp_avg_sq", "master") for key, shape in shapes.items()}
    for file_name, dtype, size, tensors in (("model", "BF16", 2, shapes), ("optim", "F32", 4, state)):
        header, end = {}, 0
        for key, shape in tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + size * math.prod(shape)]}
        text = json.dumps(header).encode()
        with open(os.path.join(at, file_name + ".safetensors"), "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    return name


class Bench:
    def __init__(self, ptc, directory):
        self.program, self.at = ptc, directory

    def path(self, name):
        return os.path.join(self.at, name)

    def ptc(self, *words):
        return subprocess.run([self.program, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout

    def jobs(self, name, nodes, profiles, jobs):
        with open(self.path(name), "w", encoding="ascii") as file:
            json.dump({"cluster": {"nodes": nodes}, "profiles": profiles, "jobs": jobs}, file)
        return self.path(name)

    def pollux(self):
        """Files of (a): jobs, goodput, and the traces by number."""
        kinds = [{"name": m, "model": m, "samples": 1, "batch": most if m == "ncf" else [least, most], "state": state}
                 for m, (least, most, _, state) in T4.items()]
        jobs = self.jobs("t4.json", [4] * 16, os.path.basename(t4_profiles(self.path("t4.csv"))), kinds)
        samples, traces = samples_of_t4(), {}
        for number in POLLUX_PUBLISHED:
            rows = [(r["time"], r["application"], samples[r["application"]], r["name"]) for r in read("pollux/workloads.csv")
                    if int(r["workload"]) == number]
            traces[number] = table(self.path(f"pollux-{number}.csv"), ("time_s", "model", "samples", "name"), rows)
        return jobs, traces

    def rubick(self):
        parts = []
        for model, (batch, _) in A800.items():
            parts.append(self.path(model + ".csv"))
            self.ptc("profile", "import", "morphling", f"{DATA}/morphling/{model}/placements.csv", "--batch", batch, "-o", parts[-1])
        kinds = [{"name": m, "model": m, "samples": 1, "state": llama(self.at, m) if m in LLAMAS else 14 * parameters}
                 for m, (_, parameters) in A800.items()]
        rows = [(r["submission_time"], r["application"], int(r["steps"]) * A800[r["application"]][0], r["num_gpus"], r["name"])
                for r in read("morphling/workload-base.csv")]
        trace = table(self.path("rubick.csv"), ("time_s", "model", "samples", "gpus", "name"), rows)
        return self.jobs("a800.json", [8] * 8, [os.path.basename(part) for part in parts], kinds), trace

    def simulate(self, jobs, trace, policies, *words):
        return json.loads(self.ptc("simulate", jobs, "--trace", trace, "--policy", ",".join(policies), "--only-timer", "--json", *words))


def in_the_mean(runs, policy, key="mean_completion_s"):
    return statistics.mean(run[policy][key] for run in runs)


def gain_of(runs, policy, price=None):
    """The mean beside that of who decides as if changes cost nothing; how many changes both make; and why it is no less."""
    other = policy + "+unpriced"
    gain = in_the_mean(runs, policy) / in_the_mean(runs, other)
    changes, others = in_the_mean(runs, policy, "changes"), in_the_mean(runs, other, "changes")
    if gain > 1 or price is None:
        reason = "a change is weighed by what its own job wins, and not by who waits for the GPUs"
    else:
        still = others * price / in_the_mean(runs, other, "jobs") / in_the_mean(runs, other)
        reason = f"where changes have no price jobs stand still for {still:.0%} of their time, and that is all that is saved directly"
    return gain, changes, others, reason


def price_in(words):
    return words[words.index("--price") + 1] if "--price" in words else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ptc", default=os.path.join(os.environ.get("PTC_BIN_DIR", ""), "ptc"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(arguments.ptc, directory)
        jobs, traces = bench.pollux()
        rules = ("--goodput", f"{DATA}/pollux/validation.csv", "--growth", 2)
        ours, fair = "elastic-completion", "pollux"
        gains = {}

        def of_pollux(*words):
            return [bench.simulate(jobs, trace, (ours, ours + "+unpriced", fair), *rules, *words) for trace in traces.values()]

        published = statistics.mean(POLLUX_PUBLISHED.values())
        reason = "a stop and a start are guessed at 20 s, and what moves takes 1.3 s at most"
        print("(a) Pollux's workloads, 64 T4s, mean of eight. Told: measured profiles and gradients; ours also the work that is left")
        for name, goal, words in (("30 s a change", 0.88, ("--price", 30)),
                                  ("changes priced", 0.80, ("--priced", "--costs", COSTS["a"], "--first-start", 30)),
                                  ("changes priced, 1 s a stop and 4 s a start", None,
                                   ("--priced", "--costs", "stop=1,start=4", "--first-start", 30)),
                                  ("260 s a change", None, ("--price", 260, "--first-start", 30))):
            runs = of_pollux(*words)
            mean = in_the_mean(runs, ours)
            gains["Pollux's, " + name] = gain_of(runs, ours, price_in(words))
            print(f"  {name}: ours {mean:.0f} s, Pollux's policy here {in_the_mean(runs, fair):.0f}, published {published:.0f}; "
                  f"ours ÷ its policy {mean / in_the_mean(runs, fair):.2f}"
                  + f", ÷ published {verdict(mean / published, goal, reason) if goal else format(mean / published, '.2f')}")

        jobs, trace = bench.rubick()
        ours, its = "elastic-overtaking", "rubick"
        print("(b) Rubick's trace, 64 A800s. Told: measured profiles; ours also the work that is left. Its policy, made anew, takes\n"
              "    much longer than its program, for reasons not found out: what counts is the program")
        for name, goal, words in (("260 s a change", 0.85, ("--price", 260)),
                                  ("changes priced", 0.5, ("--priced", "--costs", COSTS["b"], "--first-start", 260)),
                                  ("30 s a change", None, ("--price", 30, "--first-start", 260))):
            run = bench.simulate(jobs, trace, (ours, ours + "+unpriced", its, "elastic", "elastic-completion"), "--spread",
                                 "--patience", 300, *words)
            mean, whole = run[ours]["mean_completion_s"], run[ours]["makespan_s"]
            used = f"{run[ours]['utilisation']:.0%} of the GPUs were in use until then: a few of the largest jobs are alone at the end"
            gains["Rubick's, " + name] = gain_of([run], ours, price_in(words))
            print(f"  {name}: ours {mean:.0f} s, all done after {whole:.0f}; its policy here {run[its]['mean_completion_s']:.0f}, "
                  f"{run[its]['makespan_s']:.0f}; its program {RUBICK_PUBLISHED['mean_completion_s']}, {RUBICK_PUBLISHED['makespan_s']}")
            print(f"    ours ÷ its policy {mean / run[its]['mean_completion_s']:.2f}, ÷ its program "
                  + (verdict(mean / RUBICK_PUBLISHED["mean_completion_s"], goal, used) if goal else
                     f"{mean / RUBICK_PUBLISHED['mean_completion_s']:.2f}")
                  + f"; all done ÷ its program {verdict(whole / RUBICK_PUBLISHED['makespan_s'], 1.05, used)}")
            for other in ("elastic", "elastic-completion"):
                print(f"    {other} {run[other]['mean_completion_s']:.0f}, {run[other]['makespan_s']:.0f}")
        print("(c) mean where changes have a price in what is decided, ÷ where they have none")
        for name, (gain, changes, others, reason) in gains.items():
            goal = 0.95 if name.endswith("30 s a change") else 0.6 if name.endswith("260 s a change") else 1
            print(f"  {name}: {verdict(gain, goal, reason)}, {changes:.0f} changes instead of {others:.0f}")


if __name__ == "__main__":
    main()
