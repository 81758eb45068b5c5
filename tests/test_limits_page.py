"""Tests that docs/limits.md matches the code: each setting and constant has the value stated on the page, and
each test named on the page exists."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from appliance.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
VALUE = re.compile(r"`(\w+)` = (?:(none)|([\d.,/]*\d)(?: (KiB|MiB))?)")
"""Matches a name and its value, with an optional unit. Without KiB or MiB, the value is in the setting's own
unit (s, bytes, tokens)."""


def named_values() -> Iterator[tuple[str, float | None]]:
    """Yield every name for which the page states a value, and that value."""
    for name, none, number, unit in VALUE.findall(PAGE):
        yield name, None if none else float(Fraction(number.replace(",", ""))) * UNITS.get(unit, 1)


def settings() -> dict[str, list[Any]]:
    """Return the defaults of all settings, by name."""
    found: dict[str, list[Any]] = defaultdict(list)

    def add(table: Any) -> None:
        for field in msgspec.structs.fields(table):
            value = getattr(table, field.name)
            if isinstance(value, msgspec.Struct):
                add(value)
            else:
                found[field.name].append(value)

    add(Settings())
    return found


def constants() -> dict[str, list[float]]:
    """Return the numbers that modules assign to names, by name without leading underscores."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in (
        path for package in ("appliance", "engine", "store") for path in (ROOT / package).rglob("*.py")
    ):
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                value = number_of(line.value)
                if value is not None:
                    found[line.targets[0].id.removeprefix("_")].append(value)
    return found


def number_of(expression: ast.expr) -> float | None:
    """Return the value of a numeric literal, or of a product, quotient or shift of literals. Return None for
    anything else."""
    match expression:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.LShift() as operator, right=right):
            first, second = number_of(left), number_of(right)
            if first is None or second is None:
                return None
            if isinstance(operator, ast.LShift):
                return int(first) << int(second)
            return first * second if isinstance(operator, ast.Mult) else first / second
    return None


def test_every_named_setting_and_constant_has_the_value_that_the_page_says() -> None:
    known_settings, known_constants = settings(), constants()
    wrong = []
    values = list(named_values())
    assert len(values) > 50
    for name, said in values:
        known = known_constants[name] if name.isupper() else known_settings[name]
        if not known:
            wrong.append(f"{name}: there is no such {'constant' if name.isupper() else 'setting'}")
        elif said is None:
            if any(known):
                wrong.append(f"{name}: none on the page, {known} in the code")
        elif said not in known:
            wrong.append(f"{name}: {said:,g} on the page, {known} in the code")
    assert wrong == []


def test_every_limit_that_clients_meet_is_on_the_page() -> None:
    tables = (Settings().limits, Settings().idempotency)
    names = {field.name for table in tables for field in msgspec.structs.fields(table)}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


def test_every_test_that_the_page_names_exists() -> None:
    missing, named = [], 0
    for row in (line for line in PAGE.splitlines() if line.startswith("|")):
        text = ""
        for name in re.findall(r"`([\w/]+\.py|test_\w+)`", row):
            named += 1
            if not name.endswith(".py"):
                if text and f"def {name}(" not in text:
                    missing.append(name)
                continue
            path = next(
                (path for path in (ROOT / name, ROOT / "tests/system/attacks" / name) if path.exists()), None
            )
            if path is None:
                missing.append(name)
            text += "" if path is None else path.read_text(encoding="utf-8")
    assert named > 50
    assert missing == []
