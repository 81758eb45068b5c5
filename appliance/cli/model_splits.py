"""Parses and prints traffic splits and shadow traffic."""

from __future__ import annotations

from appliance.cli.failure import CommandLineError
from appliance.cli.output import printable
from appliance.protocol.registry import ShadowStatus


def show_shadow(shadow: ShadowStatus) -> None:
    """Print the shadow traffic of a name and its results."""
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


def weights(texts: list[str]) -> dict[str, float]:
    """Parse the weights of a split, given as TARGET=WEIGHT. Raises CommandLineError if a text has another
    format."""
    found: dict[str, float] = {}
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
        if target in found:
            raise CommandLineError(f"{target!r} is given twice: give each target one weight")
        found[target] = value
    return found


def percentage(text: str, option: str) -> float:
    """Parse a percentage such as 5% and return it as a fraction. Raises CommandLineError for any other
    text."""
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = 0.0
    if not text.endswith("%") or not 0 < percent <= 100:
        raise CommandLineError(f"{option} {text!r} is not valid: write a percentage such as 5%")
    return percent / 100
