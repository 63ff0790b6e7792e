"""What the techniques here have in common: asks on standard input, ranks that train, an answer.

"trial" of the job names a Python file beside jobs.json, {"program": "model.py"}, that has

    model()                a torch.nn.Module that has learned nothing
    batch(size)            what so many samples are: tensors whose first dimension they are
    loss(model, batch)     the mean loss of them, a scalar
    optimizer(parameters)  else AdamW

and for some techniques

    layers(model)          gpipe: modules, each called with what the one before gives; else those of a torch.nn.Sequential
    TENSOR, HEADS          tensor: {"*.q_proj": "column", "*.o_proj": "row"}, else usual names; heads are not cut
    samples(values)        execute: the batch that values of lines of the data set's JSONL are
    CONFIG                 execute: config.json of its checkpoints

`search` times the second of two batches; `execute` trains a job of a mount. Ranks are processes of this machine, on GPUs
(NCCL) where there are any, else gloo.
"""
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import resource_tracker

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = os.path.dirname(os.path.abspath(__file__))
SAVE_EVERY = 100


class NoTime(Exception):
    """There is no time, because …"""


class Technique:
    """A model on the ranks, as one of them has it. What techniques differ in is to be overridden."""

    axes = ("dp",)  # of a layout, which it can have more than one of
    optimizers = ("replicated",)  # of a layout, that it can go on with
    foreach = None  # of the optimizer: False where it cannot take parameters together

    @classmethod
    def ways(cls, asked):
        """Sizes to try, of which the fastest is the answer. NoTime: there are none."""
        shared(asked["batch"], asked["gpus"])
        return [{"dp": asked["gpus"]}]

    def __init__(self, program, device, sizes, held=None):
        """`held`: names of the tensors that the layout gives this rank; None: whatever there are."""
        self.program, self.device, self.held = program, device, held
        self.tp_size, self.pp_size, self.dp_size = (sizes.get(axis, 1) for axis in ("tp", "pp", "dp"))
        self.dp = dist.get_rank() // self.tp_size % self.dp_size  # tp-dp-pp, as layout.json has them
        torch.manual_seed(0)
        self.model = program.model()  # whose names are those of checkpoints
        self.parallel = self.spread()
        make = getattr(program, "optimizer", torch.optim.AdamW)
        self.optimizer = make(self.parallel.parameters())
        self.settle()

    def settle(self):
        for group in self.optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = self.foreach

    def spread(self):
        """What is called in the model's place."""
        return self.model.to(self.device)

    def mesh(self):
        return dist.device_mesh.init_device_mesh(self.device.type, (self.pp_size, self.dp_size, self.tp_size),
                                                 mesh_dim_names=("pp", "dp", "tp"))

    def gradients(self, batch, weight):
        """Sets them to the mean over replicas of the loss times `weight`; that loss."""
        loss = self.program.loss(self.parallel, batch)
        (loss * weight).backward()
        return loss.detach()

    def learn(self, batch, weight=1.0):
        self.optimizer.zero_grad()
        loss = self.gradients(batch, weight)
        self.optimizer.step()
        return loss

    def timed(self, batch):
        for _ in range(2):
            dist.barrier()
            synchronize(self.device)
            begun = time.perf_counter()
            loss = self.learn(batch)
            synchronize(self.device)
            dist.barrier()
            took = time.perf_counter() - begun
        return {"iteration_s": took, "loss": self.mean_of(loss)}

    def mean_of(self, loss, weight=1.0):
        """Over the replicas; on all ranks."""
        total = (loss * weight).to(torch.float64).reshape(())
        dist.all_reduce(total)
        return total.item() / self.dp_size / self.tp_size  # of stages the last one has it

    # ---- what ptc.training.go_on() needs ----

    def step(self, samples, size):
        if not samples:  # the last batch has none for this rank
            return self.mean_of(self.learn(moved(self.program.batch(1), self.device), 0.0), 0.0)
        weight = len(samples) * self.dp_size / size
        return self.mean_of(self.learn(moved(self.program.samples(samples), self.device), weight), weight)

    def load(self, state):
        import ptc
        ptc.load_model_state(self.model, state["model"])
        ptc.load_optimizer_state(self.model, self.optimizer, state["optim"])
        self.settle()  # whoever saved it was another technique, perhaps

    def state(self):
        import ptc
        model = {name: tensor for name, tensor in self.model.state_dict().items() if self.held is None or name in self.held}
        return {"model": model, "optim": ptc.optimizer_state(self.model, self.optimizer)}

    def save(self, job, layout, step, consumed):
        config = getattr(self.program, "CONFIG", None)
        job.save({**self.state(), "step": step, "consumed": consumed}, f"step{step:05}", layout=layout, consumed=consumed,
                 files={"config.json": config} if config else None)


