"""Maps each kind of decoder layer to its class."""

from __future__ import annotations

from engine.config import DENSE, EXPERTS
from engine.model.experts import ExpertsLayer
from engine.model.layers import Layer

LAYER_KINDS: dict[str, type[Layer]] = {DENSE: Layer, EXPERTS: ExpertsLayer}
"""The class for each possible value in `ModelConfig.layer_kinds`."""
