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
from tests.system.attacks.test_event_loop import ATTACKS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
VALUE = re.compile(r"`(\w+)` = (?:(none)|([\d.,/]*\d)(?: (KiB|MiB))?)")
"""Matches a name and its value, with an optional unit. Without KiB or MiB, the value is in the setting's own
unit (s, bytes, tokens)."""


ON_THE_PAGE = "the page states the range of the option or field"
LENGTH = "the length of a text that the service itself wrote"
SHOWN = "the length of a list in a display"
ESTIMATE = "a step or bound of an estimate; it refuses nothing and drops nothing"
PROTOCOL = "a bound of the kernel, of a protocol, or of data that only the service writes"
BENCH = "the load generator's own memory"
INTERNAL = {
    "MAX_ACTION_ROWS": ESTIMATE,
    "MAX_AGE_S": PROTOCOL,
    "MAX_BLOCK": ESTIMATE,
    "MAX_CHARACTER_BYTES": PROTOCOL,
    "MAX_CHARGE_S": ESTIMATE,
    "MAX_COUNT": ON_THE_PAGE,
    "MAX_DAYS": ON_THE_PAGE,
    "MAX_DELAY_S": ON_THE_PAGE,
    "MAX_ERROR_CHARACTERS": LENGTH,
    "MAX_ERROR_CHARS": LENGTH,
    "MAX_EVENTS": ESTIMATE,
    "MAX_FAILED_STARTS": ESTIMATE,
    "MAX_FILES": PROTOCOL,
    "MAX_FREE_MULTIPLE": ESTIMATE,
    "MAX_GRACE_S": ON_THE_PAGE,
    "MAX_GROUPS_BYTES": PROTOCOL,
    "MAX_GROWTH": ESTIMATE,
    "MAX_HELD_TOKENS": ESTIMATE,
    "MAX_INLINE_IDS": ESTIMATE,
    "MAX_LAYOUTS": PROTOCOL,
    "MAX_LINE_BYTES": PROTOCOL,
    "MAX_LOCK_BYTES": PROTOCOL,
    "MAX_NFC_SHRINKING": PROTOCOL,
    "MAX_PASSED": ESTIMATE,
    "MAX_PEER_NUMBER": PROTOCOL,
    "MAX_PREPARED": BENCH,
    "MAX_PREPARED_TOKENS": BENCH,
    "MAX_PROBLEMS": SHOWN,
    "MAX_PROMISED": ESTIMATE,
    "MAX_QUOTED": SHOWN,
    "MAX_REASON_CHARACTERS": LENGTH,
    "MAX_REPORTED_PROBLEMS": SHOWN,
    "MAX_REQUESTS": ON_THE_PAGE,
    "MAX_RETRY_S": ESTIMATE,
    "MAX_ROWS": ON_THE_PAGE,
    "MAX_SILENCE_S": ON_THE_PAGE,
    "MAX_SOCKET_PATH_BYTES": PROTOCOL,
    "MAX_SPAN_S": ON_THE_PAGE,
    "MAX_STEP": ESTIMATE,
    "MAX_STEPS": ESTIMATE,
    "MAX_TAKEN_S": ESTIMATE,
    "MAX_USEFUL_WAIT_S": ESTIMATE,
    "MAX_VOID": ESTIMATE,
    "MAX_WARM_UP": BENCH,
    "MAX_WIDTH": SHOWN,
}
"""Maximums in the code that the page does not name, each with the reason."""


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
    other expressions."""
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


def bounds() -> set[str]:
    """Return the names of all maximums defined in the service's modules, without leading underscores."""
    return {
        found.removeprefix("_")
        for package in ("appliance", "store")
        for path in (ROOT / package).rglob("*.py")
        for found in re.findall(r"^(_?MAX_\w+)\b.*=", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_every_maximum_in_the_code_is_on_the_page_or_is_no_limit_that_a_caller_can_reach() -> None:
    found = bounds()
    assert len(found) > 100
    assert sorted(name for name in found - INTERNAL.keys() if f"`{name}`" not in PAGE) == []
    assert sorted(name for name in INTERNAL if name not in found) == []


def test_every_limit_on_the_page_names_a_test() -> None:
    columns: list[str] = []
    unnamed = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or "test" in cells:
            columns = cells
        elif "test" in columns and cells != ["---"] * len(columns):
            test = dict(zip(columns, cells, strict=True))["test"]
            if not re.search(r"\.py`|`scripts/soak|^loop: `|^(the same|as above)$", test):
                unnamed.append((cells[0], test))
    assert unnamed == [("tenants, keys, registered models and their versions", "none")]


def test_every_attack_that_the_page_names_exists() -> None:
    names = {name for row in re.findall(r"loop: (`.*?) \|$", PAGE, re.MULTILINE) for name in named(row)}
    assert len(names) > 10
    assert sorted(names - ATTACKS.keys()) == []


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


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
