"""Without a GPU, Triton kernels run in the interpreter. It proves indexing and masking, in float32 and
float16; numerics of bfloat16 and FP8 are a GPU's to prove."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.examples import QUICK_EXAMPLES, SOAK_EXAMPLES

# No property test is judged by its time, which depends on the other work of the machine.
for _name, _count in (("quick", QUICK_EXAMPLES), ("soak", SOAK_EXAMPLES)):
    settings.register_profile(
        _name, max_examples=_count, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

if not torch.cuda.is_available():
    # Here, before any test module is imported: Triton looks once, when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users may look into. Every run of pytest that begins closes those above
    `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
