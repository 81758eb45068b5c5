"""Tests of the parameters that operators enter, and of the equivalent commands, parsed with the CLI's own
parser."""

from __future__ import annotations

import math
import re
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import appliance.client
from appliance.actions import Action, action_named, action_of
from appliance.actions.parameters import PruneModels
from appliance.cli.app import app
from appliance.protocol.registry import PrunedVersion, PrunedVersions
from appliance.quantities import quoted
from console.commands import parse_action
from console.keys import offered
from console.parameters import CommandError, Parameter, Values, build, entered, equivalent

_SAMPLES = {
    "switch": True,
    "list": "a, b",
    "number": "2.5",
    "count": "1,024",
    "class": "P2",
    "share": "12.5%",
    "span": "90m",
    "time": "2031-05-01T12:30",
    "text": "some text",
    "table": "1=90, other=10",
}
"""A value of each kind of parameter."""
_SPECIAL = {"folder": "/srv/models/new", "peer": "uid:1004", "scopes": "read, inference", "kv_share": "0.5"}


def sample(parameter: Parameter) -> Any:
    """Return a value for a parameter."""
    if parameter.name in _SPECIAL:
        return _SPECIAL[parameter.name]
    if parameter.declared is not None and parameter.declared.kind == "choice":
        return parameter.declared.choices[-1]
    return _SAMPLES[parameter.kind]


def cases() -> list[Any]:
    """Return sets of parameters for each action: only the required ones, these with one optional parameter
    each, all parameters, and each optional parameter as "none" where this is allowed."""
    found = []
    for action in offered():
        known = entered(action)
        required = {one.name: sample(one) for one in known if one.required}
        others = [one for one in known if not one.required]
        variants: list[Values] = [required] if not action.name.endswith(".set") else []
        variants += [{**required, one.name: sample(one)} for one in others]
        variants += [{**required, **{one.name: sample(one) for one in others}}]
        variants += [{**required, one.name: "none"} for one in known if one.optional]
        found += [
            pytest.param(action, values, id=f"{action.name}-{number}")
            for number, values in enumerate(variants)
        ]
    return found


class Called(Exception):
    """Raised by the client that records actions, to end the command."""


class RecordingClient:
    """An admin client that records the actions that a command performs."""

    performed: list[msgspec.Struct]

    def __init__(self, *args: object, **options: object) -> None:
        """Accept the arguments of the real client."""

    def __enter__(self) -> RecordingClient:
        return self

    def __exit__(self, *args: object) -> None:
        """Do nothing."""

    def act(self, parameters: msgspec.Struct) -> msgspec.Struct:
        self.performed.append(parameters)
        if isinstance(parameters, PruneModels) and parameters.dry_run:
            return PrunedVersions(versions=[PrunedVersion(name="m", version=1, folder="/m")])
        raise Called

    drain = act


def performed_by(command: str, monkeypatch: pytest.MonkeyPatch) -> msgspec.Struct:
    """Run a command with the CLI's own parser, and return the last action that it performs."""
    RecordingClient.performed = []
    monkeypatch.setattr(appliance.client, "AdminClient", RecordingClient)
    ran = CliRunner().invoke(app, command.removeprefix("appliance "))
    assert ran.exit_code == 0 or isinstance(ran.exception, Called), (command, ran.output)
    return RecordingClient.performed[-1]


