"""Reads the chain heads recorded in systemd's journal, from which the service's user cannot remove them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from appliance.rundir import UNIT
from store.evidence import Recorded, recorded_in
from store.heads import lines_of

JOURNAL = "the journal"
"""Source name shown for audit chain heads found in the journal."""
MAX_READ_S = 20.0
"""Time limit for reading the journal, in seconds. The newest lines are read first, so a timeout loses only
older chain heads."""


class JournalHeads(NamedTuple):
    """The result of searching the journal for audit chain heads."""

    heads: list[Recorded]
    missing: str | None = None
    """Why no chain heads were found, or why some may be missing."""


def heads_in_journal(folder: Path | None) -> JournalHeads:
    """Return the audit chain heads recorded by the service with the state directory `folder` or, if `folder`
    is None, by every service that ran as `UNIT`. If systemd is missing or the caller may not read the
    journal, the result contains the reason."""
    command = ["journalctl", "--quiet", "--no-pager", "--reverse", "--output=cat", f"--unit={UNIT}"]
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=said, text=True, errors="replace"
            )
        except OSError as error:
            return JournalHeads([], f"journalctl cannot be run here: {error.strerror}")
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(MAX_READ_S, end)
        timer.start()
        try:
            with process:
                assert process.stdout is not None
                lines = process.stdout if folder is None else lines_of(folder, process.stdout)
                found = recorded_in(lines, JOURNAL)
        finally:
            timer.cancel()
        if late.is_set():
            return JournalHeads(found, f"journalctl did not finish within {MAX_READ_S:g} s")
        if process.returncode != 0:
            said.seek(0)
            reason = said.read().decode(errors="replace").strip() or f"exit code {process.returncode}"
            return JournalHeads(found, f"journalctl failed: {reason}")
    source = UNIT if folder is None else f"{UNIT} with {folder}"
    missing = f"no audit heads of {source} are readable by uid {os.geteuid()}"
    return JournalHeads(found, None if found else missing)
