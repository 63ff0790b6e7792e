"""The data loaders themselves on a mount, in worker processes, with dp changed in the midst of an epoch.

Each of webdataset, mosaicml-streaming and datasets that is not installed is skipped.
"""
import glob
import importlib.util
import json
import os
import socket
import subprocess
import sys

import mount
from readers import optional
from test_dataset import ids_of, wait_for, write_shards

SAMPLES = 240
BATCH = 8


def write_jsonl(directory):
    os.makedirs(directory)
    for first in range(0, SAMPLES, 64):
        with open(f"{directory}/{first:05}.jsonl", "w", encoding="utf-8") as file:
            for key in range(first, min(first + 64, SAMPLES)):
                file.write(json.dumps({"key": key, "text": "x" * (key % 50)}) + "\n")


def read_webdataset(generation, rank, size, skip, count):
    """Keys of `count` batches of the rank, behind the first `skip`."""
    import webdataset
    tars = sorted(glob.glob(f"{generation}/rank-{rank:03}/tar/e000/*.tar"))[skip:skip + count]
    data = webdataset.WebDataset(tars, shardshuffle=False, nodesplitter=None)
    if importlib.util.find_spec("torch"):
        batches = webdataset.WebLoader(data, batch_size=BATCH // size, num_workers=2)
    else:
        batches = data.batched(BATCH // size)
    return [[int(key) for key in batch["__key__"]] for batch in batches]


def read_streaming(generation, rank, size, skip, count):
    streaming = optional("streaming")
    import torch
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    data = streaming.StreamingDataset(local=f"{generation}/global/mds/e000", remote=None, shuffle=False,
                                      num_canonical_nodes=1, batch_size=BATCH // size)
    batches = []
    for batch in torch.utils.data.DataLoader(data, batch_size=BATCH // size, num_workers=1, collate_fn=list):
        batches.append([json.loads(sample["json"])["key"] for sample in batch])
        if len(batches) == skip + count:
            break
    return batches[skip:]


def read_datasets(generation, rank, size, skip, count):
    import datasets
    files = sorted(glob.glob(f"{generation}/rank-{rank:03}/jsonl/e000/*.jsonl"))
    data = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    batches = [batch["key"] for batch in data.iter(batch_size=BATCH // size)]
    return batches[skip:skip + count]


class Loaders(mount.TestCase):
    def begin(self, write, dp):
        self.job = self.new_job()
        self.job.set_layout(dp=dp)
        self.data = self.temporary("data")
        write(self.data)
        for name, content in (("source", {"shards": self.data}), ("order", {"batch": BATCH, "seed": 9})):
            with open(self.at(name + ".json"), "w", encoding="utf-8") as file:
                json.dump(content, file)
        wait_for(lambda: os.path.lexists(self.at("head")), mount.read_text(self.at("status.json")))

    def at(self, *parts):
        return self.job.file("dataset", *parts)

    def read(self, reader, size, count):
        """Keys of the next `count` steps, as `size` processes read them; they are consumed then."""
        plan = mount.read_json(self.at("plan.json"))
        generation = os.path.realpath(self.at("head"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "HF_HOME": self.temporary("hf"), "HF_HUB_OFFLINE": "1",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes = []
        for rank in range(size):
            arguments = [generation, str(rank), str(size), str(plan["next"]["batch"]), str(count)]
            out = open(self.temporary(f"out-{rank}"), "w+", encoding="utf-8")
            self.addCleanup(out.close)
            processes.append((out, subprocess.Popen([sys.executable, "-W", "ignore", __file__, reader.__name__, *arguments],
                                                    env=environment, stdout=out, stdin=subprocess.DEVNULL)))
        steps = []
        for out, process in processes:
            self.assertEqual(process.wait(timeout=240), 0)
            out.seek(0)
            steps.append(json.loads(out.read().splitlines()[-1]))
        keys = [key for step in zip(*steps, strict=True) for local in step for key in local]
        consumed = plan["consumed"] + count * BATCH
        with open(self.at("consumed"), "w", encoding="utf-8") as file:
            file.write(str(consumed))
        return keys

    def change_dp(self, dp):
        before = os.readlink(self.at("head"))
        self.job.set_layout(dp=dp)
        wait_for(lambda: os.readlink(self.at("head")) != before, f"dp {dp}")

    def check(self, reader, write, in_batch=list):
        """Every sample once, in one order, under dp = 2 and then under 1. `in_batch`: what it leaves of that in a batch."""
        self.begin(write, dp=2)
        order = [key for step in zip(*[self.steps_of(rank, 2) for rank in range(2)]) for local in step for key in local]
        self.assertEqual(sorted(order), list(range(SAMPLES)))
        keys = self.read(reader, 2, 12)
        self.change_dp(1)
        keys += self.read(reader, 1, SAMPLES // BATCH - 12)
        steps, expected = ([in_batch(some[i:i + BATCH]) for i in range(0, SAMPLES, BATCH)] for some in (keys, order))
        self.assertEqual(steps, expected)
        self.assertEqual(len(keys), SAMPLES)

    def steps_of(self, rank, size):
        ids, each = ids_of(self.at(f"head/rank-{rank:03}/ids.u64")), BATCH // size
        return [ids[i:i + each] for i in range(0, len(ids), each)]

    def test_webdataset(self):
        if not optional("webdataset"):
            self.skipTest("webdataset is not installed")
        self.check(read_webdataset, lambda directory: write_shards(directory, SAMPLES, 32))

    def test_streaming(self):
        if not optional("torch") or not optional("streaming"):
            self.skipTest("mosaicml-streaming or torch is not installed")
        # It deals a batch out to the ranks in turn.
        self.check(read_streaming, lambda directory: write_shards(directory, SAMPLES, 32), in_batch=sorted)

    def test_datasets(self):
        if not optional("datasets"):
            self.skipTest("datasets is not installed")
        self.check(read_datasets, write_jsonl)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("read_"):
        print()
        print(json.dumps(globals()[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        mount.main()
