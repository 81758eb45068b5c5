"""Options shared by several commands, and parsers for numbers within a range."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

MAX_ROWS = 100_000
"""Maximum number of rows that a command lists."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_DECIMAL = re.compile(r"[+-]?[0-9]{0,30}\.?[0-9]{0,30}([eE][+-]?[0-9]{1,3})?")


def whole_number(low: int, high: int) -> Callable[[str | int], int]:
    """Return a parser for whole numbers within a range, for `typer.Option(parser=…)`. Unlike typer's ranges,
    the parser accepts only ASCII digits and names the range in its error messages."""

    def integer(value: str | int) -> int:
        text = str(value)
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            raise typer.BadParameter(
                f"{text[:40]!r} is not valid: use a whole number from {low:,} to {high:,}"
            )
        return int(text)

    return integer


def number(low: float, high: float) -> Callable[[str | float], float]:
    """Return a parser for numbers within a range, for `typer.Option(parser=…)`. Unlike typer's ranges, the
    parser rejects NaN."""

    def decimal(value: str | float) -> float:
        text = str(value)
        if not is_decimal(text) or not low <= float(text) <= high:
            raise typer.BadParameter(
                f"{text[:40]!r} is not valid: use a number from {low:,.15g} to {high:,.15g}"
            )
        return float(text)

    return decimal


def is_decimal(text: str) -> bool:
    """Return True if `text` is a finite number written in ASCII digits."""
    return bool(_DECIMAL.fullmatch(text)) and any(digit.isdigit() for digit in text.partition("e")[0])


def count_option(description: str, parser: Callable[[str | int], int]) -> Any:
    """Return an option whose value is a whole number N. `parser` is a result of `whole_number`."""
    return typer.Option(metavar="N", help=description, show_default=False, parser=parser)


TOKENS = whole_number(1, 10_000_000)
"""A parser for a number of tokens."""
RunDir = Annotated[
    str | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="Directory that contains the service's sockets.", show_default=False
    ),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        "--state-dir",
        metavar="DIR",
        help="Directory that contains the service's databases.",
        show_default=False,
    ),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Path of the settings file (TOML).", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the output as JSON.")]
Yes = Annotated[
    bool,
    typer.Option(
        "--yes", "-y", help="Skip the confirmation prompt. Required if standard input is not a terminal."
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit",
        "-n",
        metavar="N",
        help="Maximum number of rows to print.",
        parser=whole_number(1, MAX_ROWS),
    ),
]
