"""Loads the service's settings. Command-line flags override settings files, which override defaults."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from appliance.alert_rules import faults_of_sink, rule_set_faults
from appliance.settings import faults
from appliance.settings.convert import Converter
from appliance.settings.faults import Place, SettingsError
from appliance.settings.fields import (
    DEMO_MODEL,
    AlertSettings,
    Flags,
    MetricsSettings,
    ModelSettings,
    Settings,
)
from appliance.settings.files import Tables, find_config, read_file, read_tables
from appliance.settings.on_demand import check_on_demand

_FLAGS_OF_SERVICE = tuple(
    name for name in Flags.__struct_fields__ if name in Settings.__struct_fields__ and name != "models"
)
_FLAGS_OF_MODELS = tuple(name for name in Flags.__struct_fields__ if name in ModelSettings.__struct_fields__)

_MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"


class Loaded(NamedTuple):
    """The settings and their sources."""

    settings: Settings
    places: dict[faults.Path, Place]
    """For each setting that was given, the flag or the file and line that set it. Settings left at their
    defaults are omitted."""
    files: list[Path]
    """The settings files that were read, in order."""
    model_flags: Mapping[str, str | int] = {}
    """The command-line options that apply to every model."""

    def fault(self, path: faults.Path, description: str, remedy: str) -> faults.Fault:
        """Return a fault in the setting at `path`."""
        place = self.places.get(path, Place("default"))
        return faults.Fault(place=place, field=faults.dotted(path), description=description, remedy=remedy)


def load_settings(flags: Flags | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings as `read_settings` does, but return them without their sources."""
    return read_settings(flags, environ).settings


def read_settings(flags: Flags | None = None, environ: Mapping[str, str] = os.environ) -> Loaded:
    """Read the settings files, apply the flags, and fill in defaults. Raises SettingsError listing all faults
    if any setting is invalid."""
    flags = flags or Flags()
    path = find_config(flags.config, environ)
    tables = read_tables(path)
    _lay_flags_over(tables, flags)
    converter = Converter(tables.places, str(path) if path else "the defaults")
    settings = converter.settings(tables.values)
    settings.config_file = str(tables.files[0]) if tables.files else ""
    if not settings.models and "models" not in tables.values:
        settings.models = {DEMO_MODEL: _demo_model(flags, tables.places)}
    settings.run_dir = os.path.abspath(settings.run_dir or default_run_dir(environ))
    settings.state_dir = os.path.abspath(settings.state_dir or default_state_dir(environ))
    _check(settings, converter)
    if converter.faults:
        raise SettingsError(*converter.faults)
    return Loaded(settings, tables.places, tables.files, _flags_of_models(flags))


def read_alert_settings(path: Path) -> AlertSettings:
    """Read only the `[alerts]` table of a settings file. Raises SettingsError listing all faults."""
    values, lines = read_file(path)
    places = {field: Place(str(path), line) for field, line in lines.items()}
    converter = Converter(places, str(path))
    settings = converter.settings({"alerts": values.get("alerts", {})})
    _check_alerts(settings.alerts, converter)
    if converter.faults:
        raise SettingsError(*converter.faults)
    return settings.alerts


def default_run_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return the default directory for the sockets."""
    if environ.get("RUNTIME_DIRECTORY"):
        return environ["RUNTIME_DIRECTORY"].split(":")[0]
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "appliance")
    return f"/tmp/appliance-{os.geteuid()}"


def default_state_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Return the default directory for the databases."""
    if environ.get("STATE_DIRECTORY"):
        return environ["STATE_DIRECTORY"].split(":")[0]
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state"), "appliance")


def demo_model_folder() -> Path:
    """Return the folder of the shipped checkpoint."""
    return Path(__file__).resolve().parents[1] / "demo_model"


# ── flags and checks ─────────────────────────────────────────────────────────────────────────────


