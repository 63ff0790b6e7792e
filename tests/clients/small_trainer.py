"""What `ptc autoscale` and `ptc spase run` start in tests: consumes a job's samples, and saves when it is asked to end. No training.

    small_trainer.py LOG STEP_SECONDS [FAULT]

A line of LOG for each start and end. FAULT: crash (at once), hang (consumes nothing), deaf (no SIGTERM), early (ends with 0
before all is consumed), stays (does not end until it is asked to), edits (is asked to end, and somebody saves layout.json),
flaky (crashes the first time, and then says at once that it is done).
"""
import json
import os
import signal
import sys
import time

import models


def main():
    log, pause, fault = sys.argv[1], float(sys.argv[2]), (sys.argv[3:] or [""])[0]
    job, batch = os.environ["PTC_JOB"], int(os.environ["PTC_BATCH"])
    asked = []
    signal.signal(signal.SIGTERM, (lambda *_: None) if fault == "deaf" else (lambda *_: asked.append(True)))

    def note(**what):
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "job": os.path.basename(job), "pid": os.getpid(), **what}) + "\n")

    def read(name):
        with open(os.path.join(job, name), encoding="utf-8") as file:
            return file.read()

    layout, consumed = json.loads(read("layout.json")), int(read("dataset/consumed"))
    plan = json.loads(read("dataset/plan.json"))
    note(what="start", layout=layout, consumed=consumed, batch=batch, plan=plan["segments"][-1],
         shown=os.readlink(os.path.join(job, "current")), devices=os.environ["PTC_DEVICES"], technique=os.environ["PTC_TECHNIQUE"],
         cuda=os.environ.get("CUDA_VISIBLE_DEVICES"))
    if fault == "crash":
        sys.exit(7)
    if fault == "flaky":
        with open(log, encoding="utf-8") as file:
            starts = [line for line in map(json.loads, file) if (line["what"], line["job"]) == ("start", os.path.basename(job))]
        sys.exit(7 if len(starts) == 1 else 0)
    total = json.loads(read("dataset/status.json"))["source"]["samples"]
    while consumed < total and not asked and fault != "early":
        time.sleep(pause)
        if fault == "hang":
            continue
        consumed = min(consumed + batch, total)
        with open(os.path.join(job, "dataset/consumed"), "w", encoding="utf-8") as file:
            file.write(str(consumed))
    while fault == "stays" and not asked:
        time.sleep(pause)
    name = f"at{consumed:06}"
    if not os.path.exists(os.path.join(job, "checkpoints", name)):
        models.Llama().write_hf(os.path.join(job, "incoming", name, "rank/0"))
        with open(os.path.join(job, "incoming", name, "layout.json"), "w", encoding="utf-8") as file:
            json.dump({"tp": 1, "pp": 1, "dp": 1}, file)
        while True:
            try:
                os.rename(os.path.join(job, "incoming", name), os.path.join(job, "checkpoints", name))
                break
            except BlockingIOError:
                pass
    if fault == "edits":
        with open(os.path.join(job, "layout.json"), "w", encoding="utf-8") as file:
            json.dump({"tp": 1, "pp": 1, "dp": 1, "keep": 7}, file)
    note(what="end", consumed=consumed, asked=bool(asked))
    sys.exit(143 if asked else 0)


if __name__ == "__main__":
    main()
