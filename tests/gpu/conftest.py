"""Skips GPU tests if there is no GPU, and gives the reason."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU: torch.cuda.is_available() is false"))
