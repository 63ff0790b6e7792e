"""torch.distributed.checkpoint on a mount: dcp.save into a checkpoint, dcp.load out of it, into any mesh.

    dcp.save(state, storage_writer=ptc.Writer("/mnt/ptc/llama", "step100"))
    dcp.load(state, storage_reader=ptc.Reader("/mnt/ptc/llama/current"))

What is written are tensors, and not DCP's own files: each rank's boxes as safetensors, which the commit puts together.
So the checkpoint is there under every layout, and what a job of any kind saved can be loaded here.
"""
from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from .arrays import require_torch

require_torch("ptc.Writer and ptc.Reader")

# pylint: disable=wrong-import-position,wrong-import-order
import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, StorageMeta,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.planner import (LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner,
                                                  WriteItemType)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import owner, safetensors, state as states
from .arrays import torch_dtype
from .job import Job, find
from .loading import Checkpoint, TensorInfo, load_value, section_of
from .saving import contents, write_file
from .slices import Box

_OPTIMIZER_KEYS = ("state", "param_groups")


def _done(value: Any) -> Any:
    future: Any = Future()
    future.set_result(value)
    return future


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _section(path: Sequence[Any]) -> Tuple[Any, ...]:
    """The dict of a state that a value belongs to: ("model",) of model/layers.0.w, ("optim",) of optim/state/…"""
    for place, key in enumerate(path[:-1]):
        if key in _OPTIMIZER_KEYS:
            return tuple(path[:place])
    return tuple(path[:-1])


def _directories(paths: Iterable[Sequence[Any]]) -> Dict[Tuple[Any, ...], str]:
    """Where the files of each section of a state are, below the rank: the model's right there, also ("app", "model")
    where there is but one such; of a state without dicts all.
    """
    sections = {_section(path) for path in paths}
    models = {section for section in sections if section and section[-1] == "model"}
    if len(sections) == 1 and () in sections:
        models = sections
    elif len(models) > 1:
        models &= {("model",)}
    return {section: "" if section in models else re.sub(r"[^\w-]", "_", "-".join(map(str, section))) or "top"
            for section in sections}


