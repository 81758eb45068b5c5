from __future__ import annotations

from tests.without_gpu import interpret_kernels

interpret_kernels()
