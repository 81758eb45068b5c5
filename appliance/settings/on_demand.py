"""Checks the settings for on-demand loading."""

from __future__ import annotations

from appliance.settings.convert import Converter
from appliance.settings.fields import Settings


def check_on_demand(settings: Settings, converter: Converter) -> None:
    """Check each model's `idle_unload_s` and the model groups, and add the faults to `converter`."""
    for name, model in settings.models.items():
        if model.required and model.idle_unload_s:
            converter.add(
                ("models", name, "idle_unload_s"),
                f"models.{name}.idle_unload_s = {model.idle_unload_s:g} contradicts required = true, because "
                "required models always stay loaded",
                f"set models.{name}.required = false, or remove idle_unload_s",
            )
    _check_groups(settings, converter)


def _check_groups(settings: Settings, converter: Converter) -> None:
    together: dict[str, str] = {}
    for group, one in settings.groups.items():
        path = ("groups", group, "models")
        if len(set(one.models)) != len(one.models) or len(one.models) < 2:
            converter.add(
                path,
                f"groups.{group}.models = {one.models!r} is not valid",
                "list at least two models, each only once",
            )
        if one.load == "one":
            required = [name for name in one.models if _stays_loaded(settings, name)]
            if required:
                converter.add(
                    path,
                    f"groups.{group} allows only one of its models to be loaded at a time, but "
                    f"{required[0]!r} always stays loaded",
                    f"set models.{required[0]}.required = false and pinned = false, or remove the model from "
                    "the group",
                )
            continue
        for name in one.models:
            if (other := together.setdefault(name, group)) != group:
                converter.add(
                    path,
                    f"model {name!r} is in two groups that load all their models together, {other!r} and "
                    f"{group!r}",
                    "merge the two groups into one",
                )
    for group, one in settings.groups.items():
        named = [name for name in one.models if name in together] if one.load == "one" else []
        if len({together[name] for name in named}) < len(named):
            converter.add(
                ("groups", group, "models"),
                f"groups.{group} allows only one of {named} to be loaded at a time, but another group loads "
                "them together",
                "remove the models from one of the groups",
            )


def _stays_loaded(settings: Settings, name: str) -> bool:
    model = settings.models.get(name)
    return model is not None and (model.required or model.pinned)
