"""load, a rank's files as they lie in memory; Checkpoint, any part of any tensor."""
from __future__ import annotations

import base64
import contextlib
import errno
import io
import json
import mmap
import os
import re
import time
import urllib.parse
import warnings
from typing import Any, Dict, Iterator, List, Mapping, MutableMapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import device as gpus, group, in_place, safetensors, state as states
from .arrays import ITEM_BYTES, array_of, is_distributed, local, row_runs, torch_dtype, torch_or_none, type_of_numpy
from .job import find, stands_for
from .slices import Box, box, box_of, whole

PathLike = Union[str, os.PathLike]
_HEARD_SECONDS = 5
_VALUES = "values.pt"  # what the daemon has of DCP's own files, and of ZeRO's, beside tensors
_MODEL = "model.safetensors"  # and the tensors of DCP's
_NAMED = 10  # of what is left out of a file
_TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")
_CODE = "training_args.bin"  # of the Trainer's: no tensors, and a class of its own
_MARKS = (states.FILE, "config.json", "model_index.json", "latest", "latest_checkpointed_iteration.txt")


def load(dir: PathLike, device: Any = None, *, rank: Optional[int] = None, numpy: bool = False,
         copy: bool = False, shared: bool = False) -> Dict[str, Any]:
    """What `save` saved, as this rank has it under a layout: <job>/current, or …/layouts/<any layout>.

    A job, and its `current`, stand for the newest checkpoint that is committed, under the layout in force; all
    processes of torch.distributed get the same one, so they all make this call (unless they say their `rank`, and each
    looks for itself). `dir` may also be a checkpoint (the layout it was written in), a rank's directory, or one of
    Hugging Face files. Without `device`, and with "cpu", tensors are the file's own memory, mapped: nothing is read
    before it is used, ranks of a node share it, and writing to a tensor changes only this process' view. Otherwise they
    are copied to the device. Files of other writers are sections too: model.safetensors is {"model": {name: tensor}}, and
    so are all .npy together.

    `copy`: into memory of this process alone. So, and for a device, what the layout in force is not made of is read
    from where its bytes lie, and not computed first: the fastest way to all of a rank's state.

    `shared`: of a layout with "memory": "device" the tensors are what ptcfs has on this GPU, and nothing is copied. They are
    for reading: a kernel that writes to one ends all that the process does on GPUs. What is not there is copied.

    `rank`: of torch.distributed, or RANK, if not given. `numpy`: arrays of NumPy, as also where there is no PyTorch. Of
    what torch.save or PyTorch's own DCP wrote the values that are no tensors are loaded without running code; a state
    of one .pt (.pth, .bin, .ckpt, or a set of them) is what that holds. Types that NumPy has not, like bfloat16, are
    their bits there.

    A rank has what the layout gives it; of that `load_model_state` and `load_optimizer_state` make what a module holds
    on its own mesh. Errors: FileNotFoundError; ValueError (not what it should be; or there are more processes than the
    layout has ranks, or fewer, and no `rank` is given).
    """
    if shared and (numpy or device is None or not str(device).startswith("cuda")):
        raise ValueError("shared: what is in a GPU's memory is for that GPU: give device=\"cuda:0\", or leave out shared")
    processes = group.world_size_said() if rank is None else None
    where = _rank_directory(fixed(dir, rank is None), group.rank() if rank is None else rank, processes)
    with _of_one_commit(where):
        return _load(where, device, numpy or torch_or_none() is None, copy, shared)


def _load(where: str, device: Any, numpy: bool, copy: bool, shared: bool) -> Dict[str, Any]:
    text = read_text(where)
    dcp = (text or {}).get("dcp", {"sections": {}, "paths": {}})  # of Writer
    sections: Dict[str, Dict[str, Any]] = {}
    _check_place(where)
    origin = Origin.of(where)
    values = _values_of_dcp(dcp) if "values" in dcp and torch_or_none() is not None else []
    found = False
    for mapped, tensors in gpus.tensors_of_files(where, _files(where, (".safetensors",)), device, numpy, copy, shared):
        found = True
        file = os.path.relpath(mapped.path, where)
        section = section_of(file)
        for name, tensor in tensors:
            if origin is not None and not numpy:
                _remember(tensor, origin, file, name)
            fqn = ".".join([*map(str, dcp["sections"].get(file, ())), name])
            if file in dcp["sections"] and fqn in dcp["paths"]:
                values.append((dcp["paths"][fqn], tensor))
            else:
                sections.setdefault(section, {})[name] = tensor
        if file not in dcp["sections"]:
            sections.setdefault(section, {})
    if text is None and not found:
        return _saved_by_torch(where, device, copy) or _saved_one_by_one(where, device, copy, numpy)
    if text is None and torch_or_none() is not None:
        state = _with_values(where, dict(sections), copy)
        _merge(state, _torch_files_beside(where, device, copy))
        return state
    return states.unflatten(sections, text, numpy, values)


