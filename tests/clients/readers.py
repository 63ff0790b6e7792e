"""Readers of data sets that may not be installed."""
import importlib
import sys
import unittest.mock


def optional(name):
    """The module, or None, and why is printed."""
    try:
        if name == "streaming":
            leave_out_pictures()
        return importlib.import_module(name)
    except ImportError as error:
        print(f"{name} is not there ({error}): what reads with it is skipped", file=sys.stderr)
        return None


def leave_out_pictures():
    """streaming's data sets of pictures import torchvision; the registry's does not work beside a PyTorch without CUDA."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        sys.modules["streaming.vision"] = unittest.mock.MagicMock()
