"""Tests that a field of a tenant has to be declared in only one place. After a field is added to a copy of
the product, it must appear in every component."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from appliance.calls import Call
from appliance.client import AdminClient
from store.control import ControlStore
from tests.core.conftest import ROOT, Service

FIELD = """
    max_images: Annotated[int | None, Field("Images in one request", high=64, none="any number")] = None
"""
LAST = '    """If set, the tenant\'s requests are refused."""\n'


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the product that differs only in one additional field of `TenantRecord`."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("store", "docs", "scripts"):
        shutil.copytree(ROOT / name, tree / name)
    for name in ("appliance", "engine", "tests"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")
        )
    policies = tree / "store" / "policies.py"
    source = policies.read_text()
    assert source.count(LAST) == 1
    policies.write_text(source.replace(LAST, LAST + FIELD))
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
def test_a_field_added_in_one_place_appears_everywhere(tree: Path, tmp_path: Path) -> None:
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
        cli = ("-m", "appliance.cli", "tenants")
        at = ("--run-dir", str(service.run_dir))
        # Check the command-line options.
        for command in ("create", "set"):
            assert re.search(r"--max-images N +Images in one request", run(tree, *cli, command, "--help"))
        run(tree, *cli, "set", "acme", "--max-images", "8", *at)
        # Check the CLI's table.
        heading, *lines = run(tree, *cli, "list", *at).splitlines()
        (acme,) = (line for line in lines if line.startswith("acme"))
        column = heading.index("MAX IMAGES")
        assert acme[column : column + len("MAX IMAGES")].strip() == "8"
        assert re.search(r"^max images +8$", run(tree, *cli, "show", "acme", *at), re.MULTILINE)
        # Check the admin API: the values that it shows, accepts, refuses and documents.
        with AdminClient(service.run_dir, 60.0) as client:
            shown = {one["name"]: one for one in client.call(Call("GET", "/tenants", list[dict]))}
            assert (shown["acme"]["max_images"], shown["local"]["max_images"]) == (8, None)
            body = msgspec.json.encode({"name": "acme", "max_images": 65})
            with pytest.raises(Exception, match="max_images is 65: use a whole number from 1 to 64, or none"):
                client.call(Call("POST", "/actions/tenants.set", dict, body))
            document = client.call(Call("GET", "/openapi.json", dict))
        described = document["components"]["schemas"]["SetTenant"]["properties"]["max_images"]
        assert described["description"] == "Images in one request (none: any number)"
        assert "max_images" in document["components"]["schemas"]["Tenant"]["properties"]
    finally:
        service.stop()
    # Check the existing database, which was created without the field, and its view.
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute(
            "SELECT weight, max_images FROM tenants WHERE name = 'acme'"
        ).fetchall() == [(2.0, 8)]
        assert connection.execute("SELECT max_images FROM tenant_list WHERE name = 'acme'").fetchall() == [
            (8,)
        ]
    # Check the documentation.
    run(tree, "scripts/generated_tables.py")
    assert (
        "| `max_images` | count or null | Images in one request; null: any number |"
        in (tree / "docs" / "store.md").read_text()
    )
    assert (
        "| `--max-images` | a whole number from 1 to 64, or none |"
        in (tree / "docs" / "operating.md").read_text()
    )