def fixed(path: PathLike, together: bool = False) -> str:
    """A path that stays what it is, whatever is committed meanwhile. Of a job, and its `current`, the newest checkpoint
    under the layout in force; if `together`, that which rank 0 finds, on all ranks. FileNotFoundError: there is none.
    """
    job = stands_for(path)
    if job is None:
        return os.path.realpath(path)

    def choose() -> str:
        newest = job.newest
        if newest is None:
            raise FileNotFoundError(errno.ENOENT, "nothing was committed yet", os.fspath(path))
        return os.path.relpath(newest, job.path)
    chosen = job.file(group.prepare().together(choose, here=True) if together and group.world_size() > 1 else choose())
    deadline = time.monotonic() + _HEARD_SECONDS
    while not os.path.isdir(chosen):  # rank 0 is on another node, and this one has not heard of it yet
        if time.monotonic() > deadline:
            raise FileNotFoundError(errno.ENOENT, "the newest checkpoint is not there under the layout in force: "
                                    + (job.error or "no reason is known"), chosen)
        time.sleep(0.05)
    return chosen


@contextlib.contextmanager
def _of_one_commit(where: str) -> Iterator[None]:
    """FileNotFoundError: what was read meanwhile may be of two checkpoints of the name."""
    found = re.fullmatch(r"(.+/checkpoints/[^/]+)/.+", where)
    meta = os.path.join(found[1], "meta.json") if found else None

    def committed() -> Optional[int]:
        with contextlib.suppress(OSError):
            return os.stat(meta).st_mtime_ns if meta else None
        return None
    before = committed()
    yield
    now = committed()
    if now not in (None, before):
        raise FileNotFoundError(errno.ENOENT, "another checkpoint was committed under this name while it was loaded", where)


def _saved_by_torch(where: str, device: Any, copy: bool) -> Dict[str, Any]:
    """What torch.save put into the files of a directory: of one file, or set, what that holds, of several by their names.
    Empty: there are none.
    """
    found: Dict[str, Any] = {}
    for path in _files(where, _TORCH_FILES) if torch_or_none() is not None else ():
        if not _is_torch_file(path):
            continue
        file = os.path.relpath(path, where)
        section = os.path.dirname(file).replace("/", "-") + "-" * ("/" in file) + section_of(os.path.basename(file))
        _merge(found, {section: load_file(path, device, mapped=not copy)})
    alone = next(iter(found.values()), None)
    return dict(alone) if len(found) == 1 and isinstance(alone, Mapping) else found


def _torch_files_beside(where: str, device: Any, copy: bool) -> Dict[str, Any]:
    """Those that have tensors of the checkpoint although files of safetensors are there, as of DeepSpeed the model's."""
    files = [os.path.relpath(path, where) for path in _files(where, _TORCH_FILES)]
    if not files or files == [_VALUES]:
        return {}
    try:
        counted = Checkpoint(where).files
    except FileNotFoundError:  # a copy elsewhere
        return {}
    return {section_of(file): load_file(os.path.join(where, file), device, mapped=not copy) for file in counted if file in files}


def _is_torch_file(path: str) -> bool:
    """What is called .bin or .ckpt may be anything, unless it begins as torch.save's files do."""
    if not path.endswith((".bin", ".ckpt")):
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"PK\3\4" and os.path.basename(path) != _CODE


def _saved_one_by_one(where: str, device: Any, copy: bool, numpy: bool) -> Dict[str, Any]:
    """Files of .npy: {"model": {name: tensor}}. FileNotFoundError: there are none either."""
    found: Dict[str, Any] = {}
    for path in _files(where, (".npy",)):
        with open(path, "rb") as file:
            memory: Any = bytearray(file.read()) if copy else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            descr, shape, data = safetensors.read_header_of_npy(memory)
            dtype = _said_dtype(path) or type_of_numpy(descr)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        name = ".".join(map(urllib.parse.unquote, os.path.relpath(path, where)[:-len(".npy")].split(os.sep)))
        tensor = array_of(memory, dtype, shape, data, numpy)
        found[name] = tensor if device is None or numpy else tensor.to(device)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no tensors are here", where)
    return {"model": found}


def _said_dtype(path: str) -> str:
    """Of an .npy what the daemon says its type is, as NumPy does not know all. Empty: nobody says."""
    try:
        return os.getxattr(path, "user.ptc.dtype").decode()
    except OSError:
        return ""