def same(one: object, other: object) -> bool:
    """Return whether parameters are equal. Times that are given as time spans differ slightly."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


@pytest.mark.parametrize(("action", "values"), cases())
def test_the_cli_performs_the_same_action_for_the_equivalent_command(
    action: Action, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build(action, values)
    command = equivalent(action, values)
    found = performed_by(command, monkeypatch)
    assert action_of(found) is action, command
    for name in expected.__struct_fields__:
        assert same(getattr(found, name), getattr(expected, name)), (command, name)


def test_a_dry_run_needs_no_confirmation(monkeypatch: pytest.MonkeyPatch) -> None:
    action = action_named("models.prune")
    assert equivalent(action, {"dry_run": True}) == "appliance models prune --dry-run"
    assert equivalent(action, {"dry_run": False}) == "appliance models prune --yes"
    assert performed_by("appliance models prune --dry-run", monkeypatch) == PruneModels(dry_run=True)


@pytest.mark.parametrize(
    ("action", "name", "text", "remedy"),
    [
        ("drain", "grace_s", "soon", "a time span such as 90s, 30m or 12h, at most 1w"),
        ("tenants.set", "weight", "0", "a number from 0.001 to 1000"),
        ("tenants.set", "weight", "x", "a number from 0.001 to 1000"),
        ("tenants.set", "weight", "none", "a number from 0.001 to 1000"),
        ("tenants.set", "tokens_per_day", "-1", "a number from 1e-06 to 1e+15, or none"),
        ("tenants.set", "highest_class", "P7", "P0, P1, P2 or P3"),
        ("tenants.set", "log_policy", "all", "metadata, hashes or full"),
        ("keys.set", "scopes", "all", "one or more of inference, admin, read, each at most once"),
        ("models.split", "weights", "1", "TARGET=WEIGHT for each target, such as 1=90,2=10, or none"),
        ("models.split", "weights", "1=1,1=2", "TARGET=WEIGHT for each target, such as 1=90,2=10, or none"),
        ("models.shadow", "share", "200%", "a percentage above 0% and at most 100%, such as 5%"),
        ("alerts.silence", "reason", "x" * 401, "0 to 400 characters"),
    ],
)
def test_the_message_about_an_invalid_value_names_the_option_the_value_and_the_remedy(
    action: str, name: str, text: str, remedy: str
) -> None:
    chosen = action_named(action)
    values = {one.name: sample(one) for one in entered(chosen) if one.required} | {name: text}
    with pytest.raises(CommandError) as error:
        build(chosen, values)
    option = next(one.flag for one in entered(chosen) if one.name == name)
    assert str(error.value) == f"{option} {quoted(text)} is not valid: use {remedy}"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "tenants set search --tokens-per-minute ''",
            "--tokens-per-minute is empty: enter a number from 1e-06 to 1e+15, or none",
        ),
        ("drain --grace=", "--grace is empty: enter a time span such as 90s, 30m or 12h, at most 1w"),
        (
            "keys create --name ci --expires ' '",
            "--expires is empty: enter a time span such as 90d, or a date",
        ),
        ("tenants set search --highest-class ''", "--highest-class is empty: enter P0, P1, P2 or P3"),
    ],
)
def test_an_empty_value_on_the_command_line_is_refused(command: str, message: str) -> None:
    with pytest.raises(CommandError, match="^" + re.escape(message)):
        parse_action(command)


def test_an_empty_text_is_a_value() -> None:
    found = parse_action("alerts silence disk-full --reason ''")
    assert found is not None and found[1] == {"rule": "disk-full", "reason": ""}


@pytest.mark.parametrize("line", ["tenants set search", "keys set key_0a1b"])
def test_a_change_without_new_values_is_refused(line: str) -> None:
    found = parse_action(line)
    assert found is not None
    with pytest.raises(CommandError, match="nothing to change: enter a new value in at least one field"):
        build(*found)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(CommandError, match="--name is missing: enter a value"):
        build(action_named("keys.create"), {"tenant": "search"})


def test_the_expiry_of_a_key_is_a_time_span_or_a_date_as_in_the_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.parameters.time", SimpleNamespace(time=lambda: 1000.0))
    date = datetime(2031, 5, 1, 12, 30)
    for text, at in (("90d", 1000.0 + 90 * 86_400), ("2031-05-01T12:30", date.timestamp()), ("none", None)):
        found = parse_action(f"keys create --name ci --expires {text}")
        assert found is not None
        assert build(*found).expires_at == at  # type: ignore[attr-defined]
        assert equivalent(*found) == f"appliance keys create --name ci --expires {text}"
    action = action_named("keys.create")
    in_seconds = equivalent(action, {"name": "ci", "expires_at": str(date.timestamp())})
    assert in_seconds == "appliance keys create --name ci --expires '2031-05-01 12:30:00'"
    with pytest.raises(CommandError, match="--expires 'soon' is not valid: use a time span such as 90d"):
        build(action, {"name": "ci", "expires_at": "soon"})
    unfinished = equivalent(action, {"name": "ci", "expires_at": "²"})
    assert unfinished == "appliance keys create --name ci --expires '²'"


@pytest.mark.parametrize(
    ("name", "text"), [("expires_at", "nan"), ("expires_at", "1e400"), ("kv_share", "inf")]
)
def test_a_number_that_json_cannot_express_is_refused(name: str, text: str) -> None:
    with pytest.raises(CommandError, match=f"--.* '{text}' is not valid: use a"):
        build(action_named("keys.create"), {"name": "ci", name: text})


def test_a_dialog_shows_the_cli_command_with_quoted_values() -> None:
    found = parse_action("drain --model 'my model' --grace 60s --queue")
    assert found is not None
    assert equivalent(*found) == "appliance drain --model 'my model' --grace 60s --queue --yes"
    assert equivalent(action_named("requests.cancel"), {"request_id": "r-1"}) == (
        "appliance requests cancel r-1 --yes"
    )


def test_the_share_of_a_shadow_is_a_percentage_as_in_the_cli() -> None:
    found = parse_action("models shadow chat --to chat@2 --share 10%")
    assert found is not None
    assert msgspec.to_builtins(build(*found)) == {"name": "chat", "target": "chat@2", "share": 0.1}
    assert equivalent(*found) == "appliance models shadow chat --to chat@2 --share 10%"
    values = {"name": "chat", "target": "none", "share": "0.05"}
    assert equivalent(found[0], values) == "appliance models shadow chat --clear --share 5%"