class Sharded(Technique):
    """FSDP2."""

    optimizers = ("replicated", "fsdp")
    policy = {}

    def spread(self):
        from torch.distributed.fsdp import fully_shard
        mesh = self.mesh()["dp"]
        if not self.policy:
            self.model.to(self.device)
        for child in list(self.model.children()):
            for layer in child if isinstance(child, torch.nn.ModuleList) else ():
                fully_shard(layer, mesh=mesh, **self.policy)
        fully_shard(self.model, mesh=mesh, **self.policy)
        return self.model


class Cut(Technique):
    """One whose replicas are cut along `axis`; gradients are summed over replicas here."""

    axis = ""

    @classmethod
    def ways(cls, asked):
        gpus, batch = asked["gpus"], asked["batch"]
        if gpus == 1:
            raise NoTime("one GPU has nobody to share the model with")
        found = [{cls.axis: size, "dp": gpus // size} for size in range(gpus, 1, -1) if gpus % size == 0 and batch % (gpus // size) == 0]
        return found or shared(batch, gpus)

    def mean_over_replicas(self, mesh):
        if self.dp_size == 1:
            return
        own = [parameter.grad for parameter in self.parallel.parameters() if parameter.grad is not None]
        own = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in own]
        for work in [dist.all_reduce(gradient, group=mesh["dp"].get_group(), async_op=True) for gradient in own]:
            work.wait()
        for gradient in own:
            gradient /= self.dp_size


def shared(batch, ranks):
    if batch % ranks != 0:
        raise NoTime(f"{ranks} ranks cannot share a batch of {batch} evenly")


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def each_tensor(batch, change):
    if isinstance(batch, (tuple, list)):
        return type(batch)(each_tensor(one, change) for one in batch)
    if isinstance(batch, dict):
        return {key: each_tensor(one, change) for key, one in batch.items()}
    return change(batch) if torch.is_tensor(batch) else batch


def moved(batch, device):
    return each_tensor(batch, lambda tensor: tensor.to(device))


def part_of(batch, begin, end):
    """Some of its samples."""
    return each_tensor(batch, lambda tensor: tensor[begin:end])


def samples_in(batch):
    found = []
    each_tensor(batch, lambda tensor: found.append(len(tensor)))
    return found[0]


# ---- ranks ----

def load(path):
    spec = importlib.util.spec_from_file_location("trial_model", path)
    if spec is None or not os.path.exists(path):
        raise NoTime(f'there is no {path}, which "trial" names as its "program"')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_main(rank, make, work, asked, sizes, meet, found):
    gpus, cuda = asked["gpus"], torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    try:
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // gpus))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", init_method="file://" + meet, rank=rank, world_size=gpus)
        found.put((work(make, load(asked["trial"]["program"]), device, asked, sizes), None))
    except torch.cuda.OutOfMemoryError:
        found.put((None, "out of memory"))
    except NoTime as none:
        found.put((None, str(none)))
    except Exception:  # pylint: disable=broad-except
        traceback.print_exc()
        found.put((None, traceback.format_exc().strip().rsplit("\n", 1)[-1]))
    # Others may wait for this one for ever.
    sys.stderr.flush()


def search_on(make, program, device, asked, sizes):
    technique = make(program, device, sizes)
    told = technique.timed(moved(program.batch(asked["batch"] // technique.dp_size), device))
    if device.type == "cuda":
        told["peak_bytes"] = torch.cuda.max_memory_allocated()
    return told


def execute_on(make, program, device, asked, sizes):
    import ptc
    import ptc.training
    stop = ptc.training.stops_at_sigterm()
    ptc.training.end_with_launcher()
    if not hasattr(program, "samples"):
        raise NoTime(f'{asked["trial"]["program"]} has no samples(values): what the batch of lines of the data set is')
    job, layout, loss = ptc.Job(asked["job"]), asked["layout"], None
    state = ptc.load(asked["from"]) if asked["from"] else None
    technique = make(program, device, sizes, state and set(state["model"]))
    if state:
        technique.load(state)

    def note(step, size, found, _):
        nonlocal loss
        loss = found
        if asked.get("log") and dist.get_rank() == 0:
            with open(asked["log"], "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "batch": size, "loss": loss}) + "\n")
    step, consumed, why = ptc.training.go_on(
        technique, job, layout, state["step"] if state else 0, asked["consumed"], stop=stop, batches=asked.get("batches"),
        save_every=asked.get("save_every", SAVE_EVERY), on_step=note, idles=True)
    return {"step": step, "consumed": consumed, "ended": why, **({} if loss is None else {"loss": loss})}


# ---- the process that is asked ----

def together(make, work, asked, sizes):
    """What the ranks tell. NoTime: one has none, or has died."""
    context = mp.get_context("spawn" if torch.cuda.is_available() else "fork")  # forked, they have imported all already
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        meet = os.path.join(directory, "meet")
        ranks = [context.Process(target=rank_main, args=(rank, make, work, asked, sizes, meet, found), daemon=True)
                 for rank in range(asked["gpus"])]
        resource_tracker.ensure_running()  # it would unblock SIGTERM
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        for rank in ranks:  # they have it blocked until they can save
            rank.start()
        if work is execute_on:
            signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks])
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        results = []
        try:
            while len(results) < len(ranks):
                if found.empty():
                    if any(rank.exitcode not in (None, 0) for rank in ranks):
                        raise NoTime("a rank has died")
                    time.sleep(0.01)
                    continue
                told, none = found.get()
                if none is not None:
                    raise NoTime(none)
                results.append(told)
        finally:
            for rank in ranks:
                rank.kill()
    return results


def check(asked):
    if "program" not in asked["trial"]:
        raise NoTime('"trial" of the job names no "program": a Python file with model(), batch() and loss()')
    if not os.path.exists(asked["trial"]["program"]):
        raise NoTime(f'there is no {asked["trial"]["program"]}')
    if torch.cuda.is_available() and torch.cuda.device_count() < asked["gpus"]:
        raise NoTime(f"there are {torch.cuda.device_count()} GPUs")


def search(make, asked):
    best, none = None, None
    for sizes in make.ways(asked):
        try:
            told = together(make, search_on, asked, sizes)
        except NoTime as one:
            none = one
            continue
        of_all = {**sizes, **told[0], **{key: max(one[key] for one in told) for key in ("iteration_s", "peak_bytes") if key in told[0]}}
        if best is None or of_all["iteration_s"] < best["iteration_s"]:
            best = of_all
    if best is None:
        raise none
    return best


def execute(make, asked):
    sys.path += [os.path.join(HERE, up, "python") for up in ("..", "../../..")]  # installed, and in the tree
    import ptc
    job = ptc.Job(asked["job"])
    job.wait()
    layout, begin = job.layout, asked.get("from") or job.current
    sizes = {axis: layout.get(axis, 1) for axis in ("tp", "pp", "dp")}
    if sizes["tp"] * sizes["pp"] * sizes["dp"] != asked["gpus"]:
        raise NoTime(f'its layout has tp{sizes["tp"]}-pp{sizes["pp"]}-dp{sizes["dp"]}, and there are {asked["gpus"]} GPUs')
    beyond = [f"{axis}{size}" for axis, size in sizes.items() if size > 1 and axis not in make.axes]
    if layout.get("optimizer", "replicated") not in make.optimizers:
        beyond.append(f'"optimizer": "{layout["optimizer"]}"')
    if beyond:
        raise NoTime(f'its layout has {beyond[0]}, which this technique has not')
    consumed = ptc.Checkpoint(begin).meta.get("consumed", 0) if begin else 0
    with open(job.file("dataset/consumed"), "w", encoding="utf-8") as file:  # back to the checkpoint, or on from it
        file.write(str(consumed))
    while True:
        plan = job.read_json("dataset/plan.json")
        if plan["consumed"] == consumed and plan["segments"][-1]["dp"] == sizes["dp"]:
            break
        if job.layout != layout:
            raise NoTime("layout.json was changed meanwhile")
        time.sleep(0.05)
    if plan["segments"][-1]["batch"] != asked["batch"]:
        raise NoTime(f'order.json has batches of {plan["segments"][-1]["batch"]}, and not {asked["batch"]}')
    told = together(make, execute_on, {**asked, "layout": layout, "from": begin, "consumed": consumed}, sizes)
    return told[0]


def main(make):
    """`make`: a Technique."""
    what = {"search": search, "execute": execute}.get(" ".join(sys.argv[1:]))
    if what is None:
        sys.exit(f"{os.path.basename(sys.argv[0])} search|execute < QUESTION")
    asked = json.load(sys.stdin)
    try:
        check(asked)
        told = what(make, asked)
    except NoTime as none:
        told = {"none": str(none)}
    except Exception as error:  # pylint: disable=broad-except
        traceback.print_exc()
        told = {"none": f"{type(error).__name__}: {error}"}
    print(json.dumps(told), flush=True)
    os._exit(1 if what is execute and "none" in told else 0)
