"""Implements `appliance config`, which checks, shows and reloads the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from appliance.cli.failure import Failure, as_failure
from appliance.cli.output import paint, print_json, printable
from appliance.cli.service import admin_key, find_run_dir
from appliance.protocol import Configuration
from appliance.settings import Fault, Flags, SettingsError, dotted, read_settings
from appliance.settings.table import as_table
from store.errors import StoreError
from store.models import Registry


class ConfigCheck(msgspec.Struct, kw_only=True):
    """The JSON document that `config check --json` prints."""

    files: list[str]
    faults: list[Fault]
    warnings: list[Fault]


def check(file: str | None, *, as_json: bool) -> int:
    """Read the settings as the service does, check the models, print all faults and warnings, and return the
    exit code."""
    from appliance.models.fit import read_memory
    from appliance.models.preflight import check_model
    from appliance.models.readable import service_user
    from appliance.models.references import fallback_faults, stored_registry
    from appliance.models.registry import model_faults

    faults: list[Fault] = []
    warnings: list[Fault] = []
    files: list[str] = []
    try:
        loaded = read_settings(Flags(config=file))
        files = [str(path) for path in loaded.files]
        memory, reader = read_memory(), service_user()
        findings = {
            name: check_model(model, memory, reader) for name, model in loaded.settings.models.items()
        }
        faults, warnings = model_faults(loaded, findings), model_faults(loaded, findings, "warning")
        try:
            faults += fallback_faults(loaded, stored_registry(loaded.settings.state_dir))
        except StoreError as error:
            # A fallback not declared in the settings may be in the registry.
            warnings += [
                msgspec.structs.replace(
                    fault, remedy=f"{fault.remedy}, unless the registry contains the fallback ({error})"
                )
                for fault in fallback_faults(loaded, Registry())
            ]
    except SettingsError as error:
        faults = list(error.faults)
    if as_json:
        print_json(ConfigCheck(files=files, faults=faults, warnings=warnings))
        return 1 if faults else 0
    for fault in (*faults, *warnings):
        print(printable(f"{'warning: ' if fault in warnings else ''}{fault}"))
    if not faults:
        print(f"ok: {', '.join(map(printable, files)) or 'no settings file, so defaults apply'}")
    return 1 if faults else 0


def show(run_dir: str | None, config: str | None, *, origin: bool, as_json: bool) -> None:
    """Print the running service's settings. If a settings file is given or no service is running, print the
    settings with which a service would start."""
    running = None if config is not None else _of_service(run_dir)
    if running is None:
        with as_failure(SettingsError):
            found = as_table(read_settings(Flags(config=config)))
    else:
        found = running
    if as_json:
        print_json(found)
        return
    service = "the running service" if running is not None else "a service started now"
    files = ", ".join(map(printable, found.files)) or "none"
    print(paint(f"# settings of {service} (files: {files})", "dim"))
    for text in toml_lines(found.settings, found.places if origin else {}):
        print(text)


def toml_lines(
    table: Mapping[str, Any], places: Mapping[str, str], path: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield a settings table as lines of TOML. Settings listed in `places` are followed by their source.
    Unset settings appear as comments."""
    plain = {name: value for name, value in table.items() if not isinstance(value, dict)}
    width = max((len(_assignment(name, value)) for name, value in plain.items()), default=0)
    if path and plain:
        yield ""
        yield f"[{dotted(path)}]"
    for name, value in plain.items():
        place = places.get(dotted((*path, name)))
        text = printable(_assignment(name, value))
        yield f"{text:{width}}  {paint(f'# {printable(place)}', 'dim')}" if place else text
    for name, value in table.items():
        if isinstance(value, dict):
            yield from toml_lines(value, places, (*path, name))


def _assignment(name: str, value: Any) -> str:
    if value is None:
        return f"# {dotted((name,))} is unset"
    return f"{dotted((name,))} = {msgspec.json.encode(value).decode()}"


def _of_service(run_dir: str | None) -> Configuration | None:
    from appliance.client import AdminClient, AdminError, ServiceNotRunningError

    with AdminClient(find_run_dir(run_dir), key=admin_key()) as client:
        try:
            return client.configuration()
        except ServiceNotRunningError:
            return None
        except AdminError as error:
            raise Failure(str(error)) from error
