"""Selects a rank's device."""

from __future__ import annotations

import torch

from engine.config import UnsupportedError


class DeviceError(RuntimeError):
    """Raised if the requested device cannot be used."""


def select_device(wanted: str, rank: int, size: int) -> torch.device:
    """Return a rank's device and make it the current device. "auto" selects CUDA if there is a GPU, otherwise
    the CPU. Raises DeviceError if there are fewer CUDA devices than ranks, and UnsupportedError if `wanted`
    is unknown.
    """
    if wanted not in ("auto", "cuda", "cpu"):
        raise UnsupportedError(f"device is {wanted!r}", 'use "auto", "cuda" or "cpu"')
    if wanted == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "auto" and found == 0:
        return torch.device("cpu")
    remedy = f"lower tensor_parallel_size to at most {found}" if found else 'set device = "cpu"'
    raise DeviceError(
        f"device is {wanted!r}, which needs {size} CUDA device{'s' * (size > 1)}, but only {found} can be "
        f"used (torch {torch.__version__}): check `nvidia-smi`, or {remedy}"
    )


def device_name(kind: str, rank: int) -> str:
    return "cpu" if kind == "cpu" else f"cuda:{rank} {torch.cuda.get_device_name(rank)}"
