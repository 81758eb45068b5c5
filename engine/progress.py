"""Progress reports of a starting rank."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, float], None]
"""Called with the current stage and its progress, 0 to 1."""
