"""A nested state as tensors with flat names, which ptcfs can cut, and a text of all the rest; and back.

    {"model": {"layers.0.w": W}, "optim": {"state": {"layers.0.w": {"exp_avg": E}}, "lr": 0.1}, "step": 7, "rng": R}

becomes

    model.safetensors   layers.0.w
    optim.safetensors   state.layers.0.w.exp_avg
    ptc.json            lr, step, rng, and how names are put together again

A dict of tensors at the top, a *section*, is a file. Below it keys are joined by dots. A tensor's path has at most one
key that holds dots, a parameter's name; the keys before and behind it are its *form*, and the forms are what ptc.json
keeps: a rank that holds other parameters under another layout finds its paths by the same forms. Tensors at the top
beside sections, and all of the entries named in `OWN`, are the rank's own: they are kept in ptc.json, byte for byte,
and go where other files of a rank go. A state of nothing but tensors at the top is one section, `model`.

Numbers beside the tensors of a parameter (an optimizer's count that is an int) follow it as tensors do: they are such
of one element in the file, and ptc.json has their forms, by which they are numbers again. NumPy's scalars become
Python's. Texts and other values beside tensors are the rank's own.
"""
from __future__ import annotations

import base64
import re
import sys
import warnings
from typing import Any, Dict, Iterable, List, Mapping, MutableMapping, Optional, Sequence, Tuple

from .arrays import Bytes, array_of, is_array, is_distributed, torch_or_none

FORMAT = "ptc-state/1"
FILE = "ptc.json"
SHARD = r"(.+)-\d+-of-\d+"  # a file of a set: model-00001-of-00002
OWN = ("rng", "rng_state", "scheduler", "lr_scheduler", "loader", "dataloader")

Path = Tuple[Any, ...]
Form = Tuple[Tuple[str, ...], Tuple[str, ...], bool]  # keys before a parameter's name, behind it; whether there is one
Sections = Dict[str, Dict[str, Any]]
_MARK = "__ptc__"
_MUCH_BYTES = 1 << 24


def flatten(state: Mapping[str, Any]) -> Tuple[Sections, Dict[str, Any]]:
    """(section → flat name → tensor, what ptc.json holds). TypeError, ValueError: what cannot be put together again."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a dict of tensors and dicts, not a {type(state).__name__}")
    flat = bool(state) and all(is_array(value) for value in state.values())
    if flat:
        state = {"model": state}
    try:
        return _flatten(state, flat)
    except RecursionError:
        raise ValueError("the state is nested too deeply, or holds itself") from None


def _flatten(state: Mapping[str, Any], flat: bool) -> Tuple[Sections, Dict[str, Any]]:
    sections: Sections = {}
    forms: Dict[str, List[Form]] = {}
    numbers: Dict[str, List[Form]] = {}
    lists: List[Path] = []
    rest: Dict[str, Any] = {}
    for key, value in state.items():
        found: Dict[Path, Any] = {}
        cut = isinstance(value, (Mapping, list)) and key not in OWN
        rest[key] = _take_tensors(value, (key,), found, lists) if cut else value
        if not found:
            rest[key] = value
            continue
        numbers[key] = _take_numbers(rest[key], found)
        if not isinstance(key, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", key):
            raise ValueError(f"{key!r} holds tensors and names a file: it should be of letters, digits, '_' and '-'")
        if re.fullmatch(SHARD, key):
            raise ValueError(f"{key!r} holds tensors and names a file: that would be one of a set of several")
        forms[key] = forms_of([path[1:] for path in found])
        names = sections[key] = {}
        for path, tensor in found.items():
            name = ".".join(map(str, path[1:]))
            if split(name, forms[key]) != tuple(map(str, path[1:])) or name in names:
                raise ValueError(f"{'/'.join(map(str, path))}: several paths would be the name {name!r}")
            names[name] = tensor
    return sections, {"format": FORMAT, "flat": flat, "forms": forms, "numbers": numbers, "lists": lists,
                      "values": encode(rest)}


def _take_tensors(value: Any, path: Path, found: Dict[Path, Any], lists: List[Path]) -> Any:
    """What is left of a value without its tensors; these are put into `found`."""
    if is_array(value):
        found[path] = value
        return _TAKEN
    if isinstance(value, list) and _holds_tensor(value):
        lists.append(path)
        value = {str(number): item for number, item in enumerate(value)}
    if not isinstance(value, Mapping):
        if isinstance(value, tuple) and _holds_tensor(value):
            raise TypeError(f"{'/'.join(map(str, path))}: tensors in a tuple are not cut: make it a list")
        return value
    left = {}
    for key, item in value.items():
        if _holds_tensor(item) and not isinstance(key, str):
            raise TypeError(
                f"{'/'.join(map(str, path))}: the key {key!r} is no name. State of an optimizer goes by the names of "
                "parameters: ptc.optimizer_state(model, optimizer)")
        rest = _take_tensors(item, (*path, key), found, lists)
        if rest is not _TAKEN:
            left[key] = rest
    return left


_TAKEN = object()
_NUMBERS = {bool: "bool", int: "int64", float: "float64"}


def _take_numbers(left: Any, found: Dict[Path, Any]) -> List[Form]:
    """Moves the numbers that are beside a parameter's tensors from what is left into `found`, and returns their forms.
    One of a form of which another parameter has a tensor stays a value.
    """
    forms = forms_of([path[1:] for path in found])
    of_tensors = {path: _form_in(path[1:], forms) for path in found}
    there = set(of_tensors.values())
    taken: Dict[Form, None] = {}
    for path, (before, behind, named) in of_tensors.items():
        values = left
        for key in path[1:-1]:
            values = values.get(key) if isinstance(values, dict) else None
        if not isinstance(values, dict) or not named or not behind:
            continue
        for key, value in list(values.items()):
            form = before, (*behind[:-1], key), True
            number = _plain(value)
            if (isinstance(key, str) and "." not in key and form not in there and type(number) in _NUMBERS
                    and not (type(number) is int and number.bit_length() > 63)):
                found[(*path[:-1], key)] = _array_of_number(number)
                taken[form] = None
                del values[key]
    for path, (before, _, named) in of_tensors.items():
        for place in range(len(path) - 1, len(before) + 1, -1) if named else ():
            _drop_empty(left, path[1:place])
    return sorted(taken, key=repr)


def _drop_empty(left: Any, path: Path) -> None:
    """Removes a dict of which nothing is left: a rank that does not hold that parameter would have it all the same."""
    for key in path[:-1]:
        left = left.get(key) if isinstance(left, dict) else None
    if isinstance(left, dict) and left.get(path[-1]) == {}:
        del left[path[-1]]


def _array_of_number(value: Any) -> Any:
    kind = _NUMBERS[type(value)]
    torch = torch_or_none()
    if torch is not None:
        return torch.tensor(value, dtype=getattr(torch, kind))
    import numpy
    return numpy.array(value, kind)


def _plain(value: Any) -> Any:
    """A scalar of NumPy as Python's; anything else is what it is."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item) for item in value)
    return is_array(value)


