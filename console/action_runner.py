"""Performs actions: determines their targets, asks for confirmation in a dialog, and shows their results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from appliance.actions import Action, action_named
from appliance.actions.parameters import SetTenant
from appliance.protocol import Done
from console.action_dialog import ActionDialog
from console.dialogs import ChoiceDialog, TextDialog
from console.fingerprints import required_lists
from console.impact import Impact, forecast_lines, result_lines
from console.keys import offered
from console.replay import PAST_IS_FIXED
from console.source import ListName, SourceError

if TYPE_CHECKING:
    from console.app import ConsoleApp

_CREATING = ("tenants.create", "keys.create", "peers.map", "models.add", "models.alias", "models.split")
"""Actions that create a new object, so they do not apply to an existing row."""
_WITH_FORECAST = ("tenants.set", "keys.set")
"""Actions that change limits. Their dialogs can forecast the effect by replaying the last few minutes."""
_ROW_TARGETS = ("request", "tenant", "key", "peer")
"""Target kinds for which a target must be chosen before an action starts. Other actions apply to the whole
service if no target is chosen."""
_READ_ONLY = "this console is read-only: start it with --write to perform actions"


class ActionRunner:
    """Lets a console perform actions."""

    def __init__(self, app: ConsoleApp) -> None:
        self._app = app
        self.confirming: Action | None = None
        """The action whose dialog is open or about to open."""

    def lists(self) -> tuple[ListName, ...]:
        """Return the lists on which the impact in the open dialog depends."""
        return () if self.confirming is None else required_lists(self.confirming)

    def choose(self) -> None:
        """Offer the actions that apply to the objects on this screen."""
        if self._app.session.past is not None:
            self._app.session.say(PAST_IS_FIXED, "warn")
            return
        view = self._app.session.view
        names = view.selected(self._app.session.context)
        choices = [
            one
            for one in offered()
            if view.accepts(one) or one.target == "service" or one.name in ("drain", "resume")
        ]
        choices.sort(key=lambda one: not view.accepts(one))

        def chosen(name: str | None) -> None:
            if name is not None:
                self.begin(action_named(name), {})

        title = f"Actions (selected: {', '.join(names[:3])})" if names else "Actions"
        self._app.push_screen(ChoiceDialog(title, [(one.name, one.title) for one in choices]), chosen)

    def resume(self) -> None:
        """End the drain in the banner. If there are several drains, let the operator choose one of them."""
        session, action = self._app.session, action_named("resume")
        if not self._may_act():
            return
        drains = [] if session.context.snapshot is None else session.context.snapshot.drains
        if not drains:
            session.say("nothing to resume: no model is draining, and neither is the service", "warn")
            return

        def end(model: str | None) -> None:
            self.begin(action, {} if model is None else {"model": model}, given=True)

        if len(drains) == 1:
            end(drains[0].model)
            return
        names = {f"drain-{number}": one.model for number, one in enumerate(drains)}
        choices = [(name, f"model {model}" if model else "the service") for name, model in names.items()]

        def chosen(name: str | None) -> None:
            if name is not None:
                end(names[name])

        self._app.push_screen(ChoiceDialog("Choose the drain to end", choices), chosen)

    def _may_act(self) -> bool:
        """Return whether actions are permitted. If they are not, say why."""
        session = self._app.session
        if not session.context.write:
            session.say(_READ_ONLY if session.past is None else PAST_IS_FIXED, "warn")
        return session.context.write

    def begin(self, action: Action, values: dict[str, Any], *, given: bool = False) -> None:
        """Open the dialog for an action. Unless the command line names a target, the action applies to the
        marked rows, or to the row under the cursor if no rows are marked. `given` is true if the
        operator typed the command line. If a typed line names no target and the action requires none, the
        action applies to the whole service."""
        if not self._may_act():
            return
        named = given and (action.named_by in values or not action.is_target_required)
        names = [] if named else self._targets_on_screen(action)
        if not given and not names and action.target in _ROW_TARGETS and action.name not in _CREATING:
            self._app.session.say(
                f"{action.title}: select a {action.target} first, or name one on the command line (:)", "warn"
            )
            return
        self._app.run_worker(self._confirm(action, values, names), group="actions", exit_on_error=True)

    def _targets_on_screen(self, action: Action) -> list[str]:
        """Return the names of the marked objects, or of the object under the cursor, if the action applies to
        objects of their kind."""
        view = self._app.session.view
        if not action.named_by or not view.accepts(action) or action.name in _CREATING:
            return []
        return view.targets(action, self._app.session.context)

    async def _confirm(self, action: Action, values: dict[str, Any], names: list[str]) -> None:
        """Show the dialog for each target, and perform the confirmed actions."""
        if self.confirming is not None:
            return
        targets: list[str | None] = [*names] or [None]
        session, ended = self._app.session, list[str]()
        view = session.view
        for name in targets:
            if name is not None and not view.has_target(name, session.newest()):
                ended.append(name)
                continue
            parameters = await self._ask(
                action, dict(values) if name is None else {**values, action.named_by: name}
            )
            if parameters is None:
                self._app.session.say(f"{action.title}: cancelled; nothing was changed", "dim")
                break
            await self._perform(action, parameters)
        if ended:
            skipped = f"skipped, because no longer listed: {', '.join(ended)}"
            session.say("; ".join(filter(None, (session.state.message, skipped))), "warn")
        self._app.redraw()

    async def _ask(self, action: Action, values: dict[str, Any]) -> msgspec.Struct | None:
        """Show the dialog for one target, and return the confirmed parameters."""
        self.confirming = action
        try:
            for name in required_lists(action):
                await self._app.read_rows(name)
            return await self._app.push_screen_wait(
                ActionDialog(
                    action,
                    values,
                    impact=Impact(action, self._app.session.newest),
                    what_if=self._forecast if action.name in _WITH_FORECAST else None,
                )
            )
        finally:
            self.confirming = None

    def show_impact(self) -> None:
        """Update the impact in an open dialog."""
        for screen in self._app.screen_stack:
            if isinstance(screen, ActionDialog):
                screen.show_impact()

    async def _forecast(self, parameters: msgspec.Struct) -> list[str]:
        """Return the forecast effect of new limits, or the reason why no forecast is available."""
        try:
            forecast = await self._app.source.what_if(parameters)
        except SourceError as error:
            return [str(error)]
        return forecast_lines(forecast, parameters.name if isinstance(parameters, SetTenant) else None)

    async def _perform(self, action: Action, parameters: msgspec.Struct) -> None:
        """Perform an action, and show its result without waiting for the lists, because only the result
        contains the secret of a new key."""
        try:
            result = await self._app.source.act(parameters)
        except SourceError as error:
            self._app.session.say(f"{action.title}: {error}", "bad")
            await self._app.push_screen_wait(TextDialog(f"{action.title} failed", [str(error)]))
            return
        self._app.read_again(self._app.session.view.lists())
        if isinstance(result, Done):
            self._app.session.say(result.message, "good")
        elif action.name in ("drain", "tenants.set", "tenants.create", "keys.set", "alerts.ack"):
            self._app.session.say(
                f"{action.title} {action.target_name(parameters)}: done".replace("  ", " "), "good"
            )
        else:
            await self._app.push_screen_wait(TextDialog(action.title, result_lines(result)))