def _with_values(where: str, state: Dict[str, Any], copy: bool) -> Dict[str, Any]:
    """With what the daemon has beside the tensors of other writers. What PyTorch's own DCP wrote is the state that it saved,
    in whatever directory; of several such their sections, or, where these have one name, by directories.
    """
    saved = _saved_with_values(where)
    made: Dict[str, Dict[str, Any]] = {}
    for directory in saved.values:
        values = load_file(os.path.join(where, directory, _VALUES), None, mapped=not copy)
        if os.path.join(directory, _MODEL) not in saved.by_dcp:
            _merge(state, {directory.replace(os.sep, "-"): values} if directory else values)  # of ZeRO's files
    for file, inside in saved.by_dcp.items():
        values = {}
        if os.path.dirname(file) in saved.values:
            values = load_file(os.path.join(where, os.path.dirname(file), _VALUES), None, mapped=not copy)
        made[section_of(file)] = _saved_by_dcp(state.pop(section_of(file), {}), values, inside)
    keys = [key for one in made.values() for key in one] + list(state)
    if len(set(keys)) < len(keys):
        return {**state, **made}
    return {key: value for one in (state, *made.values()) for key, value in one.items()}


class _Saved(NamedTuple):
    """What a rank's directory has of files that neither `save` nor a library of safetensors wrote."""
    values: List[str]  # directories with what is no tensor
    by_dcp: Dict[str, str]  # files of what PyTorch's own DCP wrote, and the key above their names


def _saved_with_values(where: str) -> _Saved:
    files = {os.path.relpath(path, where) for path in _files(where, (_MODEL, _VALUES))}
    values = sorted(os.path.dirname(file) for file in files if os.path.basename(file) == _VALUES)
    models = {file for file in files if os.path.basename(file) == _MODEL}
    if (models or values) and re.fullmatch(r".+/checkpoints/[^/]+/layouts/[^/]+/rank/\d+", where):
        with contextlib.suppress(OSError):
            checkpoint = Checkpoint(where)
            values = [directory for directory in values if os.path.join(directory, _VALUES) not in checkpoint.written]
            return _Saved(values, {file: checkpoint.inside.get(file, "") for file in checkpoint.by_dcp if file in models})
    return _Saved(values, {file: "" for file in sorted(models) if os.path.dirname(file) in values})  # a copy elsewhere


def _saved_by_dcp(names: Mapping[str, Any], values: Any, inside: str) -> Dict[str, Any]:
    """What PyTorch's own writer of DCP saved: the daemon has its tensors in one file, the optimizer's by their whole
    names, and the values beside. `inside`: what encloses it.
    """
    state: Dict[str, Any] = {}
    model: Dict[str, Any] = {}
    for name, tensor in names.items():
        found = re.fullmatch(r"(optim\w*)\.state\.(.+)\.(\w+)", name)
        of_megatron = re.fullmatch(r"(optim\w*)\.state\.(\w+)\.(.+)", name)  # the other way round
        if of_megatron and of_megatron[3] in names:
            found = of_megatron
        if found:
            states.put(state, (found[1], "state", found[2], found[3]), tensor)
        else:
            model[name] = tensor
    state = {"model": model, **state} if model else state
    state = {inside: state} if inside else state
    _merge(state, values if isinstance(values, Mapping) else {})
    return state


def _merge(into: MutableMapping[Any, Any], more: Mapping[Any, Any]) -> None:
    """Adds what is not there yet, at any depth."""
    for key, value in more.items():
        known = into.get(key)
        if isinstance(value, Mapping) and isinstance(known, MutableMapping):
            _merge(known, value)
        else:
            into.setdefault(key, value)


def load_file(path: str, device: Any, weights_only: bool = True, mapped: bool = True) -> Any:
    """What torch.save put into a file, where it stays if it is `mapped`. Objects of classes that torch does not know are left
    out, with a warning that names them. ValueError: the rest cannot be had without running code, either.
    """
    import torch

    def load(stand_ins: Sequence[Any] = ()) -> Any:
        with torch.serialization.safe_globals(list(stand_ins)) if stand_ins else contextlib.nullcontext():
            return torch.load(path, map_location=device or "cpu", mmap=mapped, weights_only=weights_only)
    try:
        return load()
    except Exception as error:  # pylint: disable=broad-except
        with contextlib.suppress(Exception):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path) if weights_only else []
            content = load([(type(name, (_Opaque,), {}), name) for name in unknown])
            if unknown and not isinstance(content, _Opaque):
                left_out: List[str] = []
                content = _without_opaque(content, (), left_out)
                warnings.warn(f"{path} is loaded without {', '.join(left_out[:_NAMED])}{' and more' * (len(left_out) > _NAMED)}: to "
                              "make such objects is to run code. If you trust who wrote it: torch.load of that file", stacklevel=2)
                return content
        raise ValueError(f"{path} cannot be loaded without running code ({why_not(error)}). If you trust who wrote it: "
                         "torch.load of that file, or torch.serialization.add_safe_globals") from None


