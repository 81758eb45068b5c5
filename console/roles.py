"""The roles of text, such as "bad". Themes assign a style to each role; the screens know only roles. This
module is separate so that `appliance top` does not import the themes."""

from __future__ import annotations

from typing import Literal, get_args

_TextRole = Literal["text", "label", "dim", "bold", "title", "rule", "track", "accent", "key", "cursor"]
_StateRole = Literal["good", "warn", "bad", "info", "badge", "badge_bad", "badge_good", "tab", "mark"]
_KindRole = Literal["input", "output", "prefill", "decode", "idle", "p0", "p1", "p2", "p3"]
_BlockRole = Literal["free", "cached", "used", "shared"]
_SeriesRole = Literal["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]
"""Roles that distinguish neighbouring series, such as tenants on the KV block map."""
Role = Literal[_TextRole, _StateRole, _KindRole, _BlockRole, _SeriesRole]
SERIES: tuple[_SeriesRole, ...] = get_args(_SeriesRole)
