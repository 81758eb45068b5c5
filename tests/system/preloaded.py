"""Imports everything that commands need, in the process from which `tests.system.commands` forks them. A
process of another user may be unable to read the modules that commands import later."""

from __future__ import annotations

import contextlib
import encodings.idna
import functools
import http.client
import importlib
import io
import pkgutil
import sys

import typer.main

import appliance.bench.session
import appliance.cli
import appliance.monitoring.doctor
import store.backup
import tests.system.commands
from appliance.models.gpus import find_gpus

__all__ = ["appliance", "encodings", "http", "store", "tests"]

for _module in pkgutil.iter_modules(appliance.cli.__path__):
    # huggingface_hub, which `pull` imports, reads the environment when it is imported.
    if _module.name not in ("__main__", "pull"):
        importlib.import_module(f"appliance.cli.{_module.name}")
find_gpus()
# The forked processes use the tree of commands that the runs below build.
typer.main.get_command = functools.cache(typer.main.get_command)
# These runs import the modules that the command line does not import before a command runs.
for _words in (["--help"], ["status", "--run-dir", "/nonexistent"], ["top", "--run-dir", "/nonexistent"]):
    sys.argv = ["appliance", *_words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        appliance.cli.main()
