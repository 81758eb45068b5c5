"""The console as a Textual application. It draws the frames of a `ConsoleSession`, and passes snapshots and
lists from the source to the session."""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
from collections.abc import Sequence
from types import FrameType
from typing import ClassVar

from textual import events, on, work
from textual.app import App, ComposeResult
from textual.widgets import Input
from textual.worker import Worker, WorkerError

from appliance.actions import action_named
from appliance.protocol import Key, PeerMapping, Silence
from console import units
from console.action_runner import ActionRunner
from console.commands import ALTERNATES, Targets, listed, parse_action
from console.context import Context
from console.dialogs import TextDialog
from console.files import ExportedFiles, path_of
from console.fingerprints import peer_name
from console.history import History
from console.keymap import DEFAULT_KEYMAP, QUIT_KEYS, Keymap
from console.keys import NO_KEY, SCREENS
from console.palette import ConsoleCommands, ConsolePalette
from console.parameters import CommandError
from console.prompt import Closed, PromptKind, PromptLine
from console.screens.table import TableView
from console.session import ConsoleSession
from console.source import ListName, ListRow, SnapshotSource, SourceError
from console.textual_themes import textual_theme
from console.themes import THEMES, ThemeName
from console.travel import TimeTravel
from console.widget import FrameWidget

_RETRY_S = 0.5
"""Delay after a failed read. It is short so that the console reconnects quickly once the service is back."""
_ROWS_EVERY_S = 3.0
_DIALOG_ROWS_EVERY_S = 0.5
"""Interval for rereading a list while an open dialog shows an impact that depends on the list."""
_CHAIN_IS_PRESENT = "only the current audit chain can be verified: type :live to return to live"


