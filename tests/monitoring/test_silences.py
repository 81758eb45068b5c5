"""Tests of the limits on alert silences."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.alert_rules import effective_rules
from appliance.monitoring.alerts.manager import MAX_SILENCES, AlertManager


class Nothing:
    """Stands in for the alert log and for the receivers. Accepts every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: True


def test_silences_are_limited_and_an_ended_one_makes_space() -> None:
    now = [1000.0]
    nothing: Any = Nothing()
    manager = AlertManager(effective_rules([], []), nothing, nothing, clock=lambda: now[0])
    for _ in range(MAX_SILENCES):
        manager.silence("*", "*", 60.0, "", "uid:0")
    with pytest.raises(ValueError, match=f"already {MAX_SILENCES} silences; end one with"):
        manager.silence("*", "*", 60.0, "", "uid:0")
    now[0] += 61
    assert manager.silence("*", "*", 60.0, "", "uid:0").until == now[0] + 60


def test_a_silence_that_matches_no_rule_is_refused_with_the_names_of_the_rules() -> None:
    nothing: Any = Nothing()
    manager = AlertManager(effective_rules([], []), nothing, nothing)
    with pytest.raises(LookupError, match=r"no rule matches 'replca-\*': use one of .*replica-"):
        manager.silence("replca-*", "*", 60.0, "", "uid:0")
