"""Summarises how often tokens have chosen each expert."""

from __future__ import annotations

from engine.rank_messages import LayerExperts


def expert_use(choices: dict[int, list[int]]) -> tuple[LayerExperts, ...]:
    """Return statistics of how each layer's experts are used. `choices` contains, for each layer, how many
    tokens have chosen each expert."""
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
