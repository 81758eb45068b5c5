"""Runs Triton kernels in the interpreter if there is no GPU. The interpreter can verify indexing and masking
in float32 and float16. Only a GPU can verify the numerics of bfloat16 and FP8."""

from __future__ import annotations

import os

import torch


def interpret_kernels() -> None:
    """Run Triton kernels in the interpreter unless there is a GPU. Called by the `conftest.py` of each folder
    whose tests import Triton, because Triton reads the variable only once, when it is imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        from tests import quick_interpreter

        quick_interpreter.install()
