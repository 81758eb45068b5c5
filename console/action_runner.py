"""Performs actions: determines the targets, asks for confirmation in a dialog, and shows the results."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from appliance.actions import Action, action_named
from appliance.actions.parameters import SetTenant
from appliance.protocol import Done, DrainStatus, Key, Tenant
from appliance.snapshot import Alert
from console.action_dialog import ActionDialog, Confirmed, fields_of
from console.dialogs import Choice, ChoiceDialog, TextDialog
from console.fingerprints import required_lists
from console.impact import Impact, forecast_lines, result_lines
from console.keys import offered
from console.replay import FILE_IS_FIXED, PAST_IS_FIXED
from console.roles import Role
from console.source import ListName, NoAnswerError, SourceError

if TYPE_CHECKING:
    from console.app import ConsoleApp

_LISTED_ON: dict[str, str] = {"request": "requests", "tenant": "tenants", "key": "keys", "peer": "keys"}
"""Kinds of objects that must be selected before an action can start, each with the screen that lists them.
An action on another kind can start without a selection."""
_LISTED_RESULTS = (Alert, DrainStatus, Key, Tenant)
"""Types of results that are not shown in a dialog, because the screens show them."""
_MAX_READ_S = 1.0
"""Time that a dialog waits for the lists that describe its target. The console rereads these lists while the
dialog is open, so the dialog also opens if the service responds late or not at all."""
_UNCERTAIN = "The service may have performed the action: check before you repeat it"
_READ_ONLY = "this console is read-only: start it with --write to perform actions"


OutcomeKind = Literal["done", "no longer listed", "failed", "cancelled", "not tried"]


class ActionOutcome(NamedTuple):
    """An action's outcome for one of its targets."""

    target: str | None
    kind: OutcomeKind
    reason: str = ""
    """Why the action failed, or an empty string."""

    @property
    def text(self) -> str:
        """The outcome as one line of text."""
        return f"{self.target}: {self.kind}" + (f": {self.reason}" if self.reason else "")


def counted_outcomes(outcomes: Sequence[ActionOutcome]) -> str:
    """Count the targets per outcome and return a text such as "1 of 3 done, 1 failed, 1 not tried"."""
    counts = Counter(one.kind for one in outcomes)
    others = [f", {counts[kind]} {kind}" for kind in get_args(OutcomeKind)[1:] if counts[kind]]
    return f"{counts['done']} of {len(outcomes)} done{''.join(others)}"


