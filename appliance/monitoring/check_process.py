"""`python -m appliance.monitoring.check_process` runs the long checks for a running service: audit chain
verification and `appliance doctor`. The checks run in a separate process because hashing a long chain would
block the core's event loop, and because a damaged database must not be able to crash the core.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from appliance.monitoring.doctor import examine
from appliance.pages import ChainReport, chain_report
from appliance.settings import Flags, Settings, SettingsError, load_settings
from store.errors import StoreError
from store.evidence import examine_folder

Check = Literal["audit", "findings"]

MAX_PROBLEMS = 100
"""Maximum number of audit chain faults reported individually. Any others are only counted."""
_NICENESS = 10
"""This process's nice value, which gives the service priority for CPU time."""
_NO_JOURNAL = (
    "the service cannot read the journal: to verify the chain against it, run 'appliance audit verify' on "
    "the service's machine"
)


class CheckInput(msgspec.Struct, kw_only=True):
    """The check to run, and the service to check."""

    check: Check
    run_dir: str
    state_dir: str
    config: str | None = None
    """The settings file that the service was started with, or None."""


def verify_chain(state_dir: Path) -> ChainReport:
    """Verify the audit chain against the chain heads recorded in the service's state directory. Raises
    StoreError if a database cannot be read."""
    report = chain_report(state_dir / "control.db", examine_folder(state_dir), 0, _NO_JOURNAL)
    if (more := len(report.problems) - MAX_PROBLEMS) > 0:
        report.problems[MAX_PROBLEMS:] = [f"and {more:,} more problems"]
    return report


def run_check(given: CheckInput) -> msgspec.Struct:
    """Run a check in this process. Raises StoreError if a database cannot be read."""
    if given.check == "audit":
        return verify_chain(Path(given.state_dir))
    settings: Settings | SettingsError
    try:
        settings = load_settings(Flags(config=given.config, run_dir=given.run_dir, state_dir=given.state_dir))
    except SettingsError as error:
        settings = error
    return examine(Path(given.run_dir), Path(given.state_dir), settings)


def main() -> None:
    """Run the check described on standard input and print its result as JSON."""
    os.nice(_NICENESS)
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckInput)
    try:
        result = run_check(given)
    except StoreError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
