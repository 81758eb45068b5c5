"""Tests that, in every list, a filter with the exact text or value of a cell finds the cell's row."""

from __future__ import annotations

import pytest

from console.screens.base import View
from console.screens.table import TableColumn, TableView
from tests.console.frames import VIEWS, session

_CELLS = 12
"""Maximum number of different cells that are tried in each column."""


@pytest.mark.parametrize(
    "view", [one for one in VIEWS if isinstance(one, TableView)], ids=lambda view: view.name
)
def test_every_list_is_filtered_by_exactly_the_text_of_a_cell(view: View) -> None:
    made = session()
    if view.name == "compare":
        return  # The screen Compare has rows only after two times have been chosen.
    made.run(f"screen {view.name}")
    table = made.view
    assert isinstance(table, TableView)
    tried = 0
    for _ in table.variants or ("",):
        table.filter = ""
        rows = table.ordered(made.context)
        for column in table.columns:
            for cell in list(dict.fromkeys(column.shown(row).strip() for row in rows))[:_CELLS]:
                for field in column.names:
                    found = _filtered(table, made.context, f'{field}="{cell}"')
                    others = _filtered(table, made.context, f'!{field}="{cell}"')
                    assert [*found, *others] and len(found) + len(others) == len(rows)
                    assert found == [row for row in rows if _is_equal(column, row, cell, found)], (
                        field,
                        cell,
                    )
                    tried += 1
        table.next_variant()
    assert tried


def _filtered(table: TableView, context: object, text: str) -> list[object]:
    table.filter = text
    found = table.ordered(context)  # type: ignore[arg-type]
    assert not table.error, table.error
    return found


def _is_equal(column: TableColumn, row: object, cell: str, found: list[object]) -> bool:
    """Return whether a row shows this cell, or has the same value as a row that shows this cell."""
    if column.shown(row).strip().lower() == cell.lower():
        return True
    value = column.value(row)
    same = str(value).lower() == cell.lower() if value is not None else False
    return same or (isinstance(value, int | float) and any(one is row for one in found))