class _Opaque:
    """In the place of an object of a class that is not known: takes all that it is made of, and does nothing."""

    def __new__(cls, *_args: Any, **_named: Any) -> "_Opaque":
        return object.__new__(cls)

    def __init__(self, *_args: Any, **_named: Any) -> None:
        pass

    def __setstate__(self, _state: Any) -> None:
        pass


def _without_opaque(value: Any, path: Tuple[Any, ...], left_out: List[str]) -> Any:
    """Of dicts their keys are left out; in lists and tuples None is in their places."""
    if isinstance(value, _Opaque):
        left_out.append(f"{'.'.join(map(str, path))} ({type(value).__name__})")
        return None
    if isinstance(value, MutableMapping):
        for key, one in list(value.items()):
            kept = _without_opaque(one, (*path, key), left_out)
            if isinstance(one, _Opaque) or isinstance(key, _Opaque):
                del value[key]
            else:
                value[key] = kept
    elif isinstance(value, list):
        value[:] = [_without_opaque(one, (*path, place), left_out) for place, one in enumerate(value)]
    elif type(value) is tuple:  # pylint: disable=unidiomatic-typecheck
        return tuple(_without_opaque(one, (*path, place), left_out) for place, one in enumerate(value))
    return value


def _check_place(where: str) -> None:
    """FileNotFoundError: it is in a job, but no place where a rank's files are; nothing below it is looked for. Or it is
    elsewhere, and not what was copied from one.
    """
    try:
        job = find(where).job
    except FileNotFoundError:
        return _check_copy(where)
    parts = os.path.relpath(where, job).split(os.sep)
    if parts[0] != "incoming" and not {"rank", "hf"} & set(parts[:-1]) and parts[-1] != "hf":
        raise FileNotFoundError(
            errno.ENOENT, "this is neither a job, nor a checkpoint, a layout, or a rank's directory of one", where)


def _check_copy(where: str) -> None:
    """FileNotFoundError: in the directory is nothing that a checkpoint has; or it has only others in it, and below is what
    none has, as in one that holds all kinds of things.
    """
    tensors = (".safetensors", *_TORCH_FILES, ".npy")
    names = os.listdir(where)
    if any(name in _MARKS or name.endswith((*tensors, ".index.json")) for name in names):
        return
    for top, _, below in os.walk(where):
        for name in below:
            if not name.endswith((*tensors, ".json", ".txt")):
                raise FileNotFoundError(
                    errno.ENOENT, f"this is no checkpoint: no {states.FILE}, config.json or file of tensors ("
                    f"{', '.join(tensors)}) is in it, and below it is {os.path.relpath(os.path.join(top, name), where)}", where)


def _values_of_dcp(text: Mapping[str, Any]) -> List[Tuple[List[Any], Any]]:
    """What `Writer` saved beside tensors, by torch.save; by path."""
    return [(text["paths"][fqn], load_value(fqn, base64.b64decode(data))) for fqn, data in text["values"].items()]


def load_value(name: str, data: bytes) -> Any:
    """What torch.save made of a value, without running code. ValueError: that cannot be."""
    import torch
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # pylint: disable=broad-except
        raise ValueError(
            f"{name} is no value that can be loaded without running code ({why_not(error)}). If you trust who wrote "
            "it: dcp.load with ptc.Reader(path, weights_only=False), or torch.serialization.add_safe_globals") from None


