"""The heads of the audit chain that systemd's journal has: what the service's own user cannot take back."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

from store.evidence import Recorded, recorded_in
from store.heads import said_of

UNIT = "appliance.service"
JOURNAL = "the journal"
"""The source of a head that was found there."""
MAX_READ_S = 20.0
"""For reading it, the newest lines first; what comes later is older."""


class JournalHeads(NamedTuple):
    """What was found."""

    heads: list[Recorded]
    missing: str | None = None
    """Why there is none, or why not all."""


def heads_in_journal(folder: Path | None) -> JournalHeads:
    """The heads of the service whose state directory is `folder`, None: those of every service that ran as
    `UNIT`. No error where there is no systemd, or nothing that the caller may read."""
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
                lines = process.stdout if folder is None else said_of(folder, process.stdout)
                found = recorded_in(lines, JOURNAL)
        finally:
            timer.cancel()
        if late.is_set():
            return JournalHeads(found, f"it was not read to its end within {MAX_READ_S:g} s")
        if process.returncode != 0:
            said.seek(0)
            why = said.read().decode(errors="replace").strip() or f"exit code {process.returncode}"
            return JournalHeads(found, f"journalctl failed: {why}")
    whose = UNIT if folder is None else f"{UNIT} with {folder}"
    missing = f"it has none of {whose} that uid {os.geteuid()} may read"
    return JournalHeads(found, None if found else missing)