class Writer(StorageWriter):
    """A storage writer of DCP: every rank's boxes into incoming/<name>, and the commit as its last step.

    One Writer can save again and again: dcp.save(state, checkpoint_id="step200", storage_writer=writer) names the
    checkpoint. DCP cuts as it likes, so the checkpoint counts as written by one rank, and the layout in force is made
    of it behind dcp.save: `current` leads there then, `ptc.load` and `Reader` of the job at once. `consumed`, `files`,
    `overwrite`: Job.save, as they are now. Values that are no tensors are saved by torch.save, as DCP does. Errors, on
    all ranks, as DCP tells them: CommitError, OSError.
    """

    def __init__(self, job: Union[str, os.PathLike, Job], name: Optional[str] = None, *, consumed: Optional[int] = None,
                 files: Optional[Mapping[str, Any]] = None, overwrite: bool = False) -> None:
        super().__init__()
        self._job = job if isinstance(job, Job) else Job(job)
        self._name = name
        self._consumed, self._files = consumed, contents(files, {states.FILE})
        self._overwrite = overwrite
        self._is_coordinator = True
        self._own = ""  # of incoming/, this save's

    def reset(self, checkpoint_id: Union[str, os.PathLike, None] = None) -> None:
        if checkpoint_id is None:
            return
        path = os.path.normpath(os.fspath(checkpoint_id))
        if os.path.dirname(path) and not self._is_here(path):
            raise ValueError(f"{path} is not in {self._job.path}, where this Writer saves")
        self._name = os.path.basename(path)

    def _is_here(self, path: str) -> bool:
        try:
            return os.path.samefile(find(path).job, self._job.path)
        except FileNotFoundError:
            return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._own = ""
        if not self._name:
            raise ValueError('a checkpoint wants a name: ptc.Writer(job, "step100"), or checkpoint_id="step100"')
        if is_coordinator:
            self._job.check_free(self._name, self._overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: List[SavePlan]) -> List[SavePlan]:
        self._own = self._job.take(self._name or "", self._overwrite)
        return [dataclasses.replace(plan, storage_data=(shard, self._own)) for shard, plan in enumerate(plans, start=1)]

    def _where(self) -> str:
        return self._job.incoming(self._own)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            if getattr(planner, "_enable_plan_caching", False):
                raise ValueError("ptc.Writer wants a plan for each save, and no planner with enable_plan_caching: the plan says "
                                 "which directory is this save's")
            shard, self._own = plan.storage_data
            self._job.remove_older(self._own)  # of attempts that were broken off, each rank on its node
            return self._write(plan, shard, planner)
        except BaseException:  # nothing stays of it
            if self._own:
                self._job.give_up(self._own)
            raise

    def _write(self, plan: SavePlan, shard: int, planner: SavePlanner) -> Any:
        paths = {fqn: tuple(path) for fqn, path in getattr(planner, "mappings", {}).items()}
        paths.update({item.index.fqn: (item.index.fqn,) for item in plan.items if item.index.fqn not in paths})
        directories = _directories(paths.values())
        results: List[WriteResult] = []
        boxes: Dict[Tuple[str, int], Dict[str, Tuple[Any, Tuple[int, ...]]]] = {}  # of a file
        for item in plan.items:
            fqn = item.index.fqn
            path = paths[fqn]
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, len(data.getbuffer()), (path, data.getvalue(), "")))
                continue
            section = _section(path)
            name = fqn[len(".".join(map(str, section))) + 1:] if section else fqn
            offset = tuple(item.tensor_data.chunk.offsets) if item.tensor_data else ()
            directory, file = directories[section], 1  # a rank's second box of a tensor is in a second file
            while name in boxes.setdefault((directory, file), {}):
                file += 1
            boxes[directory, file][name] = data, offset
            results.append(WriteResult(item.index, data.numel() * data.element_size(), (path, None, directory)))
        for (directory, file), tensors in boxes.items():
            last = max(number for other, number in boxes if other == directory)
            name = f"shard-{shard:05}-model-{file:05}-of-{last:05}.safetensors"
            written = safetensors.write(
                os.path.join(self._where(), "rank/0", directory, name),
                {key: tensor for key, (tensor, _) in tensors.items()},
                safetensors.boxes_metadata({key: offset for key, (_, offset) in tensors.items()}))
            try:
                written.finish()
            finally:
                os.close(written.file)
        return _done(results)

    def finish(self, metadata: Metadata, results: List[List[WriteResult]]) -> None:
        try:
            self._finish(results)
        finally:
            owner.release(self._where())

    def _finish(self, results: List[List[WriteResult]]) -> None:
        sections: Dict[str, Tuple[Any, ...]] = {}
        by_section: Dict[str, List[Sequence[Any]]] = {}
        values: Dict[str, str] = {}
        paths: Dict[str, List[Any]] = {}
        for result in (result for some in results for result in some):
            path, data, directory = result.storage_data
            fqn = result.index.fqn
            paths[fqn] = list(path)
            if data is not None:
                values[fqn] = base64.b64encode(data).decode()
                continue
            section = _section(path)
            file = os.path.join(directory, "model.safetensors")
            if sections.setdefault(file, section) != section:
                both = " and ".join(".".join(map(str, one)) or "the top" for one in (sections[file], section))
                raise ValueError(f"{both} would both be {file}")
            by_section.setdefault(section_of(file), []).append(path[len(section):])
        lists = sorted({tuple(path[:place]) for path in paths.values() for place, key in enumerate(path)
                        if isinstance(key, int)}, key=str)
        text = {
            "format": states.FORMAT, "flat": not any(sections.values()), "lists": lists, "values": {},
            "forms": {key: states.forms_of(some) for key, some in by_section.items()},
            "dcp": {"sections": {file: list(section) for file, section in sections.items()}, "values": values,
                    "paths": paths},
        }
        rank = os.path.join(self._where(), "rank/0")
        write_file(os.path.join(rank, states.FILE), json.dumps(text, separators=(",", ":")).encode())
        write_file(os.path.join(self._where(), "layout.json"), json.dumps({"tp": 1, "pp": 1, "dp": 1}).encode())
        if self._consumed is not None:
            write_file(os.path.join(self._where(), "consumed"), str(int(self._consumed)).encode())
        for name, content in self._files.items():
            write_file(os.path.join(rank, name), content)
        self._job.rename_into_checkpoints(self._own, overwrite=self._overwrite)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def storage_meta(self) -> Optional[StorageMeta]:
        return StorageMeta(checkpoint_id=self._name)


