"""Implements `appliance models split`."""

from __future__ import annotations

from appliance.actions import SplitModel
from appliance.cli.actions import perform
from appliance.cli.failure import CommandLineError
from appliance.cli.output import printable


def set_split(run_dir: str | None, name: str, weights: list[str], *, clear: bool, as_json: bool) -> None:
    """Set or end the split of a name. `weights` are texts of the form TARGET=WEIGHT."""
    if clear == bool(weights):
        raise CommandLineError("give either the weights of the split, such as 1=90 2=10, or --clear")
    action = SplitModel(name=name, weights=None if clear else _weights(weights))
    perform(run_dir, action, as_json=as_json)


def shares(found: dict[str, float]) -> str:
    """Return the fractions of the requests for split names as text."""
    return ", ".join(f"{share:.1%} of {printable(name)}" for name, share in found.items())


def _weights(texts: list[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for text in texts:
        target, equals, weight = text.rpartition("=")
        try:
            value = float(weight.removesuffix("%"))
        except ValueError:
            value = 0.0
        if not equals or not target or not 0 < value <= 1e6:
            raise CommandLineError(
                f"{text!r} is not valid: write VERSION=WEIGHT or NAME=WEIGHT, such as 2=10, with a weight "
                "above 0 and at most 1,000,000; leave out what shall get no requests"
            )
        if target in weights:
            raise CommandLineError(f"{target!r} is given twice: give each target one weight")
        weights[target] = value
    return weights
