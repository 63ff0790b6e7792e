"""An elastic launcher: starts a process for each rank of layout.json, and again when that changes or a process dies.

    elastic.py JOB LOG [RANKS]    ends when all samples of the job's data set are consumed

RANKS: the module whose main() is a rank: train, or megatron_gpt.

To change the parallelism of what runs, save layout.json, with an editor or by `ptc layout JOB set --tp 4`. For another
global batch, too, put the new order.json into the job as `order.next.json` before: it takes effect while nothing runs.

SIGTERM, SIGINT and SIGHUP: all ranks save and end, and the exit status is 128 and the signal; a second one kills them.
No rank outlives the launcher, however that ends. Exit status 1: ranks fail again and again, or it cannot go on.
"""
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing import connection, forkserver, resource_tracker

import ptc
import train

# Ranks are forked from one process that has imported PyTorch and has done nothing else.
CONTEXT = multiprocessing.get_context("forkserver")
RANKS = ("train", "megatron_gpt")
FAILURES = 5  # in a row, without a checkpoint between


class Failing(Exception):
    """Ranks that end by themselves again and again."""


def start_server(ranks=train):
    """The process that ranks are forked from; the first to ask says what it imports. They begin with SIGTERM blocked,
    as it has it: sent before a rank can save, it waits until the rank can (train.run).
    """
    CONTEXT.set_forkserver_preload(ranks.PRELOAD)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # it would look for them nowhere else
    resource_tracker.ensure_running()  # it would unblock SIGTERM here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def wait(job):
    """The status, once the layout that is wanted is in force: an edit that was refused changes nothing."""
    try:
        return job.wait()
    except ptc.LayoutError:
        return job.status


def start(jobs, log, directory, ranks):
    """Processes for the layout in force and the newest checkpoint; (layout, revision, checkpoint, processes).

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
    start_server(ranks)
    processes = [CONTEXT.Process(target=ranks.main, daemon=True,
                                 args=(rank, world, one.path, layout, one.current, meet, log))
                 for rank, one in enumerate(seen)]
    try:
        for process in processes:
            process.start()
    except BaseException:
        end(processes, at_once=True)
        raise
    return layout, status["revision"], checkpoint.path, processes


def shows_the_same(place, job, revision, dp, consumed):
    """Whether a node shows the layout, the checkpoint, and the data set from where that is."""
    plan = place.read_json("dataset/plan.json")
    return (place.status["in_force_revision"] == revision and plan["segments"][-1]["dp"] == dp
            and plan["consumed"] == consumed and os.readlink(place.file("current")) == os.readlink(job.file("current")))


def end(processes, at_once):
    """Ends all: they save, unless `at_once`. Where one dies, the others would wait for it for ever, and are killed."""
    processes = [process for process in processes if process.pid is not None]
    try:
        if not at_once:
            for process in processes:
                process.terminate()
            while not any(process.exitcode for process in processes):
                waiting = [process.sentinel for process in processes if process.exitcode is None]
                if not waiting:
                    return
                connection.wait(waiting)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


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
                layout, revision, checkpoint, processes = start(jobs, log, directory, ranks)
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
                    on_look(layout, processes)
                    codes = [process.exitcode for process in processes]
                    if all(code == 0 for code in codes):
                        return  # by themselves: all is consumed
                    if change is not None or any(codes):
                        break
            except OSError:  # nothing can be saved: back to what is committed, when the daemon is there again
                codes = [1]
            except BaseException:
                end(processes, at_once=False)
                raise
            end(processes, at_once=any(codes))
            failures += any(codes)
            if failures >= FAILURES:
                raise Failing(f"ranks end again and again, with {[process.exitcode for process in processes]}, and "
                              f"have saved nothing since {checkpoint}")


def main():
    if len(sys.argv) not in (3, 4) or sys.argv[3:] not in ([], *([name] for name in RANKS)):
        sys.exit(f"elastic.py JOB LOG [RANKS]\nRANKS: {' or '.join(RANKS)}")
    ranks = importlib.import_module(sys.argv[3]) if len(sys.argv) == 4 else train
    signals = []

    def asked(number, _):  # a second one, while run() ends the ranks, has it kill them
        signals.append(number)
        raise KeyboardInterrupt
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, asked)
    try:
        run(ptc.Job(sys.argv[1]), os.path.abspath(sys.argv[2]), ranks=ranks)
    except (Failing, OSError, ptc.PtcError) as error:
        sys.exit(f"elastic: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signals[0])


if __name__ == "__main__":
    main()
