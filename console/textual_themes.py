"""The themes in Textual's format, for dialogs, the palette and the command line."""

from __future__ import annotations

from dataclasses import replace

from textual.theme import BUILTIN_THEMES, Theme

from console.roles import Role
from console.themes import BACKGROUNDS, THEMES, ThemeName


def textual_theme(name: ThemeName) -> Theme:
    """Return the Textual theme for dialogs and the command line."""
    if name not in BACKGROUNDS:
        theme = replace(BUILTIN_THEMES["ansi-dark"], name=f"console-{name}")
        if name == "mono":
            plain = "ansi_default"
            theme = replace(
                theme, primary=plain, secondary=plain, warning=plain, error=plain, success=plain, accent=plain
            )
        return theme
    roles = THEMES[name]

    def colour(role: Role) -> str:
        return roles[role].split(" on ")[0].removeprefix("bold ")

    background = BACKGROUNDS[name]
    return Theme(
        name=f"console-{name}",
        primary=colour("accent"),
        secondary=colour("info"),
        warning=colour("warn"),
        error=colour("bad"),
        success=colour("good"),
        accent=colour("accent"),
        foreground=colour("text"),
        background=background,
        surface=background,
        panel=roles["cursor"].split(" on ")[1],
        dark=name != "light",
        variables={"scrollbar-background": background},
    )
