"""An optimizer's state by the names of parameters, which is how it can be cut as they are."""
from __future__ import annotations

import re
from typing import Any, Dict, Iterable, Mapping, Sequence

_NUMBER = re.compile(r"\d+")  # of a layer
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


def _names(model: Any) -> Dict[int, str]:
    names: Dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    return names


def load_model_state(model: Any, state: Mapping[str, Any], *, strict: bool = False) -> None:
    """Copies what `load` gave into a module's parameters and persistent buffers; of DTensors this rank's part, also where
    the layout gave it another: that is read then. Values become of the type that the module has, as copy_ does it.

    What the state has beyond is passed over, unless `strict`. KeyError: the state lacks one, or, with `strict`, the
    module does; ValueError: one has another shape, or is on the meta device: module.to_empty(device=…) comes first.
    """
    import torch
    from .arrays import local
    from .loading import part_for
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    if strict and set(state) - set(own):
        raise KeyError(f"the model has no {_some(set(state) - set(own))}")
    with torch.no_grad():
        for name, target in own.items():
            if name not in state:
                raise KeyError(f"the state has no {name}")
            try:
                value = part_for(target, state[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            copy_into(name, local(target), value)


def copy_into(name: str, target: Any, value: Any) -> None:
    """A tensor into one of the same shape that has memory. ValueError: it is not so."""
    if target.is_meta:
        raise ValueError(f"{name} is on the meta device and cannot take values: module.to_empty(device=…) comes first")
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(f"{name} is {tuple(value.shape)}, but {tuple(target.shape)} here")
    target.copy_(value)


def _some(names: Iterable[str]) -> str:
    """A few names, for messages."""
    names = sorted(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def optimizer_state(model: Any, optimizer: Any) -> Dict[str, Any]:
    """{"state": {parameter: {"exp_avg": …, "step": …}}, "param_groups": [{"params": [parameters], "lr": …}]}.

    As torch.optim.Optimizer.state_dict(), but for names. Nothing is copied. KeyError: a parameter is not the model's.
    """
    names = _names(model)
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise KeyError(f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model has not")
        groups.append({**{key: value for key, value in group.items() if key != "params"},
                       "params": [names[id(parameter)] for parameter in group["params"]]})
    if any(id(parameter) not in names for parameter in optimizer.state):
        raise KeyError("the optimizer has state of something that is no parameter of the model")
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: Any, optimizer: Any, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Puts it back, by name: tensors are copied, and go where the parameter is. Groups keep their parameters.

    A group takes its other values (lr, betas …) from the saved one that names its parameters, or such as differ from
    them in numbers only, as those of another pipeline stage do. Groups without names are taken in order. State of what
    is no parameter of this optimizer is passed over; a parameter that had no state when it was saved has none.

    KeyError: there is state, and none of it is of a parameter of this optimizer: its names have another prefix; or what
    was saved knows nothing of some, which `strict`=False begins anew. ValueError: a moment has another shape than its
    parameter here; there are more groups, or fewer, or others.
    """
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}
    groups = [dict(group) for group in state.get("param_groups", [])]
    named = {name for group in groups for name in group.get("params", ())}
    unknown = [name for name in parameters if name not in state["state"] and name not in named]
    if state["state"] and parameters and not any(name in state["state"] for name in parameters):
        raise KeyError(f"the state is of parameters such as {next(iter(state['state']))}, and has nothing of "
                       f"{_some(parameters)}")
    if state["state"] and unknown and strict:
        raise KeyError(f"the state has nothing of {_some(unknown)}; strict=False begins these anew")
    chosen = _match_groups(optimizer.param_groups, groups, {id(one): name for name, one in parameters.items()})
    on_device = {id(parameter) for group in optimizer.param_groups if group.get("fused") or group.get("capturable")
                 for parameter in group["params"]}
    for name, parameter in parameters.items():
        for key, value in state["state"].get(name, {}).items():
            optimizer.state[parameter][key] = _placed(f"{key} of {name}", key, value, parameter, id(parameter) in on_device)
    for mine, saved in zip(optimizer.param_groups, chosen):
        mine.update({key: value for key, value in saved.items() if key != "params"})


def _placed(what: str, key: str, value: Any, parameter: Any, on_device: bool) -> Any:
    """A copy of a value that was saved, where the parameter is; a count stays in the host's memory, unless `on_device`.
    ValueError: it is a moment, and of another shape.
    """
    import torch
    from .arrays import is_distributed
    from .loading import part_for
    if not isinstance(value, torch.Tensor):
        return value
    try:
        value = part_for(parameter, value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    here = parameter.to_local() if is_distributed(parameter) else parameter
    if value.dim() == 0 or (value.numel() == 1 and here.numel() != 1):
        return value.to(here.device, copy=True) if here.dim() == 0 or on_device else value.clone()
    if tuple(value.shape) != tuple(here.shape):
        if not is_distributed(parameter) and key not in _MOMENTS:  # of Adafactor and others: as the optimizer has it
            return value.to(here.device, copy=True)
        raise ValueError(f"{what} is {tuple(value.shape)}, but the parameter here {tuple(here.shape)}")
    value = value.to(here.device, copy=True)
    if is_distributed(parameter):
        from torch.distributed.tensor import DTensor
        return DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False,
                                  shape=parameter.shape, stride=parameter.stride())
    return value


def _match_groups(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], names: Mapping[int, str]
                  ) -> Sequence[Mapping[str, Any]]:
    """Of each group of an optimizer the one that was saved of it; empty: none were. ValueError: that is not clear."""
    if not saved:
        return []
    if len(saved) != len(groups):
        raise ValueError(f"the state has {len(saved)} groups of parameters, and the optimizer {len(groups)}")
    if len(saved) == 1 or not any(group.get("params") for group in saved):
        return saved
    exact = [{str(name) for name in group.get("params", ())} for group in saved]
    alike = [{_NUMBER.sub("#", name) for name in some} for some in exact]
    chosen = []
    for place, group in enumerate(groups):
        mine = {names[id(parameter)] for parameter in group["params"] if id(parameter) in names}
        fit = ([number for number, some in enumerate(exact) if some & mine]
               or [number for number, some in enumerate(alike) if some & {_NUMBER.sub("#", name) for name in mine}]
               or ([] if mine else [place]))
        if not fit:
            raise ValueError(f"no group that was saved names any of the parameters {_some(mine)}")
        if any(_values(saved[other]) != _values(saved[fit[0]]) for other in fit):
            raise ValueError(f"the parameters {_some(mine)} are of one group here, but were saved in several, which "
                             "differ: such as " + " and such as ".join(_some(exact[number]) for number in fit))
        chosen.append(saved[fit[0]])
    return chosen


def _values(group: Mapping[str, Any]) -> str:
    """Of a group all but its parameters, to compare."""
    return repr(sorted((key, value) for key, value in group.items() if key != "params"))
