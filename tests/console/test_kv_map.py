"""Tests of the KV block map, rendered as lines without a terminal."""

from __future__ import annotations

import re

import msgspec
import pytest

from console.lines import plain
from console.screens.kv import tenant_letters
from console.session import ConsoleSession
from tests.console.frames import SIZES, session, source


def test_the_map_shows_the_shares_of_the_pool_if_a_cell_stands_for_several_blocks() -> None:
    made = session(195, interval_s=1.0)
    made.run("screen kv")
    rows = made.lines(80, 24)
    legend = next(number for number, row in enumerate(rows) if plain(row).startswith("1 cell = 2 blocks"))
    assert plain(rows[legend]) == "1 cell = 2 blocks; a mixed cell shows its first block"
    letters = "".join(one.text for row in rows[5:legend] for one in row)
    assert made.context.snapshot is not None
    pool = made.context.snapshot.kv[0]
    in_use = sum(letters.count(letter) for letter in "█▒") / (pool.blocks_total / 2)
    assert in_use == pytest.approx(pool.blocks_used / pool.blocks_total, abs=0.05)


@pytest.mark.parametrize("variant", ["state", "sharing"])
def test_the_legend_of_the_map_has_the_colours_of_the_map(variant: str) -> None:
    made = session(195, interval_s=1.0)
    made.run("screen kv")
    while made.view.variant != variant:
        made.run("variant")
    rows = made.lines(80, 24)
    legend = next(number for number, row in enumerate(rows) if plain(row).startswith("1 cell =")) + 1
    colours = {one.text[0]: one.role for one in rows[legend] if one.text[:1] in tuple("·▒█▓")}
    assert set(colours) == set("·▒█▓")
    cells = [one for row in rows[5:legend] for one in row if one.role != "tab"]  # Leave out the cursor.
    assert {(one.text[0], one.role) for one in cells if one.text[:1] in colours} <= set(colours.items())


@pytest.mark.parametrize("glyphs", ["block", "ascii"])
def test_the_map_and_the_bar_above_it_have_the_same_characters(glyphs: str) -> None:
    made = session(195, interval_s=1.0)
    for command in ("screen kv", f"glyphs {glyphs}"):
        made.run(command)
    rows = [plain(row) for row in made.lines(80, 24)]
    legend = next(row for row in rows if " cached " in row and " shared " in row)
    # From left to right, the bar shows used blocks, cached blocks and free blocks.
    bar = "".join(dict.fromkeys(rows[3]))
    assert f"{bar[0]} used" in legend and f"{bar[1]} cached" in legend


@pytest.mark.parametrize("variant", ["state", "tenant", "age", "sharing"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 4])
def test_the_legend_says_how_many_blocks_a_cell_stands_for(
    variant: str, size: tuple[int, int], stride: int
) -> None:
    made = session(195, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None
    first, *others = snapshot.kv
    assert first.blocks is not None
    blocks = msgspec.structs.replace(
        first.blocks,
        states=first.blocks.states * 20,
        owners=first.blocks.owners * 20,
        ages=(first.blocks.ages or b"") * 20,
        stride=stride,
    )
    total = len(blocks.states) * stride
    made.context.snapshot = msgspec.structs.replace(
        snapshot, kv=[msgspec.structs.replace(first, blocks=blocks, blocks_total=total), *others]
    )
    made.run("screen kv")
    while made.view.variant != variant:
        made.run("variant")
    rows = [plain(row) for row in made.lines(*size)]
    at = next(number for number, row in enumerate(rows) if row.startswith("1 cell = "))
    found = re.fullmatch(r"1 cell = (\d+) blocks; a mixed cell shows its first block", rows[at])
    assert found is not None
    cells = sum(map(len, rows[5:at]))
    assert cells * int(found[1]) >= total > (cells - 1) * int(found[1]) - stride * 8
    # The legend and the blocks under the cursor fit below the map.
    assert any(row.startswith("▸ block") for row in rows[at:])


@pytest.mark.parametrize("size", SIZES)
def test_the_legend_of_the_ages_fits(size: tuple[int, int]) -> None:
    made = session(195, interval_s=1.0)
    made.run("screen kv")
    while made.view.variant != "age":
        made.run("variant")
    assert any("≥8 min since use" in plain(row) for row in made.lines(*size))


def test_every_tenant_has_its_own_letter_on_the_map_of_kv_blocks() -> None:
    assert tenant_letters(["support-bot", "search", "s", "", "123"]) == {
        "123": "a",
        "s": "s",
        "search": "e",
        "support-bot": "u",
        "": "?",
    }
    many = tenant_letters(f"team-{number}" for number in range(60))
    assert len(set(many.values()) - {"?"}) == 52


@pytest.mark.parametrize("theme", ["dark", "mono"])
def test_the_legend_names_more_than_eight_of_twenty_tenants(theme: str) -> None:
    made = ConsoleSession(fake := source(tenants=20, requests=400))
    made.accept(fake.step())
    for command in (f"theme {theme}", "screen kv", "variant"):
        made.run(command)
    assert made.view.variant == "tenant"

    def legend(width: int, height: int) -> str:
        lines = [plain(row) for row in made.lines(width, height)]
        assert len(lines) == height
        at = next(number for number, text in enumerate(lines) if text.startswith("1 cell = "))
        end = next(number for number, text in enumerate(lines) if text.startswith("▸ block"))
        return " ".join(lines[at:end])

    snapshot = made.context.snapshot
    assert snapshot is not None and snapshot.kv[0].blocks is not None
    names = set(snapshot.kv[0].blocks.tenants)
    assert len(names) > 8
    letters = tenant_letters(one.name for one in snapshot.tenants)
    wide = legend(120, 40)
    assert all(f"{letters[name]} {name}" in wide for name in names)
    narrow = legend(80, 24)
    shown = sum(f"{letters[name]} {name} " in narrow for name in names)
    assert 0 < shown < len(names) and f"and {len(names) - shown} more" in narrow
