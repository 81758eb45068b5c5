"""The colours of each role in each theme. State is never shown by colour alone: letters or words show it too,
so the mono theme loses no information. The role "label" has the same colours as "dim", but marks only the
names of values. A test uses this role to find the names and checks that the help explains each of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

from rich.style import Style

from console.roles import SERIES, Role

ThemeName = Literal["dark", "light", "ansi", "mono", "high-contrast"]
_ROLES: tuple[Role, ...] = get_args(Role)


def _series(*colours: str) -> dict[Role, str]:
    """Map the series roles to styles with these colours."""
    return dict(zip(SERIES, colours, strict=True))


_DARK: dict[Role, str] = {
    "text": "#c8ccd4",
    **dict.fromkeys(("label", "dim"), "#7f8796"),
    "bold": "bold #e6e9ef",
    "title": "bold #8fb8f0",
    "rule": "#3b4252",
    "track": "#3b4252",
    "accent": "#8fb8f0",
    "key": "bold #e5c07b",
    "good": "#8cc570",
    "warn": "#e5b454",
    "bad": "bold #f07178",
    "info": "#73c7d9",
    "badge": "bold #14171c on #e5b454",
    "badge_bad": "bold #14171c on #f07178",
    "badge_good": "bold #14171c on #8cc570",
    "tab": "bold #14171c on #8fb8f0",
    "cursor": "#f2f4f8 on #2f3b52",
    "mark": "bold #d59ae0",
    "input": "#73c7d9",
    "output": "#8cc570",
    "p0": "#f07178",
    "p1": "#e5b454",
    "p2": "#73c7d9",
    "p3": "#7f8796",
    "free": "#3b4252",
    "cached": "#5b86b8",
    "used": "#8cc570",
    "shared": "#d59ae0",
    "prefill": "#73c7d9",
    "decode": "#8cc570",
    "idle": "#f07178",
    **_series("#8cc570", "#73c7d9", "#e5b454", "#d59ae0", "#f07178", "#8fb8f0", "#cfae8b", "#9aa5b8"),
}
_LIGHT: dict[Role, str] = {
    "text": "#24292f",
    **dict.fromkeys(("label", "dim"), "#6b7480"),
    "bold": "bold #0b0f14",
    "title": "bold #0550ae",
    "rule": "#c4cbd4",
    "track": "#d0d7de",
    "accent": "#0550ae",
    "key": "bold #7d4e00",
    "good": "#1a7f37",
    "warn": "#9a6700",
    "bad": "bold #cf222e",
    "info": "#0a6f85",
    "badge": "bold #ffffff on #9a6700",
    "badge_bad": "bold #ffffff on #cf222e",
    "badge_good": "bold #ffffff on #1a7f37",
    "tab": "bold #ffffff on #0550ae",
    "cursor": "#0b0f14 on #cfe2ff",
    "mark": "bold #8250df",
    "input": "#0a6f85",
    "output": "#1a7f37",
    "p0": "#cf222e",
    "p1": "#9a6700",
    "p2": "#0a6f85",
    "p3": "#6b7480",
    "free": "#d0d7de",
    "cached": "#6f9bd1",
    "used": "#1a7f37",
    "shared": "#8250df",
    "prefill": "#0a6f85",
    "decode": "#1a7f37",
    "idle": "#cf222e",
    **_series("#1a7f37", "#0a6f85", "#9a6700", "#8250df", "#cf222e", "#0550ae", "#7a5230", "#57606a"),
}
_ANSI: dict[Role, str] = {
    "text": "default",
    **dict.fromkeys(("label", "dim"), "bright_black"),
    "bold": "bold",
    "title": "bold blue",
    "rule": "bright_black",
    "track": "bright_black",
    "accent": "blue",
    "key": "bold yellow",
    "good": "green",
    "warn": "yellow",
    "bad": "bold red",
    "info": "cyan",
    "badge": "black on yellow",
    "badge_bad": "black on red",
    "badge_good": "black on green",
    "tab": "black on blue",
    "cursor": "reverse",
    "mark": "bold magenta",
    "input": "cyan",
    "output": "green",
    "p0": "red",
    "p1": "yellow",
    "p2": "cyan",
    "p3": "bright_black",
    "free": "bright_black",
    "cached": "blue",
    "used": "green",
    "shared": "magenta",
    "prefill": "cyan",
    "decode": "green",
    "idle": "red",
    **_series("green", "cyan", "yellow", "magenta", "red", "blue", "bright_green", "bright_cyan"),
}
_MONO: dict[Role, str] = {
    **dict.fromkeys(_ROLES, ""),
    **dict.fromkeys(("label", "dim", "rule", "track", "free", "p3"), "dim"),
    **dict.fromkeys(("bold", "title", "key", "bad", "mark", "p0"), "bold"),
    **dict.fromkeys(("badge", "badge_bad", "badge_good", "tab", "cursor"), "reverse"),
    "warn": "underline",
}
_HIGH_CONTRAST: dict[Role, str] = {
    **dict.fromkeys(_ROLES, "bold #ffffff"),
    **dict.fromkeys(("label", "dim", "rule", "track"), "#d0d0d0"),
    "free": "#808080",
    **dict.fromkeys(("good", "output", "used", "decode", "s0"), "bold #00ff5f"),
    **dict.fromkeys(("warn", "key", "p1", "s2"), "bold #ffff00"),
    **dict.fromkeys(("bad", "idle", "p0", "s4"), "bold #ff8080"),
    **dict.fromkeys(
        ("info", "input", "accent", "title", "prefill", "cached", "p2", "s1", "s5"), "bold #5fffff"
    ),
    **dict.fromkeys(("mark", "shared", "s3"), "bold #ff87ff"),
    "p3": "#d0d0d0",
    "s6": "bold #ffd7af",
    "s7": "#d0d0d0",
    "badge": "bold #000000 on #ffff00",
    "badge_bad": "bold #000000 on #ff8080",
    "badge_good": "bold #000000 on #00ff5f",
    "tab": "bold #000000 on #ffffff",
    "cursor": "bold #000000 on #5fffff",
}
THEMES: Mapping[ThemeName, Mapping[Role, str]] = {
    "dark": _DARK,
    "light": _LIGHT,
    "ansi": _ANSI,
    "mono": _MONO,
    "high-contrast": _HIGH_CONTRAST,
}
BACKGROUNDS: Mapping[ThemeName, str] = {"dark": "#14171c", "light": "#ffffff", "high-contrast": "#000000"}
"""Each theme's background. Themes without an entry keep the terminal's background."""


@cache
def style(theme: ThemeName, role: Role, *, selected: bool = False) -> Style:
    """Return a role's style. In the row under the cursor, the role's colour is combined with the cursor's
    background."""
    found = Style.parse(THEMES[theme][role])
    if not selected:
        return found
    cursor = Style.parse(THEMES[theme]["cursor"])
    return (
        cursor
        if role in ("text", "label", "dim", "rule", "track") or cursor.reverse
        else found
        + Style(bgcolor=cursor.bgcolor, bold=True, color=cursor.color if theme == "high-contrast" else None)
    )
