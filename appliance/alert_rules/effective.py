"""The alert rules in effect: the built-in rules as changed and extended by the settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter

from appliance.alert_rules.builtin import BUILT_IN
from appliance.alert_rules.fields import AlertRule, RuleFault, faults_of_rule


def effective_rules(configured: Sequence[AlertRule], disabled: Iterable[str]) -> list[AlertRule]:
    """Return the alert rules in effect. A rule in the settings replaces the built-in rule of the same
    name."""
    rules = {rule.name: rule for rule in (*BUILT_IN, *configured)}
    off = set(disabled)
    return [rule for name, rule in rules.items() if name not in off]


def cycle(rules: Iterable[AlertRule]) -> list[str]:
    """Return the names of alert rules that form a cycle through `downstream_of`, or an empty list if there is
    no cycle. The alerts of rules in a cycle would all be hidden, because each would be explained by
    another."""
    try:
        TopologicalSorter({rule.name: rule.downstream_of for rule in rules}).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def rule_set_faults(
    configured: Sequence[AlertRule], disabled: Sequence[str]
) -> list[tuple[int | None, RuleFault]]:
    """Return the faults in the configured alert rules, each with the index of the faulty rule. The index is
    None for a fault in the `disabled` setting."""
    faults: list[tuple[int | None, RuleFault]] = []
    seen: set[str] = set()
    known = {rule.name for rule in (*BUILT_IN, *configured)}
    for index, rule in enumerate(configured):
        faults += [(index, fault) for fault in faults_of_rule(rule)]
        if rule.name in seen:
            faults.append(
                (index, RuleFault("name", f"two rules have the name {rule.name!r}", "rename one of them"))
            )
        seen.add(rule.name)
        for name in rule.downstream_of:
            if name not in known:
                faults.append(
                    (
                        index,
                        RuleFault(
                            "downstream_of", f"{name!r} is not a rule", f"rules: {', '.join(sorted(known))}"
                        ),
                    )
                )
    for name in disabled:
        if name not in known:
            faults.append(
                (None, RuleFault("disabled", f"{name!r} is not a rule", f"rules: {', '.join(sorted(known))}"))
            )
    if not faults and (circle := cycle(effective_rules(configured, ()))):
        index = max(index for index, rule in enumerate(configured) if rule.name in circle)
        description = (
            f"the rules {', '.join(circle)} name each other as causes and would hide each other's alerts"
        )
        faults.append((index, RuleFault("downstream_of", description, "remove one of the names")))
    return faults
