"""Explains the fields and metrics on the screens: the unit, the window and the source of each. A screen's
help lists the fields and metrics that the screen shows, and a test requires an entry for each of them."""

from __future__ import annotations

from console.figures.engine import ENGINE
from console.figures.figure import Figure
from console.figures.lists import LISTS
from console.figures.overview import OVERVIEW
from console.figures.requests import REQUESTS

__all__ = ["FIGURES", "Figure"]

FIGURES: dict[str, Figure] = {**OVERVIEW, **ENGINE, **REQUESTS, **LISTS}
"""All explanations, by name. The explanation of a table's column has the name of the column."""
