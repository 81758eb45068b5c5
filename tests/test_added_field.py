"""Tests that a field of a tenant, a quota or a key has to be declared in only one place. After fields are
added to a copy of the product, they must appear in every component."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from appliance.actions import flag
from appliance.calls import Call
from appliance.client import AdminClient
from store.control import ControlStore
from tests.core.conftest import ROOT, Service


class Added(NamedTuple):
    """A field to add to the product, and how it must appear."""

    group: Literal["tenants", "keys"]
    """The group of commands that set the field."""
    end: str
    """The text in store/policies.py before which the field is declared."""
    name: str
    type: str
    default: str
    value: int | str
    refused: int | str
    expected: str
    column: str


TENANT_END, QUOTA_END, KEY_END = "\n\nclass PeerRecord(", "\n\nRATE_LIMITS: ", "\n    def valid_at("
NUMBER = "a whole number from 1 to 64, or none"
TEXT = "1 to 200 printable characters, or none"
ADDED = (
    Added("tenants", TENANT_END, "max_images", "int | None", "None", 8, 65, NUMBER, "count or null"),
    Added("tenants", TENANT_END, "zone", 'Literal["a", "b"]', '"a"', "b", "c", "a or b", "`a`, `b`"),
    Added("tenants", QUOTA_END, "max_pages", "int | None", "None", 9, 65, NUMBER, "count or null"),
    Added("keys", KEY_END, "team", "str | None", "None", "core", "", TEXT, "text or null"),
)
HELP = "Added by a test"
DIALOG = """
import sys
from appliance.actions import action_named
from console.action_dialog import fields_of
print(*(field.name for field in fields_of(action_named(sys.argv[1]), {})))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the product that differs only in the additional fields of its records."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
    for name in ("appliance", "console", "docs", "engine", "scripts", "store", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    policies = tree / "store" / "policies.py"
    source = policies.read_text()
    for added in ADDED:
        assert source.count(added.end) == 1
        annotation = f'Annotated[{added.type}, Field("{HELP}", high=64, none="not set")]'
        declaration = f"    {added.name}: {annotation} = {added.default}\n"
        source = source.replace(added.end, declaration + added.end)
    policies.write_text(source)
    return tree


def run(tree: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=tree, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tables_on_the_pages_match_the_code() -> None:
    run(ROOT, "scripts/generated_tables.py", "--check")


@pytest.mark.system
def test_fields_added_in_one_place_appear_everywhere(tree: Path, tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.state_dir.mkdir(mode=0o700)
    database = service.state_dir / "control.db"
    before = ControlStore(database)  # The unmodified product wrote this file.
    before.start()
    before.create_tenant(actor="uid:0", name="acme", changes={"weight": 2.0}).result(60)
    before.close()
    service.tree = tree
    service.start()
    try:
        service.wait_ready()
        cli, at = ("-m", "appliance.cli"), ("--run-dir", str(service.run_dir))
        run(tree, *cli, "tenants", "set", "acme", *set_options("tenants"), *at)
        run(tree, *cli, "keys", "create", "--name", "app", "--tenant", "acme", *set_options("keys"), *at)
        shown = {group: run(tree, *cli, group, "list", *at).splitlines() for group in ("tenants", "keys")}
        details = run(tree, *cli, "tenants", "show", "acme", *at)
        for line in ("max images +8", "zone +b", "max pages +9"):
            assert re.search(f"^{line}$", details, re.MULTILINE)
        with AdminClient(service.run_dir, 60.0) as client:
            tenants = {one["name"]: one for one in client.call(Call("GET", "/tenants", list[dict]))}
            (key,) = client.call(Call("GET", "/keys", list[dict]))
            schemas = client.call(Call("GET", "/openapi.json", dict))["components"]["schemas"]
            assert tenants["local"]["max_images"] is None
            for added in ADDED:
                check_table(added, *shown[added.group])
                check_api(client, added, tenants["acme"] if added.group == "tenants" else key, schemas)
        for group, command in product(shown, ("create", "set")):
            options = run(tree, *cli, group, command, "--help")
            dialog = run(tree, "-c", DIALOG, f"{group}.{command}").split()
            for added in (one for one in ADDED if one.group == group):
                assert re.search(rf"{flag(added.name)} \S+ +{HELP}", options)
                assert added.name in dialog
    finally:
        service.stop()
    # Check the existing database, which was created without the fields, and its views.
    with closing(sqlite3.connect(database)) as connection:
        columns = "weight, max_images, zone, json_extract(quota, '$.max_pages')"
        for table in ("tenants", "tenant_list"):
            found_rows = connection.execute(f"SELECT {columns} FROM {table} WHERE name = 'acme'").fetchall()
            assert found_rows == [(2.0, 8, "b", 9)]
        for table in ("keys", "key_list"):
            assert connection.execute(f"SELECT team FROM {table}").fetchall() == [("core",)]
    # Check the documentation.
    run(tree, "scripts/generated_tables.py")
    store, operating = ((tree / "docs" / name).read_text() for name in ("store.md", "operating.md"))
    for added in ADDED:
        assert f"| `{added.name}` | {added.column} | {HELP}" in store
        assert f"| `{flag(added.name)}` | {added.expected} | {HELP}" in operating


def set_options(group: str) -> list[str]:
    """Return the options that set the added fields of a group of commands."""
    return [word for one in ADDED if one.group == group for word in (flag(one.name), str(one.value))]


def check_table(added: Added, heading: str, *rows: str) -> None:
    (row,) = (row for row in rows if "acme" in row)
    label = added.name.replace("_", " ")
    if (column := heading.find(label.upper())) >= 0:
        assert row[column : column + len(label)].strip() == str(added.value)
    else:  # Limits share a column.
        assert f"{added.value} {label}" in row


def check_api(client: AdminClient, added: Added, shown: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Check the values that the admin API shows, refuses and documents."""
    assert (shown | shown["quota"])[added.name] == added.value
    target, kind = ("name", "Tenant") if added.group == "tenants" else ("id", "Key")
    body = msgspec.json.encode({target: shown[target], added.name: added.refused})
    with pytest.raises(Exception, match=f"{added.name} is .*: use {added.expected}"):
        client.call(Call("POST", f"/actions/{added.group}.set", dict, body))
    assert schemas[f"Set{kind}"]["properties"][added.name]["description"].startswith(HELP)
    assert added.name in schemas[kind]["properties"] | schemas["Quota"]["properties"]
