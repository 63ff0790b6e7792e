#!/usr/bin/env python3
"""Checkpoints of many tensors and of many writers: removed, and listed for all ranks of a layout.

    PTC_BIN_DIR=$PWD/build/bin build/venv/bin/python tests/bench/counts.py [--tensors 12000] [--writers 64] [--rounds 3]

`rm -r` takes a checkpoint apart name by name, as any directory; of a tenth of the tensors, too: what a name costs should not
grow with their number. Baseline: the same names, empty, on a tmpfs. `ls` of all ranks of a layout that nobody has looked at
is of what dcp.save would have written by so many processes, rows of each tensor; baseline: of the same in one safetensors.
"""
import io
import os
import pickle
import subprocess
import sys

import bench
from bench import mount

torch = mount.require("torch")
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata)

LAYOUT = "tp8-pp16-dp8"


def names_below(top):
    """(path from there, whether a directory) of all, the outer ones first."""
    for here, directories, files in os.walk(top):
        for names, is_directory in ((directories, True), (files, False)):
            yield from ((os.path.relpath(os.path.join(here, name), top), is_directory) for name in names)


def remove(path):
    subprocess.run(["rm", "-r", path], check=True)


def removal(daemon, tmpfs, count):
    """Seconds for a name here, and on the tmpfs."""
    job = daemon.job(f"rm{count}")
    bench.Writer([(f"layers.{i // 100}.experts.{i % 100}.w.weight", "BF16", (2, 2)) for i in range(count)]).write(
        job.incoming("base") + "/rank/0/model.safetensors")
    job.commit("base")
    names, same = list(names_below(job.checkpoint("base"))), f"{tmpfs}/{count}"
    os.mkdir(same)
    for name, is_directory in names:
        if is_directory:
            os.mkdir(f"{same}/{name}")
        else:
            with open(f"{same}/{name}", "w", encoding="utf-8"):
                pass
    return bench.seconds(remove, job.checkpoint("base")) / len(names), bench.seconds(remove, same) / len(names)


def write_dcp(directory, tensors, writers):
    os.makedirs(directory)
    tables, places, contents = {}, {}, {}
    files = [open(f"{directory}/__{writer}_0.distcp", "wb") for writer in range(writers)]  # pylint: disable=consider-using-with
    for name, _, shape in tensors:
        rows, chunks = -(-shape[0] // writers), []
        for writer, begin in enumerate(range(0, shape[0], rows)):
            part = (min(rows, shape[0] - begin), *shape[1:])
            if part not in contents:
                archive = io.BytesIO()
                torch.save(torch.zeros(part, dtype=torch.bfloat16), archive)
                contents[part] = archive.getvalue()
            start = torch.Size((begin, *(0 for _ in shape[1:])))
            places[MetadataIndex(name, start, len(chunks))] = _StorageInfo(
                f"__{writer}_0.distcp", files[writer].tell(), len(contents[part]))
            files[writer].write(contents[part])
            chunks.append(ChunkStorageMetadata(start, torch.Size(part)))
        tables[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(shape), chunks)
    for file in files:
        file.close()
    with open(directory + "/.metadata", "wb") as file:
        pickle.dump(Metadata(tables, {name: (name,) for name in tables}, places), file)


def listing(daemon, writers):
    """Seconds of a dcp.save's, and of one safetensors'."""
    config, tensors = bench.llama(16, 512, heads=32, key_value_heads=8, vocabulary=1024)
    dcp, one = daemon.job("dcp"), daemon.job("one")
    write_dcp(dcp.incoming("base"), tensors, writers)
    bench.write_json(dcp.incoming("base") + "/config.json", config)
    bench.Writer(tensors).write(one.incoming("base") + "/rank/0/model.safetensors")
    bench.write_json(one.incoming("base") + "/rank/0/config.json", config)
    for job in (dcp, one):
        job.commit("base")
    return [bench.seconds(os.listdir, job.checkpoint("base", "layouts", LAYOUT, "rank")) for job in (dcp, one)]


def main():
    options, ratios = bench.options(__doc__, tensors=12000, writers=64, rounds=3), bench.Ratios()
    for _ in range(options.rounds):
        with mount.Mount("--memory", "4G") as daemon, bench.plain_tmpfs() as tmpfs:
            few, _ = removal(daemon, tmpfs, options.tensors // 10)
            many, baseline = removal(daemon, tmpfs, options.tensors)
            ratios.add("rm -r, a name / tmpfs", many / baseline)
            ratios.add(f"rm -r, a name of {options.tensors} / of {options.tensors // 10}", many / few)
            of_dcp, of_one = listing(daemon, options.writers)
            ratios.add(f"ls rank/ of {options.writers} writers / of one", of_dcp / of_one)
    ratios.print()


if __name__ == "__main__":
    sys.exit(main())
