"""The device of a rank."""

from __future__ import annotations

import torch

from engine.config import UnsupportedError


class DeviceError(RuntimeError):
    """The device that was asked for cannot be used."""


def select_device(wanted: str, rank: int, size: int) -> torch.device:
    """The device of a rank, made current; "auto" is CUDA where there is one for each rank, else the CPU.

    Raises DeviceError where "cuda" was asked for and is not there, UnsupportedError for another word.
    """
    if wanted not in ("auto", "cuda", "cpu"):
        raise UnsupportedError(f'device is {wanted!r}: use "auto", "cuda" or "cpu"')
    if wanted == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= size:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    if wanted == "auto" and found == 0:
        return torch.device("cpu")
    raise DeviceError(
        f"device is {wanted!r}, but {size} CUDA device{'s' * (size > 1)} would be needed and {found} can be "
        f"used (torch {torch.__version__}): see `nvidia-smi`, lower tensor_parallel_size, or use the cpu"
    )


def device_name(kind: str, rank: int) -> str:
    return "cpu" if kind == "cpu" else f"cuda:{rank} {torch.cuda.get_device_name(rank)}"