def why_not(error: Exception) -> str:
    """Of torch.load's long text the line that says what it was about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if re.search("GLOBAL|nsupported|allowed", line)]
    return (told or lines or [type(error).__name__])[0]


def read_text(where: str) -> Optional[Dict[str, Any]]:
    """ptc.json of a rank's directory."""
    try:
        with open(os.path.join(where, states.FILE), encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def section_of(file: str) -> str:
    """optim.safetensors, optim/model.safetensors, optim.pt → optim; shards of a set are one."""
    directory, name = os.path.split(file)
    if directory:
        return directory.replace("/", "-")
    stem = os.path.splitext(name)[0]
    shard = re.fullmatch(states.SHARD, stem)
    return shard[1] if shard else stem


def _files(where: str, endings: Tuple[str, ...]) -> Iterator[str]:
    """Those of a rank that are called so. OSError: the directory, or one in it, is not there any more."""
    def failed(error: OSError) -> None:
        if error.filename == where or not isinstance(error, PermissionError):
            raise error
    for top, directories, names in os.walk(where, onerror=failed):
        if "tensors" in directories and top == where:
            directories.remove("tensors")  # the same, one by one
        for name in sorted(names):
            if name.endswith(endings):
                yield os.path.join(top, name)


def _rank_directory(where: str, rank: int, processes: Optional[int] = None) -> str:
    """That of a rank. ValueError: there are other than so many, and which of them is wanted is not clear."""
    if not os.path.isdir(where):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
    if os.path.isdir(os.path.join(where, "rank")):
        found = os.path.join(where, "rank", str(rank))
        if processes is not None:
            _check_processes(where, len(os.listdir(os.path.dirname(found))), processes)
        if not os.path.isdir(found):
            ranks = len(os.listdir(os.path.dirname(found)))
            raise FileNotFoundError(errno.ENOENT, f"there is no rank {rank} of {ranks}", found)
        return found
    if os.path.isfile(os.path.join(where, "meta.json")):
        with open(os.path.join(where, "meta.json"), encoding="utf-8") as file:
            return _rank_directory(os.path.join(where, "layouts", json.load(file)["written_as"]), rank, processes)
    return where


def _check_processes(where: str, ranks: int, processes: int) -> None:
    """ValueError: there are not as many processes as ranks, and these do not all hold the same."""
    name = os.path.basename(where)
    if processes == ranks or (processes < ranks and re.fullmatch(r"tp1-pp1-dp\d+(-cp\d+)?", name)):
        return
    some = f"{processes} process{'es load' if processes > 1 else ' loads'}"
    raise ValueError(
        f"{some}, but layout {name} has {ranks} ranks, each with a part of its own ({where}): save a layout of {processes} "
        "(ptc.Job(…).set_layout), load such a one by its name (…/layouts/…), say which rank's part is wanted (rank=), or "
        "read wholes (ptc.Checkpoint, ptc.Reader)")


class Origin:
    """Where what `load` gives is from: a checkpoint, and which part of it the layout gave this rank."""

    def __init__(self, path: str, sizes: Dict[str, int], rank: int) -> None:
        self.path = path
        self._sizes, self._rank = sizes, rank
        self._committed = self._time()
        self._checkpoint: Optional[Checkpoint] = None

    def _time(self) -> int:
        """Of the commit: another of the name has another."""
        return os.stat(os.path.join(self.path, "meta.json")).st_mtime_ns

    def checkpoint(self) -> "Checkpoint":
        """That of which the tensors are. FileNotFoundError: it is gone, or another has its name."""
        if self._checkpoint is None:
            checkpoint = Checkpoint(self.path)
            if self._time() != self._committed:
                raise FileNotFoundError(errno.ENOENT, "another checkpoint was committed under this name since it was loaded; "
                                        "load that", self.path)
            self._checkpoint = checkpoint
        return self._checkpoint

    def part_of(self, value: Any, file: str, name: str) -> "Optional[Tuple[Box, Tuple[int, ...]]]":
        """Which part of which whole the layout gave; None: it is cut by rules, or the checkpoint is gone."""
        try:
            info = self.checkpoint().tensors.get((file, name))
        except FileNotFoundError:
            return None
        held = None if info is None else self._held(info, value)
        return None if info is None or held is None else (held, info.shape)

    @classmethod
    def of(cls, where: str) -> "Optional[Origin]":
        """None: it is no rank's directory of a layout, or a copy of one elsewhere, or names in it are those of a stage."""
        found = re.fullmatch(r"(.+/checkpoints/[^/]+)/layouts/([^/]+)/rank/(\d+)", where)
        if found is None or not os.path.isfile(os.path.join(found[1], "meta.json")):
            return None
        name, listed, _ = found[2].partition("+")  # of an older ptcfs what is behind it says other things, too
        sizes = {key: int(size) for key, size in re.findall(r"(?:^|-)(tp|pp|dp|ep|etp|cp|vpp|shard)(\d+)", name)}
        if (listed or "-naming_stage" in name) and sizes.get("pp") != 1:
            return None
        if re.search("-over_cp(-|$)", name) and "-order_" not in name and "cp" in sizes:  # neighbours share rows, cp fastest
            sizes["shard"] = sizes.get("shard", sizes.get("dp", 1)) * sizes.pop("cp")
        # What an older ptcfs called otherwise is not known to be cut by rows alone, nor among how many ranks.
        return cls(found[1], sizes if re.search("-fsdp(-|$)", name) else {}, int(found[3]))

    def part_for(self, target: Any, value: Any, file: str, name: str, version: Optional[int]) -> Any:
        """What `target` holds of the tensor of which the layout gave `value`, where that is a tensor of its shape.
        ValueError: it has been changed since, and another part of it is wanted.
        """
        info = self.checkpoint().tensors.get((file, name))
        if info is None or tuple(target.shape) != info.shape:
            return value
        wanted, held = box_of(target), self._held(info, value)
        if held == wanted:
            return value
        if held == whole(info.shape):
            return value[wanted.slices]
        if _version(value) != version:
            raise ValueError(f"{name} in {file} was changed since it was loaded, and of its whole this module holds another "
                             "part, which would be read as it was saved: change it in the module, after loading")
        return self.checkpoint().read(info, wanted)

    def _held(self, info: "TensorInfo", value: Any) -> Optional[Box]:
        """Which part that is; None: it is cut by rules, or as ZeRO-1 does."""
        if tuple(value.shape) == info.shape:
            return whole(info.shape)
        sizes = self._sizes
        if {"tp", "pp", "dp"} <= set(sizes) <= {"tp", "pp", "dp", "shard"} and sizes["tp"] == sizes["pp"] == 1:
            parts = sizes.get("shard", sizes["dp"])
            step = -(-info.shape[0] // parts)
            begin = min(self._rank % parts * step, info.shape[0])
            rows = Box((begin, *(0 for _ in info.shape[1:])), (min(step, info.shape[0] - begin), *info.shape[1:]))
            if rows.shape == tuple(value.shape):
                return rows
        return None


_origins: Any = None  # tensor → origin, file and name, as long as it lives; no attribute: torch.save would save that


def _remember(tensor: Any, *origin: Any) -> None:
    global _origins  # pylint: disable=global-statement
    if _origins is None:
        from torch.utils.weak import WeakTensorKeyDictionary
        _origins = WeakTensorKeyDictionary()
    _origins[tensor] = (*origin, _version(tensor))


def _version(tensor: Any) -> Optional[int]:
    """How often it was written to. None: nobody counts."""
    try:
        return int(tensor._version)  # pylint: disable=protected-access
    except (AttributeError, RuntimeError):  # an inference tensor
        return None


def part_of(tensor: Any) -> "Optional[Tuple[Box, Tuple[int, ...]]]":
    """Of a tensor that `load` gave: which part of which whole it is. None: it did not, or cut it by rules."""
    origin = None if _origins is None or not hasattr(tensor, "dim") else _origins.get(tensor)
    return None if origin is None else origin[0].part_of(tensor, *origin[1:3])


def part_for(target: Any, value: Any) -> Any:
    """What a tensor of a module, or a DTensor of which it holds a part, takes of what `load` gave; a whole is cut, and what
    the module has whole is taken as it is. FileNotFoundError: the checkpoint was removed meanwhile, or replaced.
    ValueError: `load` did not give it, and which part it is cannot be told.
    """
    if not is_distributed(target) and tuple(value.shape) == tuple(target.shape):
        return value
    origin = None if _origins is None else _origins.get(value)
    if origin is not None:
        return origin[0].part_for(target, value, *origin[1:])
    if not is_distributed(target) or value.dim() == 0:
        return value
    wanted = box_of(target)
    if tuple(value.shape) == tuple(target.shape):
        return value[wanted.slices]
    if tuple(value.shape) == wanted.shape and value.numel() > 1:
        raise ValueError(f"a tensor of {tuple(value.shape)} may be any part of {tuple(target.shape)}: give the very tensors "
                         "that ptc.load gave (values become of the module's type and device by themselves), or wholes")
    return value


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint, as a whole."""
    name: str
    file: str  # that its writer put it into
    dtype: str  # of safetensors
    shape: Tuple[int, ...]
    path: str  # of its .npy
    number: int  # in meta.json


def _checked(info: TensorInfo, part: Optional[Box]) -> Box:
    """A box of a tensor, or all of it. ValueError: it has no such box."""
    part = part or whole(info.shape)
    if not len(part.offset) == len(part.shape) == len(info.shape) or not all(
            0 <= begin and 0 <= extent and begin + extent <= all_of_it
            for begin, extent, all_of_it in zip(part.offset, part.shape, info.shape)):
        raise ValueError(f"{info.name} is {info.shape}, and has no {part}")
    return part


class Checkpoint:
    """Tensors of a checkpoint as wholes, of which any rank under any layout takes what it wants.

    `path`: a checkpoint, or anything in it or that leads there; of a job, and its `current`, the newest that is
    committed. Which it is stays so, whatever is committed then; of several processes each finds its own, so give them
    one path (`Job.newest`) where a save may come between. What was read of it stays mapped, also when it is removed; of
    one that is gone, or another has its name, nothing is read any more (FileNotFoundError). Threads: not to be shared
    without a lock.
    """

    def __init__(self, path: PathLike) -> None:
        place = find(fixed(path))
        if not place.name:
            raise FileNotFoundError(errno.ENOENT, "this is in a job, but in no checkpoint of it", os.fspath(path))
        self.path = os.path.join(place.job, "checkpoints", place.name)
        with open(os.path.join(self.path, "meta.json"), encoding="utf-8") as file:
            self._committed = os.fstat(file.fileno()).st_mtime_ns
            self.meta: Dict[str, Any] = json.load(file)
        self.tensors: Dict[Tuple[str, str], TensorInfo] = {}
        self._parts: Optional[in_place.Parts] = None  # not asked for yet
        self._keeping = 0
        for number, one in enumerate(self.meta["tensors"]):
            info = TensorInfo(one["name"], one["file"], one["dtype"], tuple(one["shape"]), one["path"], number)
            self.tensors[info.file, info.name] = info
        self.written = {one["path"] for one in self.meta["files"]}
        self.by_dcp: List[str] = []  # files in which the daemon has what PyTorch's own DCP wrote
        self.inside: Dict[str, str] = {}  # by file: the key above the model that its names are without
        for one in self.meta["files"]:
            file = one["path"]
            if file.endswith(".distcp") and "checksum" not in one:
                file = os.path.join(os.path.dirname(file), _MODEL)
                if file not in self.by_dcp:
                    self.by_dcp.append(file)
            if "inside" in one:
                self.inside[file] = one["inside"]
        self.text = read_text(os.path.join(self.path, "layouts", self.meta["written_as"], "rank", "0"))
        self._check()

    def _check(self) -> None:
        """FileNotFoundError: it is gone, or another has its name, of which something may have been read."""
        if os.stat(os.path.join(self.path, "meta.json")).st_mtime_ns != self._committed:
            raise FileNotFoundError(errno.ENOENT, "another checkpoint was committed under this name", self.path)

    @property
    def files(self) -> List[str]:
        """Those that tensors are in; the model's first."""
        return sorted({file for file, _ in self.tensors}, key=lambda one: (one != "model.safetensors", one))

    def info(self, name: str, file: Optional[str] = None) -> TensorInfo:
        """By its name in a file; without one, in the model's, else in the only one that has it. KeyError: none has, or
        several.
        """
        if file is None:
            files = [one for one in self.files if (one, name) in self.tensors]
            if len(files) > 1 and files[0] != "model.safetensors":
                raise KeyError(f"{self.path} has a tensor {name} in {' and in '.join(files)}: say of which file")
            file = files[0] if files else None
        if file is None or (file, name) not in self.tensors:
            raise KeyError(f"{self.path} has no tensor {name}" + (f" in {file}" if file else ""))
        return self.tensors[file, name]

    def values(self, weights_only: bool = True) -> Dict[str, Any]:
        """Of what torch.save or PyTorch's own DCP wrote, what rank 0 had in those files, tensors too; nested.
        ValueError: it cannot be loaded without running code.
        """
        where = os.path.join(self.path, "layouts", self.meta["written_as"], "rank", "0")
        found: Dict[str, Any] = {}
        beside = [os.path.relpath(path, where) for path in _files(where, (_VALUES,))] if os.path.isdir(where) else []
        made = [file for file in beside if os.path.basename(file) == _VALUES and file not in self.written]
        for file in (*made, *self.files):
            if file.endswith(_TORCH_FILES) and os.path.isfile(os.path.join(where, file)):
                content = load_file(os.path.join(where, file), None, weights_only)
                _merge(found, content if isinstance(content, Mapping) else {section_of(file): content})
        self._check()
        return found

    def read(self, tensor: Union[str, TensorInfo], part: Optional[Box] = None, *, mesh: Any = None,
             placements: Optional[Sequence[Any]] = None) -> Any:
        """A tensor, or a box of it, mapped: read(name), read(name, Box((0, 64), (128, 64))), read(name, mesh=m,
        placements=p).

        The box of a mesh and placements is this rank's. Nothing but the box is read when it is used. KeyError;
        ValueError: the tensor has no such box.
        """
        info = self.info(tensor) if isinstance(tensor, str) else tensor
        if mesh is not None:
            part = box(info.shape, mesh, placements or ())
        part = _checked(info, part)
        as_numpy = torch_or_none() is None
        found = self._made_of(info, part)
        if len(found) == 1:
            with contextlib.suppress(OSError):
                return self._where_it_lies().array(*found[0], info.dtype, as_numpy)
        memory, data = self._map(info)
        run = row_runs(info.shape, part.offset, part.shape)
        size = ITEM_BYTES[info.dtype]
        if run is not None:
            return array_of(memory, info.dtype, part.shape, data + run[0] * size, as_numpy)
        return array_of(memory, info.dtype, info.shape, data, as_numpy)[part.slices]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """As long as this is, files that `copy_into` reads stay mapped for its next call."""
        self._keeping += 1
        try:
            yield
        finally:
            self._keeping -= 1
            if not self._keeping and self._parts is not None:
                self._parts.let_go()

    def copy_into(self, target: Any, tensor: Union[str, TensorInfo], part: Optional[Box] = None) -> None:
        """Copies a tensor, or a box of it, into one of PyTorch's of that shape, each byte once from where it lies. KeyError;
        ValueError: the tensor has no such box, or the target another shape.
        """
        with self.kept():
            self._copy(target, tensor, part)

    def _copy(self, target: Any, tensor: Union[str, TensorInfo], part: Optional[Box]) -> None:
        info = self.info(tensor) if isinstance(tensor, str) else tensor
        part = _checked(info, part)
        if tuple(target.shape) != tuple(part.shape):
            raise ValueError(f"a tensor of {tuple(target.shape)} cannot take {part} of {info.name}")
        found = self._made_of(info, part)
        try:
            pieces = [(common, self._where_it_lies().array(one, common, info.dtype, False, shared=True))
                      for one, common in found]
        except OSError:
            pieces = []
        if not pieces:
            target.copy_(self.read(info, part))
        for common, piece in pieces:
            at = tuple(slice(begin - first, begin - first + extent) for begin, first, extent
                       in zip(common.offset, part.offset, common.shape))
            target[at].copy_(piece)

    def _where_it_lies(self) -> in_place.Parts:
        if self._parts is None:
            self._parts = in_place.Parts(self.path, self._committed)
        return self._parts

    def _made_of(self, info: TensorInfo, part: Box) -> List[Tuple[in_place.Part, Box]]:
        own = self.tensors.get((info.file, info.name))  # `info` may be another checkpoint's
        if own is None or (own.dtype, own.shape) != (info.dtype, info.shape) or not part.elements:
            return []
        return self._where_it_lies().of(own.number, part)

    def fill(self, state: Mapping[str, Any], file: Optional[str] = None) -> None:
        """Copies into the tensors of a flat state, by name: a module's state_dict(), DTensors too, of which this
        rank's part.

        Values become of the targets' types. KeyError: one is not in the checkpoint; ValueError: it has another shape,
        or is on the meta device.
        """
        with self.kept():
            self._fill(state, file)

    def _fill(self, state: Mapping[str, Any], file: Optional[str]) -> None:
        for name, target in state.items():
            info = self.info(name, file)
            if tuple(target.shape) != info.shape:
                raise ValueError(f"{name} is {info.shape} in {self.path}, not {tuple(target.shape)}")
            into = local(target)
            if into.is_meta:
                raise ValueError(f"{name} is on the meta device and cannot take values: module.to_empty(device=…) comes "
                                 "first")
            if into.numel():
                self.copy_into(into, info, box_of(target))

    def dtensor(self, name: str, mesh: Any, placements: Sequence[Any], device: Any = None) -> Any:
        """A tensor as DTensor on a mesh; each rank reads its own box."""
        import torch
        from torch.distributed.tensor import DTensor
        info = self.info(name)
        wanted = box(info.shape, mesh, placements)
        part = torch.empty(wanted.shape, dtype=torch_dtype(info.dtype), device="cpu")
        self.copy_into(part, info, wanted)
        stride = 1
        strides: List[int] = []
        for extent in reversed(info.shape):
            strides.insert(0, stride)
            stride *= extent
        return DTensor.from_local(part if device is None else part.to(device), mesh, placements, run_check=False,
                                  shape=torch.Size(info.shape), stride=tuple(strides))

    def _map(self, info: TensorInfo) -> Tuple[Any, int]:
        # Not kept: a mapping of Python's has a descriptor, and there may be more tensors than a process may have of these.
        with open(os.path.join(self.path, info.path), "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._check()
        _, shape, data = safetensors.read_header_of_npy(memory)
        if shape != info.shape:
            raise ValueError(f"{info.path} of {self.path} has shape {shape}, not {info.shape}")
        return memory, data
