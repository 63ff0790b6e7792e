"""Lets Megatron-Core run where there is no GPU: where it asks for a device of CUDA it gets the CPU. Import it first."""
import contextlib

import torch


def on_cpu():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.is_available = lambda: False
    torch.cuda.synchronize = lambda *arguments, **options: None
    torch.Tensor.cuda = lambda self, *arguments, **options: self
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *arguments: kind(self, *arguments) if arguments else kind(self).replace("torch.", "torch.cuda.")

    def without_device(make):
        def made(*arguments, **options):
            if str(options.get("device", "")).startswith("cuda"):
                options["device"] = "cpu"
            return make(*arguments, **options)
        return made
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, without_device(getattr(torch, name)))


class OneRandomState:
    """In the place of a state of the GPU for each kind of rank: who trains draws no random numbers."""

    @contextlib.contextmanager
    def fork(self, _=None):
        yield


on_cpu()

from megatron.core.tensor_parallel import random  # noqa: E402  pylint: disable=wrong-import-position

random._CUDA_RNG_STATE_TRACKER = OneRandomState()
random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
