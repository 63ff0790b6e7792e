"""An optimizer's state by the names of parameters, which is how it can be cut as they are."""
from __future__ import annotations

from typing import Any, Dict, Mapping


_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master")


def _names(model: Any) -> Dict[int, str]:
    names: Dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    return names


def load_model_state(model: Any, state: Mapping[str, Any]) -> None:
    """Copies what `load` gave into a module's parameters and persistent buffers; of DTensors (FSDP2) into this rank's
    part.

    KeyError: the state lacks one; ValueError: one has another shape.
    """
    import torch
    from .arrays import local
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if not isinstance(target, torch.Tensor):
                continue
            if name not in state:
                raise KeyError(f"the state has no {name}")
            target = local(target)
            if tuple(state[name].shape) != tuple(target.shape):
                raise ValueError(f"{name} is {tuple(state[name].shape)}, but {tuple(target.shape)} here")
            target.copy_(state[name])


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
    state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: Any, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Puts it back, by name: tensors are copied, and go where the parameter is. Groups keep their parameters.

    Of groups the other values (lr, betas …) are taken over, in order. Names that this rank has not are passed over.
    KeyError: there is state, and none of it is of a parameter of this model: its names have another prefix. ValueError: a
    moment has another shape than its parameter here; there are more groups, or fewer.
    """
    import torch
    from .arrays import is_distributed
    names = [name for name, _ in model.named_parameters()]
    if state["state"] and names and not any(name in state["state"] for name in names):
        raise KeyError(f"the state is of parameters such as {next(iter(state['state']))}, and the model has none of them, "
                       f"but such as {names[0]}")
    groups = state.get("param_groups", [])
    if groups and len(groups) != len(optimizer.param_groups):
        raise ValueError(f"the state has {len(groups)} groups of parameters, and the optimizer {len(optimizer.param_groups)}")
    on_device = {id(parameter) for group in optimizer.param_groups if group.get("fused") or group.get("capturable")
                 for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        values = state["state"].get(name)
        if values is None:
            continue
        here = parameter.to_local() if is_distributed(parameter) else parameter
        own = optimizer.state[parameter]
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                own[key] = value
                continue
            if value.dim() == 0 or (value.numel() == 1 and here.numel() != 1):
                own[key] = value.clone()  # a count
                if here.dim() == 0 or id(parameter) in on_device:
                    own[key] = own[key].to(here.device)
                continue
            if tuple(value.shape) != tuple(here.shape):
                if not is_distributed(parameter) and key not in _MOMENTS:  # of Adafactor and others: as the optimizer has it
                    own[key] = value.to(here.device, copy=True)
                    continue
                raise ValueError(f"{key} of {name} is {tuple(value.shape)}, but the parameter here {tuple(here.shape)}")
            value = value.to(here.device, copy=True)
            if is_distributed(parameter):
                from torch.distributed.tensor import DTensor
                value = DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False,
                                           shape=parameter.shape, stride=parameter.stride())
            own[key] = value
    for mine, saved in zip(optimizer.param_groups, groups):
        mine.update({key: value for key, value in saved.items() if key != "params"})
