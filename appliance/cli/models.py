"""Implements `appliance models`: lists models and performs actions on them."""

from __future__ import annotations

import os
import tomllib
from typing import Any

import msgspec

from appliance.actions.parameters import AddModel
from appliance.cli.actions import perform
from appliance.cli.failure import CommandLineError, Failure
from appliance.cli.model_splits import shares, show_shadow
from appliance.cli.output import Column, of_count, print_json, print_table, printable
from appliance.cli.service import admin_client
from appliance.cli.times import local
from appliance.protocol.registry import RegisteredModel, RegisteredVersion
from appliance.quantities import of_bytes
from appliance.settings import named_folder

REGISTRY = "registry"
"""Source shown for models that are not declared in the settings."""
_COLOURS = {
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
    "sleeping": "yellow",
    "failed": "red",
}
_LIST = (
    Column("NAME", flexible=True),
    Column("VERSION", right=True),
    Column("DEFAULT"),
    Column("STATE", colours=_COLOURS),
    Column("ALIASES", drop=2, flexible=True),
    Column("SPLIT", drop=4, flexible=True),
    Column("FOLDER", drop=1, flexible=True),
    Column("DETAIL", drop=3, flexible=True),
)
_LOADED = (
    Column("NAME", flexible=True),
    Column("VERSION", right=True),
    Column("STATE", colours=_COLOURS),
    Column("REPLICAS", right=True, drop=2),
    Column("MEMORY", right=True),
    Column("EXPIRES", drop=1),
    Column("DETAIL", drop=3, flexible=True),
)


def add_model(run_dir: str | None, model: str, settings: list[str], *, as_json: bool) -> None:
    """Add a checkpoint to the registry. `model` is NAME=FOLDER or FOLDER."""
    name, folder = named_folder(model)
    folder = os.path.abspath(os.path.expanduser(folder))
    added = AddModel(name=name, folder=folder, settings=version_settings(settings))
    perform(run_dir, added, as_json=as_json)


def list_models(run_dir: str | None, *, as_json: bool) -> None:
    """Print the models and their versions."""
    found = _models(run_dir)
    if as_json:
        print_json([_without_files(model) for model in found])
        return
    rows = []
    for model in found:
        for version in model.versions:
            is_default = version.version == model.default
            rows.append(
                (
                    printable(model.name),
                    str(version.version),
                    "yes" if is_default else "",
                    version.state,
                    printable(", ".join(model.aliases)) if is_default else "",
                    shares(version.shares),
                    printable(version.folder),
                    printable(version.detail or (model.source if model.source != REGISTRY else "")),
                )
            )
    print_table(_LIST, rows)


def list_loaded(run_dir: str | None, *, as_json: bool) -> None:
    """Print the versions that are loaded or being loaded, with their memory usage."""
    found = [
        (model.name, version)
        for model in _models(run_dir)
        for version in model.versions
        if version.replicas or version.state in ("loading", "draining", "sleeping")
    ]
    if as_json:
        print_json(
            [
                {
                    "name": name,
                    "version": one.version,
                    "state": one.state,
                    "detail": one.detail,
                    "replicas": one.replicas,
                    "devices": one.devices,
                    "memory_bytes": one.memory_bytes,
                    "expires_at": one.expires_at,
                }
                for name, one in found
            ]
        )
        return
    rows = [
        (
            printable(name),
            str(one.version),
            one.state,
            str(one.replicas),
            of_bytes(one.memory_bytes) if one.memory_bytes else "",
            "never" if one.expires_at is None else local(one.expires_at),
            printable(one.detail),
        )
        for name, one in found
    ]
    print_table(_LOADED, rows)


def show_model(run_dir: str | None, name: str, *, as_json: bool) -> None:
    """Print a model and its versions' settings and files."""
    found = _models(run_dir)
    model = next((one for one in found if name == one.name or name in one.aliases), None)
    if model is None:
        known = ", ".join(printable(one.name) for one in found)
        raise Failure(f"there is no model {printable(name)!r}; available models: {known or 'none'}")
    if as_json:
        print_json(model)
        return
    print(f"{printable(model.name)}: {model.state}, version {model.default} is the default")
    print(f"  source    {printable(model.source)}")
    if model.aliases:
        print(f"  aliases   {printable(', '.join(model.aliases))}")
    for target, weight in model.split.items():
        print(f"  split     {weight / sum(model.split.values()):.1%} to {printable(target)}")
    for shadow in model.shadows:
        show_shadow(shadow)
    for version in model.versions:
        _show_version(version)


def _models(run_dir: str | None) -> list[RegisteredModel]:
    with admin_client(run_dir) as client:
        return client.models()


def _without_files(model: RegisteredModel) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(model)
    for version in shown["versions"]:
        del version["files"]
    return shown


def version_settings(texts: list[str]) -> dict[str, Any]:
    """Parse settings of the form NAME=VALUE or TABLE.NAME=VALUE, such as sampling.temperature=0.6. A value
    that is not valid TOML is taken as text, so quotes can be omitted. Paths are made absolute."""
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise CommandLineError(f"--set {text!r} is not valid: write NAME=VALUE, such as max_num_seqs=32")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        if name == "chat_template" and isinstance(parsed, str):
            parsed = os.path.abspath(os.path.expanduser(parsed))
        table, dot, field = name.rpartition(".")
        known = settings.setdefault(table, {}) if dot else settings
        if not isinstance(known, dict):
            raise CommandLineError(f"--set {text!r} contradicts {table} = {known!r}: give only one of them")
        known[field] = parsed
    return settings


def _show_version(version: RegisteredVersion) -> None:
    detail = f": {printable(version.detail)}" if version.detail else ""
    print(f"version {version.version}: {version.state}{detail}")
    print(f"  folder    {printable(version.folder)}")
    if version.shares:
        print(f"  gets      {shares(version.shares)}")
    if version.added_at is not None:
        print(f"  added     {local(version.added_at)}")
    for name, value in version.settings.items():
        print(f"  {name} = {msgspec.json.encode(value).decode()}")
    if version.files:
        total = sum(file.bytes for file in version.files)
        print(f"  files     {len(version.files)}, {of_bytes(total)}")
    for file in version.files:
        print(f"    {file.sha256}  {of_count(file.bytes):>16}  {printable(file.name)}")
