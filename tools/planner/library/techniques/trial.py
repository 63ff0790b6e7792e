"""What the techniques here have in common: asks on standard input, ranks that train two batches, an answer.

"trial" of the job names a Python file beside jobs.json, {"program": "model.py"}, that has

    model()             a torch.nn.Module that has learned nothing
    batch(size)         what so many samples are
    loss(model, batch)  the mean loss of them, a scalar

The second of two batches is timed; ranks are processes of this machine, on GPUs (NCCL) where there are any, else gloo.
"""
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class NoTime(Exception):
    """There is no time, because …"""


def load(path):
    spec = importlib.util.spec_from_file_location("trial_model", path)
    if spec is None or not os.path.exists(path):
        raise NoTime(f'there is no {path}, which "trial" names as its "program"')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_main(rank, asked, step_of, meet, found):
    gpus, cuda = asked["gpus"], torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // gpus))
    dist.init_process_group("nccl" if cuda else "gloo", init_method="file://" + meet, rank=rank, world_size=gpus)
    try:
        program = load(asked["trial"]["program"])
        torch.manual_seed(0)
        step = step_of(asked, program, device)
        for _ in range(2):
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()
            took = time.perf_counter() - begun
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        found.put((rank, took, peak, None))
    except torch.cuda.OutOfMemoryError:
        found.put((rank, 0, 0, "out of memory"))
    except NoTime as none:
        found.put((rank, 0, 0, str(none)))
    except Exception:  # pylint: disable=broad-except
        traceback.print_exc()
        found.put((rank, 0, 0, traceback.format_exc().strip().rsplit("\n", 1)[-1]))
    # Others may wait for this one for ever.
    sys.stderr.flush()


def moved(batch, device):
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(one, device) for one in batch)
    if isinstance(batch, dict):
        return {key: moved(one, device) for key, one in batch.items()}
    return batch.to(device) if torch.is_tensor(batch) else batch


def answer(asked, step_of, **sizes):
    if "program" not in asked["trial"]:
        raise NoTime('"trial" of the job names no "program": a Python file with model(), batch() and loss()')
    if not os.path.exists(asked["trial"]["program"]):
        raise NoTime(f'there is no {asked["trial"]["program"]}')
    if torch.cuda.is_available() and torch.cuda.device_count() < asked["gpus"]:
        raise NoTime(f'there are {torch.cuda.device_count()} GPUs')
    context = mp.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=rank_main, args=(rank, asked, step_of, os.path.join(directory, "meet"), found), daemon=True)
                 for rank in range(asked["gpus"])]
        for rank in ranks:
            rank.start()
        results = []
        while len(results) < len(ranks):
            if found.empty():
                if any(rank.exitcode not in (None, 0) for rank in ranks):
                    raise NoTime("a rank has died")
                time.sleep(0.01)
                continue
            results.append(found.get())
            if results[-1][3] is not None:
                raise NoTime(results[-1][3])
        for rank in ranks:
            rank.kill()
    peak = max(result[2] for result in results)
    return {**sizes, "iteration_s": max(result[1] for result in results), **({"peak_bytes": peak} if peak else {})}


def main(step_of, sizes_of):
    """`sizes_of` the question: {"dp": 4}, or NoTime. `step_of`: makes a rank's step, a function without arguments."""
    if sys.argv[1:] != ["search"]:
        sys.exit(f"{os.path.basename(sys.argv[0])} search < QUESTION")
    asked = json.load(sys.stdin)
    try:
        told = answer(asked, step_of, **sizes_of(asked))
    except NoTime as none:
        told = {"none": str(none)}
    print(json.dumps(told), flush=True)
    os._exit(0)


def data_parallel(asked):
    if asked["batch"] % asked["gpus"] != 0:
        raise NoTime(f'{asked["gpus"]} ranks cannot share a batch of {asked["batch"]} evenly')
    return {"dp": asked["gpus"]}
