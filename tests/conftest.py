"""Configures all tests. Does not import torch, because most tests do not need it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import QUICK_EXAMPLES, SOAK_EXAMPLES

# Property tests have no time limit per example, because an example's duration depends on the machine's load.
# `scripts/test` draws the same examples in every run, so that a new failure must have been caused by a
# change. `scripts/soak` draws new examples.
for _name, _count in (("quick", QUICK_EXAMPLES), ("soak", SOAK_EXAMPLES)):
    settings.register_profile(
        _name,
        max_examples=_count,
        deadline=None,
        derandomize=_name == "quick",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that other users can access. They cannot access `tmp_path`, because pytest restricts the
    permissions of its parent folders."""
    with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