class ActionRunner:
    """Performs actions for a console."""

    def __init__(self, app: ConsoleApp) -> None:
        self._app = app
        self.confirming: Action | None = None
        """The action whose dialog is open or about to open."""
        self._asking = asyncio.Lock()
        """Lock that is held while a dialog is open, so that dialogs for several targets open one after
        another."""

    def lists(self) -> tuple[ListName, ...]:
        """Return the names of the lists that the open dialog needs to compute the action's impact."""
        return () if self.confirming is None else required_lists(self.confirming)

    def choose(self) -> None:
        """Offer the actions that apply to this screen's objects."""
        if self._app.session.past is not None:
            self._app.session.say(self._past_is_fixed, "warn")
            return
        view = self._app.session.view
        names = view.selected(self._app.session.context)
        choices = [one for one in offered() if view.accepts(one) or one.applies_to_service]
        choices.sort(key=lambda one: (not view.accepts(one), one.target != view.target))

        def chosen(name: str | None) -> None:
            if name is not None:
                self.begin(action_named(name), {})

        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        title = f"Actions (selected: {shown})" if names else "Actions"
        if not self._app.session.context.write:
            title += ": not permitted; start the console with --write"
        self._app.push_screen(
            ChoiceDialog(title, [Choice(one.name, one.title, one.name) for one in choices]), chosen
        )

    def resume(self) -> None:
        """End the drain shown in the banner. If there are several drains, let the operator choose one."""
        session, action = self._app.session, action_named("resume")
        if not self._may_act():
            return
        drains = [] if session.context.snapshot is None else session.context.snapshot.drains
        if not drains:
            session.say("nothing to resume: neither a model nor the service is draining", "warn")
            return
        if any(one.stopping for one in drains):
            session.say("the service is stopping, so it cannot be resumed", "warn")
            return

        def end(model: str | None) -> None:
            self.begin(action, {} if model is None else {"model": model}, given=True)

        if len(drains) == 1:
            end(drains[0].model)
            return
        names = {f"drain-{number}": one.model for number, one in enumerate(drains)}
        choices = [
            Choice(name, f"model {model}" if model else "the service") for name, model in names.items()
        ]

        def chosen(name: str | None) -> None:
            if name is not None:
                end(names[name])

        self._app.push_screen(ChoiceDialog("Choose the drain to end", choices), chosen)

    def _may_act(self) -> bool:
        """Return whether actions are permitted. If they are not, show the reason."""
        session = self._app.session
        if not session.context.write:
            session.say(_READ_ONLY if session.past is None else self._past_is_fixed, "warn")
        return session.context.write

    @property
    def _past_is_fixed(self) -> str:
        """The message that explains why a past state cannot be changed."""
        return FILE_IS_FIXED if self._app.source.kind == "replay" else PAST_IS_FIXED

    def begin(self, action: Action, values: dict[str, Any], *, given: bool = False) -> None:
        """Open the dialog for an action. `given` is true if the operator typed the action as a command. If no
        target is named, the action applies to the marked rows or, if no rows are marked, to the row under the
        cursor. A typed command without a target applies to the whole service instead, unless the action
        requires a target."""
        if not self._may_act():
            return
        named = given and (action.named_by in values or not action.is_target_required)
        names = [] if named else self._targets_on_screen(action)
        if not given and not names and action.target in _LISTED_ON and not action.creates_object:
            self._app.session.say(f"{action.title}: {_missing(action)}", "warn")
            return
        self._app.run_worker(self._confirm(action, values, names), group="actions", exit_on_error=True)

    def _targets_on_screen(self, action: Action) -> list[str]:
        """Return the names of the marked objects, or of the object under the cursor. Return an empty list if
        the action does not apply to the objects on this screen."""
        view = self._app.session.view
        is_named = action.named_by and (not action.creates_object or action.target == "tenant")
        return view.targets(action, self._app.session.context) if is_named and view.accepts(action) else []

    async def _confirm(self, action: Action, values: dict[str, Any], names: list[str]) -> None:
        """Show a dialog for each target and perform the confirmed actions. If the operator cancels, the
        remaining targets are left unchanged."""
        if self.confirming is not None:
            return
        targets: list[str | None] = [*names] or [None]
        outcomes: list[ActionOutcome] = []
        view = self._app.session.view
        for name in targets:
            if name is not None and not view.has_target(name, self._app.session.newest()):
                outcomes.append(ActionOutcome(name, "no longer listed"))
                continue
            place = f"{len(outcomes) + 1} of {len(targets)}" if len(targets) > 1 else ""
            chosen = dict(values) if name is None else {**values, action.named_by: name}
            if action.is_version_required and "@" not in chosen.get(action.named_by, "@"):
                chosen[action.named_by] += "@"  # The operator must add the version.
            earlier = [one.text for one in outcomes if one.kind == "failed"]
            outcomes.append(ActionOutcome(name, *await self._confirm_one(action, chosen, place, earlier)))
            if outcomes[-1].kind == "cancelled":
                break
        outcomes += [ActionOutcome(name, "not tried") for name in targets[len(outcomes) :]]
        await self._report(action, outcomes)
        self._app.redraw()

    async def _report(self, action: Action, outcomes: list[ActionOutcome]) -> None:
        """Show each target's outcome, unless a single target's result has already been shown."""
        kinds = {one.kind for one in outcomes}
        if not kinds & {"done", "failed", "no longer listed"}:
            self._app.session.say(f"{action.title}: cancelled; nothing was changed", "dim")
        elif len(outcomes) > 1:
            summary = f"{action.title}: {counted_outcomes(outcomes)}"
            self._app.session.say(summary, "good" if kinds == {"done"} else "warn")
            if kinds != {"done"}:
                await self._app.push_screen_wait(TextDialog(summary, [one.text for one in outcomes]))
        elif "no longer listed" in kinds:
            self._app.session.say(f"{action.title}: {outcomes[0].text}; nothing was changed", "warn")

    async def _confirm_one(
        self, action: Action, values: dict[str, Any], place: str, earlier: list[str]
    ) -> tuple[OutcomeKind, str]:
        """Show the dialog for one target, perform the action, and return its outcome. If the action fails,
        the dialog is reopened with the entered values, except if there are several targets, if the dialog has
        no fields, or if the service did not answer."""
        again: dict[str, Any] | None = None
        can_correct = not place and any(one.kind != "switch" for one in fields_of(action, values))
        failure = ""
        while True:
            confirmed = await self._ask(action, values, place, earlier, again)
            if confirmed is None:
                return ("failed", failure) if failure else ("cancelled", "")
            parameters = confirmed.parameters
            self._say(action, parameters, "in progress…", "dim", place)
            try:
                await self._perform(action, parameters, place)
            except NoAnswerError as error:
                failure, can_correct = f"{error}. {_UNCERTAIN}", False
            except SourceError as error:
                failure = str(error)
            else:
                return "done", ""
            self._say(action, parameters, f"failed: {failure}", "bad", place)
            if not can_correct:
                if not place:
                    await self._app.push_screen_wait(TextDialog(f"{action.title} failed", [failure]))
                return "failed", failure
            again, earlier = confirmed.values, [f"failed: {failure}"]

    async def _ask(
        self,
        action: Action,
        values: dict[str, Any],
        place: str,
        earlier: list[str],
        again: dict[str, Any] | None,
    ) -> Confirmed | None:
        """Show the dialog for one target and return the confirmed parameters. With several targets, `place`
        is this target's position, such as "1 of 2". `earlier` describes earlier failures of the action. If
        the action failed, `again` contains the values entered."""
        async with self._asking:
            self.confirming = action
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_MAX_READ_S):
                        for name in required_lists(action):
                            await self._app.read_rows(name)
                return await self._app.push_screen_wait(
                    ActionDialog(
                        action,
                        values,
                        impact=Impact(
                            action, self._app.session.newest, lambda: self._app.session.state.error
                        ),
                        what_if=self._forecast if action.changes_fields else None,
                        place=place,
                        earlier=earlier,
                        again=again,
                    )
                )
            finally:
                self.confirming = None

    def show_impact(self) -> None:
        """Update the action's impact shown in the open dialog."""
        for screen in self._app.screen_stack:
            if isinstance(screen, ActionDialog):
                screen.show_impact()

    async def _forecast(self, parameters: msgspec.Struct) -> list[str]:
        """Return a forecast of the effect of new limits, or the reason why there is none."""
        try:
            forecast = await self._app.source.what_if(parameters)
        except SourceError as error:
            return [str(error)]
        return forecast_lines(forecast, parameters.name if isinstance(parameters, SetTenant) else None)

    async def _perform(self, action: Action, parameters: msgspec.Struct, place: str) -> None:
        """Perform an action, show its result, and reread the screen's lists in the background. Raises
        SourceError if the action fails."""
        result = await self._app.source.act(parameters)
        self._app.read_again(self._app.session.view.lists())
        if isinstance(result, Done):
            self._app.session.say(result.message, "good")
            return
        self._say(action, parameters, getattr(result, "state", "done"), "good", place)
        if action.result not in _LISTED_RESULTS:
            title = f"{action.title} {action.target_name(parameters)}"
            await self._app.push_screen_wait(TextDialog(title.rstrip(), result_lines(result)))

    def _say(self, action: Action, parameters: msgspec.Struct, text: str, role: Role, place: str) -> None:
        """Show an action's state in the footer."""
        target = action.target_name(parameters)
        name = f"{action.title} {target}".rstrip() + (f" ({place})" if place else "")
        self._app.session.say(f"{name}: {text}", role)
        self._app.redraw()


def _missing(action: Action) -> str:
    """Return a message that explains how to choose the action's target."""
    command = f":{action.name.replace('.', ' ')} {action.named_by.upper()}"
    return f"select a {action.target} first (:{_LISTED_ON[action.target]} lists them), or type {command}"
