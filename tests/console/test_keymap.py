"""Tests of the operator's keymap file."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from console.app import ConsoleApp
from console.dialogs import TextDialog
from console.keymap import DEFAULT_KEYMAP, read_keymap
from console.keys import KEYS, key_of, shown_name
from console.palette import ConsoleCommands
from tests.console.frames import source
from tests.console.pilots import StillSource, press, run, send_key, shown, until


def written(folder: Path, text: str) -> str:
    """Write a keymap file and return its path."""
    path = folder / "keys.toml"
    path.write_text(text)
    return str(path)


def console(path: str, *, write: bool = False) -> ConsoleApp:
    fake = source()
    fake.__class__ = StillSource
    return ConsoleApp(fake, write=write, keymap=read_keymap(path))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("w", "w"),
        ("W", "W"),
        ("!", "exclamation_mark"),
        (",", "comma"),
        ("+", "plus"),
        (" ", "space"),
        ("esc", "escape"),
        ("PgDn", "pagedown"),
        ("↑", "up"),
        ("^o", "ctrl+o"),
        ("Ctrl+o", "ctrl+o"),
        ("alt+x", "alt+x"),
        ("shift+ctrl+Left", "ctrl+shift+left"),
        ("shift+tab", "shift+tab"),
        ("f12", "f12"),
        ("left_curly_bracket", "left_curly_bracket"),
    ],
)
def test_a_key_can_be_written_as_character_or_by_its_name(tmp_path: Path, given: str, expected: str) -> None:
    keymap = read_keymap(written(tmp_path, f'redraw = "{given}"'))
    assert keymap.problems == ()
    assert keymap.overrides["redraw"] == expected


def test_every_default_key_can_be_written_as_the_help_shows_it(tmp_path: Path) -> None:
    for one in KEYS:
        for key in one.keys:
            keymap = read_keymap(written(tmp_path, f'"{one.command}" = {shown_name(key)!r}'))
            found = next(entry for entry in keymap.keys if entry.command == one.command)
            assert (keymap.problems, key in found.keys) == ((), True), key


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('theme = "w"\n"time bakc" = "b"', "line 2: unknown command 'time bakc': did you mean 'time back'?"),
        ('drain = "D"', "line 1: unknown command 'drain'"),
        ("[act]\ndrain = 'D'", "line 1: unknown command 'act'"),
        ("theme = 7", 'line 1: "theme" = 7: write a key'),
        ("theme = [7]", 'line 1: "theme" = 7: not a key'),
        ('theme = ""', "line 1: \"theme\" = '': not a key"),
        ('theme = "pagedwn"', "unknown key 'pagedwn': did you mean 'pagedown'?"),
        ('theme = "hyper+x"', "unknown modifier 'hyper': use ctrl, alt or shift"),
        ('theme = "ctrl+i"', "terminals send the same code for this key as for tab: write 'tab'"),
        ('theme = "shift+x"', "write the capital letter: 'X'"),
        ('theme = "ctrl+1"', "terminals send no code for this combination"),
        ('theme = "ctrl+shift+x"', "terminals send no code for this combination"),
        ('theme = "ctrl+c"', "this key always quits the console"),
        (
            'theme = "w"\n\nglyphs = "w"',
            'line 3: "glyphs" = \'w\': line 1 gives this key to "theme": remove one of them',
        ),
        ('theme = "w"\ntheme = "x"', "line 2"),
        ("theme = w", "line 1"),
    ],
)
def test_an_error_names_the_file_the_line_the_value_and_the_remedy(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = written(tmp_path, text)
    keymap = read_keymap(path)
    assert len(keymap.problems) == 1
    assert keymap.problems[0].startswith(path)
    assert problem in keymap.problems[0]
    assert (keymap.keys, keymap.overrides) == (KEYS, {})


def test_all_errors_of_a_file_are_listed(tmp_path: Path) -> None:
    assert len(read_keymap(written(tmp_path, 'theme = "ctrl+1"\nnonsense = "x"\npause = 1')).problems) == 3


def test_without_the_users_file_the_default_keys_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_keymap() == DEFAULT_KEYMAP
    (tmp_path / "appliance").mkdir()
    written(tmp_path / "appliance", 'theme = "w"')
    assert key_of(read_keymap().keys, "theme") == "w"
    assert "does not exist" in read_keymap(str(tmp_path / "missing.toml")).problems[0]
    assert "cannot read" in read_keymap(str(tmp_path)).problems[0]


def test_a_key_of_the_file_is_taken_from_the_command_that_has_it_by_default(tmp_path: Path) -> None:
    keymap = read_keymap(written(tmp_path, '"time back" = "p"\n"compare pin" = []'))
    assert key_of(keymap.keys, "time back") == "p"
    assert key_of(keymap.keys, "pause") == key_of(keymap.keys, "compare pin") == ""
    bound = [key for one in keymap.keys for key in one.keys]
    assert len(bound) == len(set(bound))


def test_the_keys_of_the_file_work_and_the_replaced_ones_do_not(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '"screen 4" = "f6"\npause = "z"\n"screen 7" = ["w", "ctrl+o"]\n"move down" = "p"\nquit = "Z"\n',
    )

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "4")
        assert app.session.view.name == "overview"
        await press(pilot, "f6")
        assert app.session.view.name == "requests"
        await press(pilot, "ctrl+o")
        assert app.session.view.name == "tenants"
        before = app.session.view.selected(app.session.context)
        await press(pilot, "p")
        assert app.session.view.selected(app.session.context) != before
        assert not app.session.state.paused
        await press(pilot, "j")
        await press(pilot, "z")
        assert app.session.state.paused
        await press(pilot, "q")
        assert app.is_running
        send_key(app, "ctrl+c")
        await until(pilot, lambda: not app.is_running)

    run(steps, console(path))


def test_help_footer_tabs_and_palette_show_the_keys_of_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '"screen 4" = "f6"\nfilter = "ctrl+o"\npause = []\nhelp = "H"\nback = "^"\n"act models.load" = "M"\n',
    )

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "f6")
        await until(pilot, lambda: "f6 Requests" in shown(app))
        footer = shown(app).splitlines()[-1]
        assert "H help" in footer and "^o filter" in footer and "pause" not in footer
        await press(pilot, "H")
        await until(pilot, lambda: "Help: Requests" in shown(app))
        assert "^ to close" in shown(app)
        app.session.state.help_scroll = 10_000
        app.redraw()
        await until(pilot, lambda: "Load model" in shown(app))
        assert any(
            row.split()[0] == "M" and "Load model" in row for row in shown(app).splitlines() if row.split()
        )
        entries = {command: note for _, note, command in ConsoleCommands(app.screen)._entries()}
        assert entries["filter"] == "key ^o"
        assert entries["pause"] == ""
        assert entries["act models.load"].endswith(" · key M")

    run(steps, console(path, write=True))


def test_an_action_without_default_key_can_get_one_but_not_the_right_to_act(tmp_path: Path) -> None:
    path = written(tmp_path, '"act models.load" = "M"')

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        await press(pilot, "6", "M")
        await until(pilot, lambda: "this console is read-only" in shown(app))
        assert not hasattr(app.source, "performed")

    run(steps, console(path))


def test_with_a_wrong_file_the_console_starts_with_the_default_keys_and_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, 'theme = "w"\n"screen 4" = "ctrl+1"')

    async def steps(pilot: Pilot[int], app: ConsoleApp) -> None:
        def text() -> str:
            return "\n".join(str(one.render()) for one in app.screen.query(Static))

        await until(pilot, lambda: isinstance(app.screen, TextDialog))
        await until(pilot, lambda: "default keys" in text() and f"{path}, line 2" in text())
        await press(pilot, "escape", "4")
        assert app.session.view.name == "requests"

    run(steps, console(path))


def test_a_keymap_of_an_unknown_user_is_a_problem() -> None:
    [problem] = read_keymap("~no-such-user/keys.toml").problems
    assert "~no-such-user/keys.toml" in problem and "no such user" in problem
