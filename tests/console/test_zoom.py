"""Tests of zooming a panel and of jump mode, without a terminal."""

from __future__ import annotations

import re

import msgspec
import pytest

from console.lines import plain
from console.screens.registry import all_views, alternate_views
from console.screens.table import TableView
from console.session import ConsoleSession
from tests.console.frames import SIZES, session


def _panels(made: ConsoleSession, size: tuple[int, int]) -> list[str]:
    """Return the headings of the screen."""
    rows = [plain(row) for row in made.lines(*size)[2:]]
    return [row for row in rows if re.match(r"(─|▸|[a-z]) .* ─", row)]


@pytest.mark.parametrize("size", SIZES)
def test_a_replica_of_batches_is_zoomed_and_all_replicas_return(size: tuple[int, int]) -> None:
    made = session(steps=60, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None
    names = [one.replica for one in snapshot.batches]
    made.run("screen batches")
    every = _panels(made, size)
    assert len(every) > 1
    made.run("zoom")
    for name in names[:2]:
        [panel] = _panels(made, size)
        assert panel.startswith(f"▸ {name} ")
        made.run("move down")
    made.run("move first")
    made.run("back")
    assert _panels(made, size) == every


def test_jump_mode_selects_a_replica_of_batches() -> None:
    made = session(steps=60, interval_s=1.0)
    made.run("screen batches")
    before = _panels(made, (120, 60))
    made.run("jump")
    lettered = _panels(made, (120, 60))
    assert [row[0] for row in lettered[:2]] == ["a", "s"]
    made.jump("s")
    after = _panels(made, (120, 60))
    assert before[0].startswith("▸") and after[1] == f"▸{before[1][1:]}" and after[0] == f"─{before[0][1:]}"


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_the_map_of_blocks_is_zoomed_and_the_contexts_return(size: tuple[int, int], blocks: bool) -> None:
    made = session(steps=60, interval_s=1.0)
    snapshot = made.context.snapshot
    assert snapshot is not None
    if not blocks:
        caches = [msgspec.structs.replace(one, blocks=None) for one in snapshot.kv]
        made.context.snapshot = msgspec.structs.replace(snapshot, kv=caches)
    made.run("screen kv")
    made._received = None  # The frame does not show the age of the snapshot.
    every = made.lines(*size)
    made.run("zoom")
    zoomed = made.lines(*size)
    assert not any("Longest contexts" in plain(row) for row in zoomed)
    if size == SIZES[0]:
        assert any("Longest contexts" in plain(row) for row in every)
    made.run("back")
    assert made.lines(*size)[:-1] == every[:-1]
    while made.view.variant != "replicas":
        made.run("variant")
    made.run("zoom")
    assert "only one panel" in plain(made.lines(*size)[-1])


def test_jump_mode_goes_to_the_blocks_of_a_long_context() -> None:
    made = session(steps=60, interval_s=1.0)
    made.run("screen kv")
    made.lines(120, 40)
    made.run("jump")
    assert made.context.jumping
    rows = [plain(row) for row in made.lines(120, 40)]
    listed = rows[next(at for at, row in enumerate(rows) if "Longest contexts" in row) + 1 :]
    [row] = [row for row in listed if row.startswith("s")]
    made.jump("s")
    request = made.view.request(made.context)
    assert request and row[1:].startswith(request[1:])
    made.run("zoom")
    made.lines(120, 40)
    made.run("jump")
    assert made.state.message == "KV cache has no rows or panels to jump to"


@pytest.mark.parametrize("size", SIZES)
def test_a_panel_of_the_overview_is_zoomed_and_all_panels_return(size: tuple[int, int]) -> None:
    made = session()

    def titles() -> list[str]:
        text = "\n".join(plain(row) for row in made.lines(*size)[2:])
        return [name for name in ("Tokens per second", "Latency", "KV cache", "GPUs", "Host") if name in text]

    every = titles()
    made.run("zoom")
    assert titles() == every[:1]
    made.run("zoom")
    assert titles() == every
    for command in ("move down", "move right", "open"):
        made.run(command)
        made.lines(*size)
    alone = titles()
    assert len(alone) == 1 and alone != every[:1]
    made.run("move up")
    made.run("move left")
    assert titles() == every[:1]
    made.run("back")
    assert titles() == every
    assert any(plain(row).startswith("▸ Tokens per second") for row in made.lines(*size))
    made.run("back")
    assert not any("▸" in plain(row) for row in made.lines(*size))


@pytest.mark.parametrize(
    "name", [view.name for view in (*all_views(), *alternate_views()) if isinstance(view, TableView)]
)
def test_the_details_of_a_row_are_zoomed_and_the_table_returns(name: str) -> None:
    made = session()
    made.run(f"screen {name}")

    def body() -> list[str]:
        return [plain(row) for row in made.lines(120, 40)[2:-1]]

    before = body()
    made.run("zoom")
    assert body()[0].startswith(f"─ {made.view.title} ▸ ")
    made.run("zoom")
    assert body() == before


@pytest.mark.parametrize("name", ["overview", "batches", "kv"])
def test_a_list_of_facts_refuses_the_keys_that_would_change_nothing_visible(name: str) -> None:
    made = session(steps=60, interval_s=1.0)
    made.run(f"screen {name}")
    made._received = None  # The frame does not show the age of the snapshot.
    large = made.lines(120, 40)
    small = made.lines(59, 30)
    footer = plain(small[-1])
    assert "zoom" not in footer and "view:" not in footer and "help" in footer
    for command in ("zoom", "jump", "variant", "open", "move left", "move right"):
        made.run(command)
        title = made.view.title
        assert (
            plain(made.lines(59, 30)[-1]).strip() == f"this key in {title} needs a terminal of at least 60×18"
        )
        assert not made.context.jumping
    made.run("move down")
    assert made.copied() == ""
    assert made.lines(120, 40) == large


def test_facts_that_do_not_fit_are_scrolled_to() -> None:
    made = session()
    made.run("screen overview")
    first = plain(made.lines(59, 6)[1])
    made.run("move last")
    rows = [plain(row) for row in made.lines(59, 6)[1:-1]]
    assert first not in rows and rows[-1].strip()
    made.run("move first")
    assert plain(made.lines(59, 6)[1]) == first


def test_jump_mode_labels_the_rows_of_a_table_in_a_small_terminal() -> None:
    made = session()
    made.run("screen tenants")
    view = made.view
    assert isinstance(view, TableView)
    made.lines(59, 17)
    made.run("jump")
    rows = [plain(row) for row in made.lines(59, 17)[2:]]
    assert [row[0] for row in rows[:3]] == ["a", "s", "d"]
    made.jump("d")
    assert rows[2][1:].startswith(view.cursor)
    assert plain(made.lines(59, 17)[4]).startswith(f"▸{view.cursor}")


def _started_and_replaced(size: tuple[int, int], screen: str) -> tuple[ConsoleSession, list[str], list[str]]:
    """Start jump mode, then let the service replace all requests and alerts. Return the session, and the
    lines of the screen before and after the replacement, without the header."""
    made = session(write=True)
    made.run(f"screen {screen}")
    made.lines(*size)
    made.run("jump")
    before = [plain(row) for row in made.lines(*size)[1:]]
    snapshot = made.context.snapshot
    assert snapshot is not None
    made.accept(
        msgspec.structs.replace(
            snapshot,
            at=snapshot.at + 1,
            requests=[
                msgspec.structs.replace(one, request_id=f"new-{at}", age_s=0.1 * at)
                for at, one in enumerate(snapshot.requests)
            ],
            tenants=snapshot.tenants[:3],
            batches=snapshot.batches[:1],
        )
    )
    return made, before, [plain(row) for row in made.lines(*size)[1:]]


@pytest.mark.parametrize("size", [*SIZES, (59, 17)])
@pytest.mark.parametrize("screen", ["overview", "batches", "kv", "requests", "tenants"])
def test_rows_and_letters_stay_in_place_while_jump_mode_is_active(screen: str, size: tuple[int, int]) -> None:
    if size == (59, 17) and screen in ("overview", "batches", "kv"):
        pytest.skip("a list of facts has no jump mode")
    made, before, during = _started_and_replaced(size, screen)
    if not made.context.jumping:
        pytest.skip("the panel with the letters does not fit")
    assert during == before
    made.jump("")
    assert [plain(row) for row in made.lines(*size)[1:]] != before


def test_a_letter_goes_to_the_row_that_it_labelled_when_jump_mode_began() -> None:
    made, before, _ = _started_and_replaced((120, 40), "tenants")
    row = next(row for row in before if row.startswith("s"))
    made.jump("s")
    view = made.view
    assert isinstance(view, TableView)
    assert row[1:].startswith(view.cursor)


def test_a_letter_of_a_row_that_has_ended_says_so() -> None:
    made, before, _ = _started_and_replaced((120, 40), "requests")
    row = next(row for row in before if row.startswith("d"))
    made.jump("d")
    assert "is no longer in the list" in made.state.message
    assert made.state.message.startswith(row[1:].split()[0])
    lines = [plain(one) for one in made.lines(120, 40)]
    assert lines[before.index(row) + 1].startswith("▸")