class Reader(StorageReader):
    """A storage reader of DCP: of a checkpoint, each rank the boxes that it wants, whatever wrote it.

    `path`: a checkpoint, or what leads there; a job, and its `current`, stand for the newest that is committed, and all
    ranks read that which the coordinator finds. dcp.load's checkpoint_id, if given, takes its place. Names are those
    that dcp.save was given. Where something else than `Writer` wrote it, each tensor goes by the name behind that of
    its file (optim.state…, of optim.safetensors), and by its own, where that is no other's.

    Values that are no tensors were pickled, and are loaded without running code, though DCP's planner would run it:
    `weights_only`=False is for those of whoever wrote the checkpoint is trusted. Errors: FileNotFoundError, KeyError,
    ValueError.
    """

    def __init__(self, path: Union[str, os.PathLike], *, weights_only: bool = True) -> None:
        super().__init__()
        self._path = path
        self._weights_only = weights_only
        self._checkpoint: Optional[Checkpoint] = None
        self._of_name: Dict[str, TensorInfo] = {}
        self._numbers: Dict[str, TensorInfo] = {}  # tensors that were numbers
        self._values: Dict[str, bytes] = {}
        self._by_megatron = False  # tensors in its files are a rank's, an optimizer's by numbers

    def reset(self, checkpoint_id: Union[str, os.PathLike, None] = None) -> None:
        self._checkpoint = None
        if checkpoint_id:
            self._path = checkpoint_id

    def _open(self, path: Union[str, os.PathLike, None] = None) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint(path or self._path)
            self._of_name, self._numbers, self._values = {}, {}, {}
            text = self._checkpoint.text or {}
            self._by_megatron = any(os.path.basename(file) == "model_optim_rng.pt" for file in self._checkpoint.files)
            own = text.get("dcp")
            self._name_tensors(self._checkpoint, text)
            if own:
                self._values = {fqn: base64.b64decode(data) for fqn, data in own["values"].items()}
            elif text:
                self._take_values(states.decode(text["values"]))
            else:
                self._take_values(self._checkpoint.values(self._weights_only), tensors_too=False)
        return self._checkpoint

    def _name_tensors(self, checkpoint: Checkpoint, text: Mapping[str, Any]) -> None:
        """By the names of sections, and by their own alone where no section has such a tensor; what a flat state had at
        the top, first by these.
        """
        own = (text.get("dcp") or {}).get("sections", {})
        names: List[Tuple[str, TensorInfo]] = []
        bare: List[Tuple[str, TensorInfo]] = []
        files = checkpoint.files
        for info in sorted(checkpoint.tensors.values(), key=lambda one: files.index(one.file)):
            if info.file in own:
                names.append((".".join(map(str, (*own[info.file], info.name))), info))
                continue
            names.append((f"{section_of(info.file)}.{info.name}", info))
            bare.append((info.name, info))
            if not text:  # the daemon leaves these out of what torch.save and DCP wrote
                bare.append((f"model.{info.name}", info))
                if info.file in checkpoint.inside:
                    inside = checkpoint.inside[info.file]
                    bare += [(f"{inside}.{info.name}", info), (f"{inside}.model.{info.name}", info)]
        for fqn, info in bare + names if text.get("flat") else names + bare:
            section = section_of(info.file)
            forms = text.get("forms", {}).get(section, ())
            number = bool(text.get("numbers")) and states.is_number(states.split(info.name, forms), text, section)
            if fqn not in self._of_name and fqn not in self._numbers:
                (self._numbers if number else self._of_name)[fqn] = info

    def _take_values(self, values: Mapping[str, Any], tensors_too: bool = True) -> None:
        for fqn, value in flatten_state_dict(dict(values))[0].items():
            if isinstance(value, torch.Tensor) and not tensors_too and (fqn in self._of_name or self._by_megatron):
                continue
            self._values[fqn] = _saved(value)
            self._of_name.pop(fqn, None)  # a tensor whose name alone is that of a value

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        checkpoint = self._open()
        known: Dict[str, Any] = {}
        for fqn, info in self._of_name.items():
            size = torch.Size(info.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            known[fqn] = TensorStorageMetadata(TensorProperties(torch_dtype(info.dtype)), size, [chunk])
        for fqn in (*self._values, *self._numbers):
            known.setdefault(fqn, BytesStorageMetadata())
        own = (checkpoint.text or {}).get("dcp")
        paths = {fqn: tuple(path) for fqn, path in own["paths"].items()} if own else {fqn: (fqn,) for fqn in known}
        return Metadata(known, planner_data=paths, storage_meta=StorageMeta(checkpoint_id=checkpoint.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: List[LoadPlan]) -> List[LoadPlan]:
        name = os.path.basename(self._open().path)
        return [dataclasses.replace(plan, storage_data=name) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        checkpoint = self._open()
        if plan.storage_data and plan.storage_data != os.path.basename(checkpoint.path):  # one was committed while ranks looked
            self._checkpoint = None
            checkpoint = self._open(os.path.join(os.path.dirname(checkpoint.path), plan.storage_data))
        with checkpoint.kept():
            self._read_items(checkpoint, plan, planner)
        return _done(None)

    def _read_items(self, checkpoint: Checkpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        for item in plan.items:
            fqn = item.storage_index.fqn
            if fqn not in self._of_name and fqn not in self._values and fqn not in self._numbers:
                raise KeyError(f"{checkpoint.path} has no {fqn}")
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._value(fqn))
                continue
            part = Box(tuple(item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            checkpoint.copy_into(target, self._of_name[fqn], part)
            planner.commit_tensor(item, target)

    def _value(self, fqn: str) -> io.BytesIO:
        """What a planner may unpickle: it asks for all that a pickle can do."""
        if fqn in self._numbers:
            return io.BytesIO(_saved(self._open().read(self._numbers[fqn]).item()))
        data = self._values[fqn]
        return io.BytesIO(_saved(load_value(fqn, data)) if self._weights_only else data)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Union[str, os.PathLike]) -> bool:
        return os.path.isdir(checkpoint_id)