def form_of(path: Sequence[Any]) -> Form:
    """Which keys of a path are a frame around a parameter's name. ValueError: there are several such names in it."""
    keys = tuple(map(str, path))
    dotted = [place for place, key in enumerate(keys) if "." in key]
    if len(dotted) > 1:
        raise ValueError(f"{'/'.join(keys)}: only one key of a path may hold dots")
    if dotted:
        return keys[:dotted[0]], keys[dotted[0] + 1:], True
    return ((), (), True) if len(keys) == 1 else (keys, (), False)


def _fits(keys: Sequence[Any], form: Form) -> bool:
    """Whether a path is a name in that frame."""
    before, behind, named = form
    return named and len(before) + len(behind) + 1 == len(keys) and tuple(keys[:len(before)]) == tuple(before) and (
        tuple(keys[len(before) + 1:]) == tuple(behind))


def _form_in(path: Sequence[Any], forms: Sequence[Form]) -> Form:
    """Of the forms of all paths that of one."""
    own = form_of(path)
    return own if own in forms else next(form for form in forms if _fits(list(map(str, path)), form))


def is_number(path: Sequence[Any], text: Mapping[str, Any], section: str) -> bool:
    """Whether the tensor at that path of a section was a number, by ptc.json."""
    return any(_fits(list(map(str, path)), form) for form in text.get("numbers", {}).get(section, ()))


def forms_of(paths: Iterable[Sequence[Any]]) -> List[Form]:
    """The forms of all. A path without dots has the form of others that it fits: "lm_head" is a name where "a.b" is."""
    found: Dict[Form, None] = {}
    plain = []
    for path in paths:
        form = form_of(path)
        if form[2]:
            found[form] = None
        else:
            plain.append(form[0])
    for keys in plain:
        if not any(_fits(keys, form) for form in found):
            found[keys, (), False] = None
    return sorted(found, key=repr)


