"""Explanations of the fields and metrics on the screens, with their units, windows and sources. Each screen's
help lists the fields and metrics that the screen shows. A test checks that each of them has an entry."""

from __future__ import annotations

from console.explanations.engine import ENGINE
from console.explanations.explanation import Explanation
from console.explanations.frame import FRAME
from console.explanations.lists import LISTS
from console.explanations.overview import OVERVIEW
from console.explanations.requests import REQUESTS

__all__ = ["EXPLANATIONS", "FRAME", "Explanation"]

EXPLANATIONS: dict[str, Explanation] = {**OVERVIEW, **ENGINE, **REQUESTS, **LISTS, **FRAME}
"""All explanations, keyed by name. A table column's explanation has the same name as the column."""