def _lay_flags_over(tables: Tables, flags: Flags) -> None:
    """Apply the flags as if they were the last settings file."""
    values, places = tables.values, tables.places
    for name in _FLAGS_OF_SERVICE:
        if (value := getattr(flags, name)) is not None:
            values[name] = value
            places[(name,)] = Place(_option(name))
    if flags.models:
        values["models"] = {}
        for place in [place for place in places if place[0] == "models"]:
            del places[place]
    for text in flags.models:
        at = Place("--model")
        name, folder = named_folder(text)
        if not name or not folder:
            raise SettingsError(
                faults.Fault(
                    place=at,
                    description=f"{text!r} is not FOLDER or NAME=FOLDER",
                    remedy="use a value such as --model /srv/chat or --model chat=/srv/chat",
                )
            )
        if name in values["models"]:
            raise SettingsError(
                faults.Fault(
                    place=at,
                    description=f"the model name {name!r} is given twice",
                    remedy="give each model a different name",
                )
            )
        values["models"][name] = {"folder": os.path.abspath(os.path.expanduser(folder))}
        places[("models", name)] = places[("models", name, "folder")] = at
    models = values.get("models")
    for model_name, model in models.items() if isinstance(models, dict) else ():
        for name, value in _flags_of_models(flags).items():
            if isinstance(model, dict):
                model[name] = value
                places[("models", model_name, name)] = Place(_option(name))


def named_folder(text: str) -> tuple[str, str]:
    """Split the value of --model into a model name and a folder. Without a name, the model is named after its
    folder."""
    name, equals, folder = text.partition("=")
    if equals and not os.path.isdir(os.path.expanduser(text)):
        return name, folder
    return model_name_of(Path(os.path.expanduser(text))), text


def model_name_of(folder: Path) -> str:
    """Return the model name derived from a folder, or an empty string if the folder's name is unusable. In a
    Hugging Face hub cache, the folder is a snapshot named after a commit id, so the repository name is used
    instead.
    """
    path = Path(os.path.abspath(folder))
    name = path.name
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        name = path.parent.parent.name.rpartition("--")[2]
    return re.sub(r"[^A-Za-z0-9._:@+-]+", "-", name).lstrip("._:@+-")[:128]


def _demo_model(flags: Flags, places: dict[faults.Path, Place]) -> ModelSettings:
    given = _flags_of_models(flags)
    converter = Converter({(name,): Place(_option(name)) for name in given}, "the command line")
    settings = converter.settings({"models": {DEMO_MODEL: {"folder": str(demo_model_folder()), **given}}})
    if converter.faults:
        raise SettingsError(*converter.faults)
    places.update({("models", DEMO_MODEL, name): Place(_option(name)) for name in given})
    return settings.models[DEMO_MODEL]


def _flags_of_models(flags: Flags) -> dict[str, str | int]:
    return {name: getattr(flags, name) for name in _FLAGS_OF_MODELS if getattr(flags, name) is not None}


def _option(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _check(settings: Settings, converter: Converter) -> None:
    for name in settings.models:
        path = ("models", name)
        if not re.fullmatch(_MODEL_NAME, name):
            converter.add(
                path,
                f"{name!r} is not a valid model name",
                "use 1 to 128 letters, digits and ._:/@+- and begin with a letter or digit",
            )
    for name, model in settings.models.items():
        _check_replicas(("models", name), model, converter)
    try:
        settings.address()
    except ValueError as error:
        converter.add(("listen",), f"listen = {error}", "use a value such as 127.0.0.1:8000 or [::1]:8000")
    _check_metrics(settings.metrics, converter)
    _check_alerts(settings.alerts, converter)
    check_on_demand(settings, converter)


def _check_replicas(path: faults.Path, model: ModelSettings, converter: Converter) -> None:
    least, most = model.min_replicas, model.max_replicas
    if least is not None and most is not None and least > most:
        field = (*path, "min_replicas")
        description = f"{faults.dotted(field)} = {least} exceeds max_replicas = {most}"
        converter.add(field, description, f"use at most {most}")


def _check_alerts(alerts: AlertSettings, converter: Converter) -> None:
    for index, fault in rule_set_faults(alerts.rules, alerts.disabled):
        part = ("disabled",) if index is None else ("rules", str(index + 1), fault.field)
        converter.add(("alerts", *part), fault.description, fault.remedy)
    for number, sink in enumerate(alerts.sinks, 1):
        for fault in faults_of_sink(sink):
            converter.add(("alerts", "sinks", str(number), fault.field), fault.description, fault.remedy)


def _check_metrics(metrics: MetricsSettings, converter: Converter) -> None:
    remedy = "use a value such as 127.0.0.1:9464 or [::1]:9464"
    try:
        address = metrics.address()
    except ValueError as error:
        converter.add(("metrics", "listen"), f"metrics.listen = {error}", remedy)
        return
    if address is not None and not metrics.public and not _is_loopback(address[0]):
        converter.add(
            ("metrics", "listen"),
            f"metrics.listen = {metrics.listen!r} is not a loopback address, so anyone who can reach it "
            "could read the metrics without a key",
            f"{remedy}, or set metrics.public = true",
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