class ConsoleApp(App[int]):
    """The operator console."""

    CSS = "Screen { layout: vertical; overflow: hidden; }"
    COMMANDS: ClassVar = {ConsoleCommands}
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = NO_KEY
    """Disables Textual's own key for the command palette. The key table defines this key instead, so that a
    keymap can change it."""
    ESCAPE_TO_MINIMIZE = False

    def __init__(
        self,
        source: SnapshotSource,
        *,
        write: bool = False,
        theme: ThemeName = "dark",
        keymap: Keymap = DEFAULT_KEYMAP,
    ) -> None:
        super().__init__(ansi_color=None)
        self.source = source
        self.session = ConsoleSession(source, write=write)
        self.session.theme = theme
        self.session.context.keys = keymap.keys
        self._keymap_problems = keymap.problems
        self.set_keymap(keymap.overrides)
        self.frame_widget = FrameWidget()
        self.prompt = PromptLine()
        self.travel = TimeTravel(self)
        self.action_runner = ActionRunner(self)
        self._feeding: Worker[None] | None = None
        self._reading: set[ListName] = set()
        self._fed = 0
        self._verifying = False
        self._exported = ExportedFiles()

    def compose(self) -> ComposeResult:
        """Create the frame, and the input line for commands and filters."""
        yield self.frame_widget
        yield self.prompt

    def on_mount(self) -> None:
        """Start reading the source."""
        for name in THEMES:
            self.register_theme(textual_theme(name))
        self.theme = f"console-{self.session.theme}"
        self.frame_widget.focus()
        self._handle_signals()
        self.redraw()
        if self.source.kind == "replay":
            self.travel.open(None)
        else:
            self._feeding = self.feed()
        self.set_interval(1.0, self._tick)
        if self._keymap_problems:
            self.push_screen(TextDialog("Keymap not loaded: using the default keys", self._keymap_problems))

    async def on_event(self, event: events.Event) -> None:
        """Finish handling each key before handling the next one, even if several keys arrive together.
        Characters after `:` or `/` then go to the command line, and keys after `enter` do not."""
        if not isinstance(event, events.Key) or event.is_forwarded:
            await super().on_event(event)
            return
        if event.key in QUIT_KEYS:  # These keys have other meanings in a dialog.
            self.exit(0)
            return
        if self.focused is self.frame_widget:
            used = self._jump(event) or await self._check_bindings(event.key)
        else:
            bound = self.focused is self.prompt and self.prompt.is_bound(event)
            used = bound and await self._check_bindings(event.key)
        if not used:
            await super().on_event(event)
        if self.focused is self.prompt and (closed := await self.prompt.result()) is not None:
            self._close_prompt(closed)

    # ── drawing ──────────────────────────────────────────────────────────────────────────────

    def redraw(self) -> None:
        """Draw what has changed since the previous frame."""
        width, height = self.size
        self.session.state.footer = not self.prompt.display or bool(self.session.state.message)
        self.frame_widget.show(
            self.session.lines(width, height - bool(self.prompt.display)), self.session.theme
        )

    def on_resize(self, event: events.Resize) -> None:
        """Redraw at the new size."""
        self.call_after_refresh(self.redraw)

    def _tick(self) -> None:
        if self.session.needs_tick:
            self.redraw()
        self._read_lists()

    # ── the source ───────────────────────────────────────────────────────────────────────────

    @work(exclusive=True, group="feed", exit_on_error=True)
    async def feed(self) -> None:
        """Show each snapshot as it arrives. If the service does not respond, retry until it does."""
        while True:
            try:
                self.source.reads_blocks = self.session.view.reads_blocks or (
                    self.action_runner.confirming is not None
                    and self.action_runner.confirming.target == "request"
                )
                snapshot = await self.source.next()
            except SourceError as error:
                self.session.fail(str(error))
                self.action_runner.show_impact()
                self.redraw()
                await asyncio.sleep(_RETRY_S)
                continue
            self.session.accept(snapshot)
            self.action_runner.show_impact()
            self._fed += 1
            self.redraw()
            if self._fed == 1:
                self.read_past()

    @work(group="charts", exit_on_error=True)
    async def read_past(self) -> None:
        """Fill the charts with values recorded in the minutes before the console started. Without a
        recording, the charts start empty."""
        first = self.session.newest().history.points[0].at
        earlier = History()
        with contextlib.suppress(SourceError):
            await self.travel.recording().extend(earlier, first, 1)
            self.session.prepend(earlier)
            self.redraw()

    def _read_lists(self) -> None:
        if self.session.past is not None:
            return
        for name in {*self.session.view.lists(), *self.action_runner.lists(), *self._completed_lists()}:
            if name not in self._reading:
                self._reading.add(name)
                self.read_list(name)

    @work(group="lists", exit_on_error=True)
    async def read_list(self, name: ListName) -> None:
        """Read one of the screen's lists immediately, then periodically while the screen is shown."""
        await self.read_rows(name)
        self.action_runner.show_impact()
        self.redraw()
        await asyncio.sleep(_DIALOG_ROWS_EVERY_S if name in self.action_runner.lists() else _ROWS_EVERY_S)
        self._reading.discard(name)

    @work(group="lists", exit_on_error=True)
    async def read_again(self, names: Sequence[ListName]) -> None:
        """Reread the lists that an action may have changed."""
        for name in names:
            await self.read_rows(name)
        self.redraw()

    async def read_rows(self, name: ListName) -> None:
        """Read a list and store its rows. If the list cannot be read, store the reason."""
        try:
            self.session.take_rows(name, await self.source.rows(name))
        except SourceError as error:
            self.session.take_rows(name, [], str(error))

    def _completed_lists(self) -> tuple[ListName, ...]:
        """Return the lists that provide target names for completion while the command line is open."""
        completing = self.prompt.display and self.prompt.kind == ":"
        return ("callers", "silences", "rules") if completing else ()

    # ── commands ─────────────────────────────────────────────────────────────────────────────

    def action_run(self, command: str) -> None:
        """Run a command from the key table."""
        word, _, rest = command.partition(" ")
        if self.travel.run(command):
            pass
        elif self.session.run(command):
            if word == "theme":
                self.theme = f"console-{self.session.theme}"
            if word in ("screen", "variant"):
                self._read_lists()
                if self.session.past is not None:
                    self.travel.read_lists()
        elif word == "quit":
            self.exit(0)
            return
        elif word == "palette":
            self.push_screen(ConsolePalette())
        elif word == "redraw":
            self.refresh(repaint=True, layout=True)
            self.frame_widget.refresh()
        elif word in ("command", "filter"):
            self._open_prompt("/" if word == "filter" else ":")
        elif word == "copy":
            if text := self.session.copied():
                self.copy_to_clipboard(text)
                self.session.say("copied to the terminal's clipboard", "dim")
            else:
                self.session.say("nothing to copy: there is no row or request under the cursor", "warn")
        elif word == "export":
            self._export(rest)
        elif word == "verify":
            self._begin_verifying()
        elif word == "actions":
            self.action_runner.choose()
        elif command == "act resume":
            self.action_runner.resume()
        elif word == "act":
            self.action_runner.begin(action_named(rest), {})
        self.redraw()

    def _jump(self, event: events.Key) -> bool:
        """Leave jump mode and move the cursor to the row or panel with the pressed letter, if there is one.
        Return False if jump mode is not active."""
        if not self.session.context.jumping:
            return False
        self.session.jump(event.character or "")
        self.redraw()
        return True

    def run_line(self, text: str) -> None:
        """Run the command line that the operator typed after `:`."""
        word, _, rest = text.strip().partition(" ")
        if not word:
            return
        names = {name: key for key, name, _ in SCREENS}
        try:
            found = parse_action(text)
            if found is not None:
                self.action_runner.begin(found[0], found[1], given=True)
            elif text.split() == ["audit", "verify"]:
                self.action_run("verify")
            elif word in names:
                self.action_run(f"screen {names[word]}")
            elif word in ALTERNATES:
                self.action_run(f"screen {word}")
            elif word in ("q", "quit", "exit"):
                self.exit(0)
            elif word in ("time", "compare", "incident", "live"):
                self.travel.run_line(word, rest.strip())
            elif word in ("theme", "glyphs", "interval", "sort", "help", "pause", "export", "filter"):
                self.action_run(f"{word} {rest}".strip())
            else:
                raise CommandError(
                    f"unknown command {word!r}: press tab in the command line to list the commands"
                )
        except ValueError as error:
            self.session.say(str(error), "bad")
        self.redraw()

    def _begin_verifying(self) -> None:
        """Show the audit screen and start verifying the audit chain unless a verification is already
        running."""
        if self.session.past is not None:
            self.session.say(_CHAIN_IS_PRESENT, "warn")
            return
        self.action_run("screen audit")
        if not self._verifying:
            self._verifying = True
            self.verify(self.session.context)

    @work(group="verify", exit_on_error=True)
    async def verify(self, context: Context) -> None:
        """Verify the audit chain and show the result on the audit screen. The result is stored in `context`,
        the input to the live screens."""
        context.chain = "verifying the audit chain…"
        self.redraw()
        try:
            context.chain = await self.source.verify()
        except SourceError as error:
            context.chain = f"not verified: {error}"
        finally:
            self._verifying = False
        self.redraw()

    def _export(self, rest: str) -> None:
        form, _, name = (rest or "csv").partition(" ")
        try:
            text = self.session.export(form)
            if self.is_web:
                # A browser session must not write files on the server.
                self.deliver_text(
                    io.StringIO(text), save_filename=f"appliance-{self.session.view.name}.{form}"
                )
                return
            path = path_of(name.strip() or f"appliance-{self.session.view.name}.{form}")
            self._exported.write(path, text)
            self.session.say(f"wrote {path}", "good")
        except ValueError as error:
            self.session.say(str(error), "bad")
        except OSError as error:
            self.session.say(f"cannot write {error.filename}: {error.strerror}", "bad")

    # ── the command line ─────────────────────────────────────────────────────────────────────

    def _open_prompt(self, kind: PromptKind) -> None:
        view = self.session.view
        if kind == "/" and not isinstance(view, TableView):
            self.session.say(f"{view.title} has no rows to filter", "warn")
            return
        text = view.filter if kind == "/" and isinstance(view, TableView) else ""
        self.prompt.open(kind, text, self._targets)
        self._read_lists()

    def _targets(self) -> Targets:
        """Return the targets of each kind, for completion."""
        context = self.session.context
        snapshot = context.snapshot
        if snapshot is None:
            return {}
        active = [one for one in snapshot.alerts if one.state != "resolved"]
        return {
            "model": {one.name: "" for one in snapshot.models},
            "tenant": {one.name: "" for one in snapshot.tenants},
            "request": {one.request_id: "" for one in snapshot.requests},
            "alert": {one.id: units.about(one.where, one.description) for one in active},
            "rule": {one.subject: "" for one in context.rows_of("rules", ListRow)},
            "silence": {
                one.id: f"{one.rule} on {one.subject}" for one in context.rows_of("silences", Silence)
            },
            "key": {one.id: one.name for one in context.rows_of("callers", Key) if one.valid_at(snapshot.at)},
            "peer": {
                peer_name(one): one.tenant
                for one in context.rows_of("callers", PeerMapping)
                if one.source == "mapped"
            },
        }

    @on(PromptLine.Choices)
    def _show_choices(self, event: PromptLine.Choices) -> None:
        """Show possible completions above the command line."""
        self.session.say(listed(event.texts, self.size.width - 2), "dim")
        self.redraw()

    @on(Input.Changed, "PromptLine")
    def _preview_filter(self) -> None:
        view = self.session.view
        if self.prompt.display and self.prompt.kind == ":" and self.session.state.message:
            self.session.say("")
            self.redraw()
        if self.prompt.display and self.prompt.kind == "/" and isinstance(view, TableView):
            view.filter = self.prompt.value.strip()
            self.redraw()

    def _close_prompt(self, closed: Closed) -> None:
        """Run the submitted command or apply the submitted filter. If a filter was cancelled, restore the
        previous filter."""
        self.frame_widget.screen.set_focus(self.frame_widget)
        self.session.say("")
        view = self.session.view
        if closed.kind == "/" and isinstance(view, TableView):
            view.filter = (closed.before if closed.text is None else closed.text).strip()
        elif closed.text:
            self.run_line(closed.text)
        self.call_after_refresh(self.redraw)

    # ── the mouse ────────────────────────────────────────────────────────────────────────────

    @on(FrameWidget.Clicked)
    def _click(self, event: FrameWidget.Clicked) -> None:
        if event.command:
            self.session.stop_jumping()
            self.action_run(event.command)

    @on(FrameWidget.Scrolled)
    def _scroll(self, event: FrameWidget.Scrolled) -> None:
        self.session.stop_jumping()
        for _ in range(abs(event.rows)):
            self.session.run("move down" if event.rows > 0 else "move up")
        self.redraw()

    # ── exit paths ───────────────────────────────────────────────────────────────────────────

    def _handle_signals(self) -> None:
        """Restore the terminal if a signal ends the console."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
                loop.add_signal_handler(number, self.exit, 128 + number)
        self._resume_only_if_suspended()

    def _resume_only_if_suspended(self) -> None:
        """Ignore SIGCONT unless the console was suspended. When a terminal is lost, the kernel sends SIGHUP
        and SIGCONT. On SIGCONT, Textual would start a second input thread that keeps the process running
        without a terminal."""
        suspend, resume = signal.getsignal(signal.SIGTSTP), signal.getsignal(signal.SIGCONT)
        if not callable(suspend) or not callable(resume):
            return
        suspended = False

        def on_suspend(number: int, frame: FrameType | None) -> None:
            nonlocal suspended
            suspended = True
            suspend(number, frame)

        def on_continue(number: int, frame: FrameType | None) -> None:
            nonlocal suspended
            if suspended:
                suspended = False
                resume(number, frame)

        signal.signal(signal.SIGTSTP, on_suspend)
        signal.signal(signal.SIGCONT, on_continue)

    async def on_unmount(self) -> None:
        """Release the source's connections once nothing reads from the source any more."""
        if self._feeding is not None:
            self._feeding.cancel()
            with contextlib.suppress(WorkerError):
                await self._feeding.wait()
        await self.source.close()
