"""An elastic launcher: starts a process for each rank of layout.json, and again when that changes or a process dies.

    elastic.py JOB LOG [RANKS]    ends when all samples of the job's data set are consumed

RANKS: the module whose main() is a rank: train, or megatron_gpt.

To change the parallelism of what runs, save layout.json, with an editor or by `ptc layout JOB set --tp 4`. For another
global batch, too, put the new order.json into the job as `order.next.json` before: it takes effect while nothing runs.

SIGTERM, SIGINT and SIGHUP: all ranks save and end, and the exit status is 128 and the signal; a second one kills them.
No rank outlives the launcher, however that ends. Exit status 1: ranks fail again and again, or it cannot go on.
"""
import importlib
import os
import sys
import tempfile
import time

import ptc
import train
from ptc.ranks import Asked, Ranks, asked_by_signals

RANKS = ("train", "megatron_gpt")
FAILURES = 5  # in a row, without a checkpoint between


class Failing(Exception):
    """Ranks that end by themselves again and again."""


def wait(job):
    """The status, once the layout that is wanted is in force: an edit that was refused changes nothing."""
    try:
        return job.wait()
    except ptc.LayoutError:
        return job.status


def start(jobs, log, directory, ranks):
    """Ranks for the layout in force and the newest checkpoint; (layout, revision, checkpoint, they).

    `jobs`: the job as each rank sees it.
    """
    job, seen = jobs(None, 0), None
    while seen is None:
        while not os.path.exists(job.file("status.json")):  # the node's daemon is away
            time.sleep(0.2)
        status, layout = wait(job), job.layout
        world = layout["tp"] * layout["pp"] * layout["dp"]
        try:
            seen = [jobs(layout, rank) for rank in range(world)]
        except OSError:  # another node is: until it is back, or a layout leaves it out
            time.sleep(0.2)
    checkpoint = ptc.Checkpoint(job.path)
    with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:  # back to the checkpoint, or on from it
        file.write(str(checkpoint.meta["consumed"]))
    if os.path.exists(job.file("order.next.json")):
        os.replace(job.file("order.next.json"), job.file("dataset/order.json"))
    meet = tempfile.mktemp(dir=directory)
    for place in {one.path: one for one in [job, *seen]}.values():
        while not shows_the_same(place, job, status["revision"], layout["dp"], checkpoint.meta["consumed"]):
            time.sleep(0.05)
    arguments = [(rank, world, one.path, layout, one.current, meet, log) for rank, one in enumerate(seen)]
    return layout, status["revision"], checkpoint.path, Ranks(ranks.main, arguments, ranks.PRELOAD)


def shows_the_same(place, job, revision, dp, consumed):
    """Whether a node shows the layout, the checkpoint, and the data set from where that is."""
    plan = place.read_json("dataset/plan.json")
    return (place.status["in_force_revision"] == revision and plan["segments"][-1]["dp"] == dp
            and plan["consumed"] == consumed and os.readlink(place.file("current")) == os.readlink(job.file("current")))


def run(job, log, on_look=lambda layout, processes: None, jobs=None, ranks=train):
    """Until all is consumed. `on_look` is called again and again with what runs.

    `jobs`: of a layout and a rank the job on the mount of that rank's node, where there are several; of None, one that
    is there. `ranks`: the module of their main(). Failing: it does not go on. However this ends, no rank runs any more.
    """
    jobs = jobs or (lambda layout, rank: job)
    failures, begun = 0, None
    with tempfile.TemporaryDirectory() as directory:
        while True:
            try:
                layout, revision, checkpoint, running = start(jobs, log, directory, ranks)
            except OSError:  # a daemon has gone meanwhile
                failures += 1
                if failures >= FAILURES:
                    raise
                time.sleep(1)
                continue
            failures, begun = 0 if checkpoint != begun else failures, checkpoint
            codes = []
            try:
                for change in jobs(None, 0).watch(0.05, revision):
                    on_look(layout, running.processes)
                    codes = running.codes
                    if all(code == 0 for code in codes):
                        return  # by themselves: all is consumed
                    if change is not None or any(codes):
                        break
            except OSError:  # nothing can be saved: back to what is committed, when the daemon is there again
                codes = [1]
            except BaseException:
                running.end(at_once=False)
                raise
            running.end(at_once=any(codes))
            failures += any(codes)
            if failures >= FAILURES:
                raise Failing(f"ranks end again and again, with {running.codes}, and have saved nothing since {checkpoint}")


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], *([name] for name in RANKS)):
        sys.exit(f"elastic.py JOB LOG [RANKS]\nRANKS: {' or '.join(RANKS)}")
    ranks = importlib.import_module(sys.argv[3]) if len(sys.argv) == 4 else train
    try:
        with asked_by_signals():
            run(ptc.Job(sys.argv[1]), os.path.abspath(sys.argv[2]), ranks=ranks)
    except (Failing, OSError, ptc.PtcError) as error:
        sys.exit(f"elastic: {error}")
    except Asked as asked:
        sys.exit(asked.exit_status)


if __name__ == "__main__":
    main()
