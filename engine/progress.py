"""Progress reports of a rank that is starting."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, float], None]
"""Called with the name of the current stage and its progress from 0 to 1."""