def split(name: str, forms: Iterable[Form]) -> Path:
    """The path of a flat name: by the form that says most of it; without any, the name is one key."""
    best: Optional[Path] = None
    for before, behind, named in forms:
        front = "".join(key + "." for key in before)
        back = "".join("." + key for key in behind)
        if not named:
            if name == ".".join(before):
                return tuple(before)
            continue
        if len(name) <= len(front) + len(back) or not name.startswith(front) or not name.endswith(back):
            continue
        if best is None or len(before) + len(behind) + 1 > len(best):
            best = (*before, name[len(front):len(name) - len(back)], *behind)
    return best or (name,)


def unflatten(sections: Mapping[str, Mapping[str, Any]], text: Optional[Mapping[str, Any]], numpy_arrays: bool = False,
              values: Iterable[Tuple[Sequence[Any], Any]] = ()) -> Dict[str, Any]:
    """The state, of its files' tensors and of ptc.json. Without it each section's names are its keys.

    `values`: more of them, by path. Keys of lists are digits until all is there.
    """
    if text is None:
        return {key: dict(names) for key, names in sections.items()}
    if text.get("format") != FORMAT:
        raise ValueError(f"{FILE}: format {text.get('format')!r} is not {FORMAT!r}")
    state = decode(text["values"], numpy_arrays)
    for key, names in sections.items():
        forms = [(tuple(before), tuple(behind), named) for before, behind, named in text["forms"].get(key, [])]
        into = state.setdefault(key, {})
        for name, tensor in names.items():
            place = split(name, forms)
            put(into, place, tensor.item() if is_number(place, text, key) else tensor)
    for path, value in values:
        put(state, [str(key) if isinstance(key, int) else key for key in path], value)
    for path in sorted((tuple(map(str, path)) for path in text["lists"]), key=len, reverse=True):
        _make_list(state, path)
    return {**state.pop("model"), **state} if text["flat"] and "model" in sections else state


def put(into: MutableMapping[Any, Any], path: Sequence[Any], value: Any) -> None:
    """Puts a value into nested dicts."""
    for key in path[:-1]:
        into = into.setdefault(key, {})
    into[path[-1]] = value


def _make_list(state: Any, path: Path) -> None:
    """Makes a list of the dict there, if this rank has anything of it. Deeper lists are dicts no more."""
    for key in path[:-1]:
        state = state.get(key) if isinstance(state, Mapping) else None
    items = state.get(path[-1]) if isinstance(state, Mapping) else None
    if isinstance(items, Mapping):
        state[path[-1]] = [items[key] for key in sorted(items, key=int)]


def encode(value: Any, path: Path = ()) -> Any:
    """A value as JSON that `decode` reads. TypeError, with its path: it is of a kind that JSON and this module do not
    know.
    """
    value = _plain(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, (*path, number)) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_MARK: "tuple", "items": [encode(item, (*path, number)) for number, item in enumerate(value)]}
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _MARK not in value:
            return {key: encode(item, (*path, key)) for key, item in value.items()}
        return {_MARK: "dict", "items": [[encode(key, path), encode(item, (*path, key))] for key, item in value.items()]}
    if is_array(value) and not is_distributed(value):
        try:
            array = Bytes(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_text(path)}: {error}") from None
        if array.nbytes > _MUCH_BYTES:
            warnings.warn(f"{_text(path)}: {array.nbytes >> 20} MiB are kept as text in {FILE}, of each rank: in a dict at "
                          "the top, of a name that is not in ptc.state.OWN, it would be in a file of tensors", stacklevel=2)
        return {_MARK: "tensor", "dtype": array.dtype, "shape": list(array.shape),
                "base64": base64.b64encode(b"".join(data for data, _ in array.pieces())).decode()}
    raise TypeError(f"{_text(path)}: a value of type {type(value).__name__} cannot be saved: only tensors, numbers, texts, "
                    "bytes, and lists and dicts of these")


def _text(path: Sequence[Any]) -> str:
    return "/".join(map(str, path)) or "the state"


def decode(value: Any, numpy_arrays: bool = False) -> Any:
    """What was encoded."""
    if isinstance(value, list):
        return [decode(item, numpy_arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {key: decode(item, numpy_arrays) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(item, numpy_arrays) for item in value["items"])
    if kind == "bytes":
        return base64.b64decode(value["base64"])
    if kind == "dict":
        return {decode(key, numpy_arrays): decode(item, numpy_arrays) for key, item in value["items"]}
    if kind == "tensor":
        data = bytearray(base64.b64decode(value["base64"]))
        return array_of(data, value["dtype"], value["shape"], 0, numpy_arrays)
    raise ValueError(f"{FILE} holds a value of kind {kind!r}, which this version does not know")
