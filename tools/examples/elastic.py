"""An elastic launcher: starts a process for each rank of layout.json, and again when that changes or a process dies.

    elastic.py JOB LOG            ends when all samples of the job's data set are consumed

To change the parallelism of what runs, save layout.json, with an editor or by `ptc layout JOB set --tp 4`. For another
global batch, too, put the new order.json into the job as `order.next.json` before: it takes effect while nothing runs.
"""
import multiprocessing
import os
import sys
import tempfile
import time

import ptc
import train

# Ranks are forked from one process that has imported PyTorch and has done nothing else.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["train", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh"])


def start(job, log, directory):
    """Processes for the layout in force and the newest checkpoint; (layout, revision, processes)."""
    while not os.path.exists(job.file("status.json")):  # the node's daemon is away
        time.sleep(0.2)
    status, layout = job.wait(), job.layout
    checkpoint = ptc.Checkpoint(job.path)
    with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:  # back to the checkpoint, or on from it
        file.write(str(checkpoint.meta["consumed"]))
    if os.path.exists(job.file("order.next.json")):
        os.replace(job.file("order.next.json"), job.file("dataset/order.json"))
    while job.read_json("dataset/plan.json")["segments"][-1]["dp"] != layout["dp"]:
        time.sleep(0.05)
    world, meet = layout["tp"] * layout["pp"] * layout["dp"], tempfile.mktemp(dir=directory)
    processes = [CONTEXT.Process(target=train.main, args=(rank, world, job.path, layout, job.current, meet, log))
                 for rank in range(world)]
    for process in processes:
        process.start()
    return layout, status["revision"], processes


def run(job, log, on_look=lambda layout, processes: None):
    """Until all is consumed. `on_look` is called again and again with what runs."""
    with tempfile.TemporaryDirectory() as directory:
        while True:
            layout, revision, processes = start(job, log, directory)
            try:
                for change in job.watch(0.05, revision):
                    on_look(layout, processes)
                    codes = [process.exitcode for process in processes]
                    if all(code == 0 for code in codes):
                        return  # by themselves: all is consumed
                    if change is not None or any(codes):
                        break
            except OSError:  # nothing can be saved: back to what is committed, when the daemon is there again
                codes = [1]
            for process in processes:  # where one is dead the others wait for it for ever; else all save and end
                if any(codes):
                    process.kill()
                else:
                    process.terminate()
            for process in processes:
                process.join()


if __name__ == "__main__":
    run(ptc.Job(sys.argv[1]), os.path.abspath(sys.argv[2]))
