"""The kinds of decoder layers."""

from __future__ import annotations

from engine.config import DENSE, EXPERTS
from engine.model.experts import ExpertsLayer
from engine.model.layers import Layer

LAYER_KINDS: dict[str, type[Layer]] = {DENSE: Layer, EXPERTS: ExpertsLayer}
"""The class for each kind of layer. Keys are the possible values in `ModelConfig.layer_kinds`."""
