"""Summarises how often each expert has been chosen."""

from __future__ import annotations

from engine.rank_messages import LayerExperts


def expert_use(choices: dict[int, list[int]]) -> tuple[LayerExperts, ...]:
    """Return usage statistics for each layer's experts. `choices` contains, for each layer, the number of
    tokens that chose each expert."""
    return tuple(_layer_use(layer, counts) for layer, counts in choices.items())


def _layer_use(layer: int, counts: list[int]) -> LayerExperts:
    most = max(counts)
    return LayerExperts(
        layer=layer,
        experts=len(counts),
        choices=sum(counts),
        busiest=counts.index(most),
        busiest_choices=most,
        unused=counts.count(0),
    )
