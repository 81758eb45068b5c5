"""Tests of properties of the source tree as a whole."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from engine.messages import BLOCK_TOKENS
from kernels import PAGE_TOKENS

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 500
MAX_LOOSE_MODULES = 12
CONTRACTS = {
    "kernels knows nothing of ours",
    "the engine knows no HTTP, text or tenants",
    "the store imports no other package of the product",
    "the service never loads torch",
    "the service imports only the interface of the engine",
    "the console imports only the interface of the service",
    "only the CLI starts the console",
    "the request manager knows no processes, models or sockets",
    "the front pool knows no requests and no models",
    "the model manager knows no front processes",
    "a front process loads nothing of the core",
    "callers get the parts that they use, not the controller",
    "only the command line downloads models",
}
"""The import contracts that keep the parts of the product apart (`docs/architecture.md`)."""


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name]


def test_no_source_file_is_too_long() -> None:
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in tracked()
        if path.suffix == ".py" and path.exists()
    }
    assert len(lengths) > 100
    assert not {str(path): lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_the_service_keeps_its_modules_in_packages() -> None:
    loose = sorted(
        path.name for path in tracked() if path.parent == ROOT / "appliance" and path.suffix == ".py"
    )
    loose.remove("__init__.py")
    assert 0 < len(loose) <= MAX_LOOSE_MODULES, loose


def test_every_part_has_its_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]} >= CONTRACTS


def test_the_engine_and_the_kernels_use_the_same_block_size() -> None:
    # The engine and the kernels both define the constant, because the message structs may not import torch.
    assert BLOCK_TOKENS == PAGE_TOKENS


@pytest.mark.parametrize(
    ("module", "name", "copied_in"),
    [
        ("engine.plan", "BAD_TOKEN", "kernels.draws"),
        ("engine.sizing", "_GATHERED_BYTES", "kernels.reference_attention"),
        ("appliance.bench.rates", "MAX_REQUESTS", "appliance.cli.bench_options"),
        ("store.fields", "CLASSES", "engine.levels"),
    ],
)
def test_constants_that_cannot_be_imported_are_equal(module: str, name: str, copied_in: str) -> None:
    assert getattr(import_module(module), name) == getattr(import_module(copied_in), name)


def test_files_named_in_documents_exist() -> None:
    missing = []
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for name in re.findall(
            r"`((?:scripts|docs|engine|appliance|store|kernels|systemd)/[\w./]+)`(?! at commit)",
            document.read_text(),
        ):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert not missing
