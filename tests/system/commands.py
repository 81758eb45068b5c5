"""Runs commands of the product in processes that are forked from one process in which the modules of all
commands are imported. A new interpreter would spend most of a command's time on importing them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from appliance.cli import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.system.preloaded"])
TIMEOUT_S = 300


def run_appliance(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command without a terminal, and return its output and exit code. `environ` is added to the
    environment."""
    return run_as(None, os.environ | environ, *words)


def run_as(uid: int | None, environ: Mapping[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command as this user, or as the present user if `uid` is None. `environ` is its whole
    environment."""
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        arguments = [str(word) for word in words]
        process = _start(arguments, environ, uid, (Path(os.devnull), out, err))
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(arguments, TIMEOUT_S, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())


def start_on_terminal(terminal: str, environ: Mapping[str, str], *words: str) -> BaseProcess:
    """Start a command whose input and output is this terminal, and return its process. `environ` is its whole
    environment."""
    return _start(list(words), environ, None, (Path(terminal),) * 3)


def _start(
    words: list[str], environ: Mapping[str, str], uid: int | None, files: tuple[Path, Path, Path]
) -> BaseProcess:
    """Start a command. `files` are its standard input, output and error."""
    process = _FORKS.Process(target=_run, args=(words, dict(environ), os.getcwd(), uid, files))
    process.start()
    return process


def _run(
    words: list[str],
    environ: dict[str, str],
    folder: str,
    uid: int | None,
    files: tuple[Path, Path, Path],
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    flags = (os.O_RDONLY, *(os.O_WRONLY | os.O_CREAT | os.O_APPEND,) * 2)
    for descriptor, path in enumerate(files):
        os.dup2(os.open(path, flags[descriptor]), descriptor)
    # The streams of the process that was forked belong to other files.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    sys.argv = ["appliance", *words]
    sys.exit(main())
