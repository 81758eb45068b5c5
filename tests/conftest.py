"""Configures all tests. Without a GPU, Triton kernels run in the interpreter, which verifies indexing and
masking in float32 and float16. The numerics of bfloat16 and FP8 can only be verified on a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.examples import QUICK_EXAMPLES, SOAK_EXAMPLES

# Property tests have no time limit per example, because their time depends on other work on the machine.
for _name, _count in (("quick", QUICK_EXAMPLES), ("soak", SOAK_EXAMPLES)):
    settings.register_profile(
        _name, max_examples=_count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

if not torch.cuda.is_available():
    # This must be set before any test module is imported, because Triton reads it only once, when it is first
    # imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that other users may enter. They may not enter the parents of `tmp_path`, whose
    permissions every run of pytest restricts."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
