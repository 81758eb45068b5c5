"""Implements `appliance models split` and `appliance models shadow`."""

from __future__ import annotations

from appliance.actions.parameters import ShadowModel, SplitModel
from appliance.cli.actions import perform
from appliance.cli.failure import CommandLineError
from appliance.cli.output import printable
from appliance.protocol.registry import ShadowStatus


def set_split(run_dir: str | None, name: str, weights: list[str], *, clear: bool, as_json: bool) -> None:
    """Start or stop splitting the requests for a name between targets. `weights` are strings of the form
    TARGET=WEIGHT."""
    if clear == bool(weights):
        raise CommandLineError("give either the weights of the split, such as 1=90 2=10, or --clear")
    action = SplitModel(name=name, weights=None if clear else _weights(weights))
    perform(run_dir, action, as_json=as_json)


def set_shadow(
    run_dir: str | None, name: str, target: str | None, share: str, *, clear: bool, as_json: bool
) -> None:
    """Start or stop copying the requests for a name to another model or version. `share` is a percentage such
    as 5%."""
    if clear == (target is not None):
        raise CommandLineError("give either a target for the copies with --to, or --clear")
    try:
        percent = float(share.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not share.endswith("%") or not 0 < percent <= 100:
        raise CommandLineError(f"--share {share!r} is not valid: write a percentage such as 5%")
    perform(run_dir, ShadowModel(name=name, target=target, share=percent / 100), as_json=as_json)


def show_shadow(shadow: ShadowStatus) -> None:
    """Print a shadow and its results."""
    print(f"  shadow    {shadow.share:.1%} of {printable(shadow.name)} copied to {printable(shadow.target)}")
    print(f"    copies    {shadow.compared} compared, {shadow.dropped} dropped, {shadow.failed} failed")
    for side, times in (("originals", shadow.original), ("copies", shadow.copy)):
        if times is not None:
            print(
                f"    {side:9} mean TTFT {times.ttft_ms:.1f} ms, E2E {times.e2e_ms:.1f} ms, "
                f"{times.tokens:.1f} tokens"
            )
    if shadow.agreement is not None:
        print(f"    agreement {shadow.agreement:.1%} of the tokens of {shadow.greedy} greedy requests")


def shares(found: dict[str, float]) -> str:
    """For each split that includes the version, describe the fraction of requests that the version
    receives."""
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
                "above 0 and at most 1,000,000; omit targets that should get no requests"
            )
        if target in weights:
            raise CommandLineError(f"{target!r} is given twice: give each target one weight")
        weights[target] = value
    return weights
