#!/usr/bin/env python3
"""prepare.py MOUNT: makes the jobs of jobs.json there, each with a data set, whose samples lie in samples/.

One that is there already stays as it is.
"""
import json
import os
import random
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main(mount):
    with open(os.path.join(HERE, "jobs.json"), encoding="utf-8") as file:
        jobs = json.load(file)["jobs"]
    for job in jobs:
        directory = os.path.join(mount, job["name"])
        if os.path.isdir(directory):
            print(f'{job["name"]}: it is there already, and stays as it is')
            continue
        samples, draw = os.path.join(HERE, "samples", job["name"]), random.Random(job["name"])
        os.makedirs(samples, exist_ok=True)
        write(samples + "/all.jsonl", "".join(json.dumps({"tokens": [draw.randrange(64) for _ in range(9)]}) + "\n"
                                              for _ in range(job["samples"])))
        os.mkdir(directory)
        write(directory + "/dataset/source.json", json.dumps({"shards": samples}))
        write(directory + "/dataset/order.json", json.dumps({"batch": job["batch"], "seed": 1}))
        while not os.path.lexists(directory + "/dataset/head"):
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 2 else sys.exit(__doc__)
