"""Implements `appliance audit verify` and `export`, which read the service's files directly, so that auditors
need not trust the service that wrote them. If the files are on another machine, the service verifies its own
chain instead. `appliance.cli.audit_list` lists the actions."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

from appliance import calls
from appliance.cli.audit_journal import JOURNAL, JournalHeads, heads_in_journal
from appliance.cli.failure import CommandLineError, Failure, as_failure
from appliance.cli.output import paint, print_json, printable
from appliance.cli.service import (
    admin_client,
    check_databases,
    find_run_dir,
    find_state_dir,
    is_forwarded,
)
from appliance.pages import ChainReport, chain_report
from store import audit, exports
from store.audit import Head
from store.control_schema import CONTROL
from store.database import reading
from store.errors import StoreError
from store.evidence import (
    AUDIT_FILES,
    Findings,
    Recorded,
    examine,
    examine_folder,
    read_heads,
    recorded_in,
)
from store.heads import KEY_FILE, SigningKey, read_key

_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-fA-F]{64})")


class ChainLocation(NamedTuple):
    """Where a command reads the audit chain from."""

    database: Path
    folder: Path | None
    """The state directory, or None if the chain is in a single file."""


def verify(
    run_dir: str | None,
    state_dir: str | None,
    file: str | None,
    *,
    heads: list[str],
    journal: bool | None,
    noted: list[str],
    as_json: bool,
) -> int:
    """Check the chain against all recorded heads, print the result, and return the exit code. `journal`
    selects the heads to read from the journal: all (True), only those recorded for this state
    directory (None), or none (False).
    """
    if file is None and state_dir is None and is_forwarded(run := find_run_dir(run_dir)):
        if heads or noted or journal:
            raise CommandLineError(
                f"{run} contains only a forwarded socket, so the service itself verifies its chain: --heads, "
                "--head and --journal work only on the service's machine, or with --file and an export"
            )
        report = _of_service(run)
        if as_json:
            print_json(report)
        else:
            _say(report)
        return 0 if report.ok else 1
    location = chain_location(run_dir, state_dir, file)
    with as_failure(StoreError):
        recorded = [_noted(text) for text in noted]
        for name in heads:
            if name != "-" and not Path(name).exists():
                raise Failure(
                    f"--heads: the file {name} does not exist; give a text file that contains "
                    "chain heads, such as the output of journalctl"
                )
            recorded += (
                recorded_in(sys.stdin or (), "standard input") if name == "-" else read_heads(Path(name))
            )
        from_journal = _from_journal(location, journal)
        recorded += from_journal.heads
        if location.folder is not None:
            findings = examine_folder(location.folder, recorded)
        else:
            findings = _examine_file(location.database, recorded, state_dir)
    report = chain_report(location.database, findings, findings.sources.get(JOURNAL, 0), from_journal.missing)
    if as_json:
        print_json(report)
    else:
        _say(report)
    return 0 if report.ok else 1


def _of_service(run_dir: Path) -> ChainReport:
    """Ask the service in `run_dir` to verify its own chain. Raises Failure if it does not answer."""
    with admin_client(str(run_dir)) as client:
        report = client.call(calls.verify_audit())
    report.notes.append(
        "the service verified its own chain: to verify the files without trusting the service, run this "
        "command on the service's machine"
    )
    return report


def export(
    run_dir: str | None, state_dir: str | None, file: str | None, target: str | None, *, as_json: bool
) -> None:
    """Write the chain to a file or standard output. If the export fails, no file is created."""
    location = chain_location(run_dir, state_dir, file)
    key = _key(location)
    with as_failure(StoreError), reading(location.database, CONTROL) as connection, _output(target) as out:
        for line in exports.lines_of(audit.all_rows(connection), key):
            out.write(line)
    if target is not None and as_json:
        _, trailer = exports.read(Path(target))
        assert trailer is not None
        print_json(
            {
                "path": str(Path(target).absolute()),
                "rows": trailer.rows,
                "head": {"seq": trailer.head.seq, "hash": trailer.head.hash},
                "signed": trailer.signature is not None,
            }
        )
    if key is None:
        print("The export is not signed, because the service's audit.key cannot be read.", file=sys.stderr)


def _examine_file(path: Path, recorded: list[Recorded], state_dir: str | None) -> Findings:
    """Check a copy or export of the chain, using the key next to the file or in the given state directory."""
    try:
        key = read_key((path.parent if state_dir is None else Path(state_dir)) / KEY_FILE)
    except StoreError:
        if state_dir is not None:
            raise
        found = examine(path, recorded)
        unchecked = (
            "signatures were not checked: use --state-dir to set the folder that contains the service's "
            "audit.key"
        )
        return found._replace(notes=[*found.notes, unchecked])
    return examine(path, recorded, key)


# ── the location of the chain ──


def chain_location(run_dir: str | None, state_dir: str | None, file: str | None) -> ChainLocation:
    if file is not None:
        return ChainLocation(Path(file).absolute(), None)
    run = find_run_dir(run_dir)
    if state_dir is None and is_forwarded(run):
        raise Failure(
            f"{run} contains only a forwarded socket, so the service's files are on another machine: run "
            "this command there, or use --state-dir to name a folder that contains the files"
        )
    folder = find_state_dir(state_dir, run)
    check_databases(folder, None if state_dir else run, *AUDIT_FILES)
    return ChainLocation(folder / "control.db", folder)


def _key(location: ChainLocation) -> SigningKey | None:
    try:
        return read_key(location.folder / KEY_FILE) if location.folder is not None else None
    except StoreError:
        return None


@contextmanager
def _output(target: str | None) -> Iterator[TextIO]:
    if target is None:
        yield sys.stdout
        return
    path = Path(target).absolute()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        unfinished.rename(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written ({error.strerror}): choose another file") from error
    finally:
        unfinished.unlink(missing_ok=True)


# ── heads ──


def _noted(text: str) -> Recorded:
    found = _HEAD.fullmatch(text.strip())
    if not found:
        raise CommandLineError(
            f"--head {text[:100]!r} is not valid: write SEQ:HASH, the row number and the 64 hex digits "
            "of the row's hash"
        )
    return Recorded(Head(int(found[1]), found[2].lower()), "--head")


def _from_journal(location: ChainLocation, wanted: bool | None) -> JournalHeads:
    if wanted:
        found = heads_in_journal(None)
        if not found.heads:
            raise Failure(
                f"the journal's audit heads cannot be used: {found.missing}. Run this command as root "
                "or as a member of the systemd-journal group, pass the journal's output with --heads "
                "FILE, or omit --journal"
            )
        return found
    if wanted is not None:
        return JournalHeads([], "--no-journal")
    if location.folder is None:
        return JournalHeads(
            [],
            "the journal was not read, because --file was given; add --journal to use all heads in the "
            "journal",
        )
    return heads_in_journal(location.folder)


# ── output ──


def _say(report: ChainReport) -> None:
    reason = f" ({printable(report.journal_missing)})" if report.journal_missing else ""
    print(
        f"checked against: the chain itself, {_of_heads(report.heads - report.journal_heads, 'recorded')}, "
        f"{_of_heads(report.journal_heads, 'journal')}{reason}"
    )
    for problem in report.problems:
        print(paint(f"problem: {printable(problem)}", "red"))
    for note in report.notes:
        print(paint(f"note: {printable(note)}", "yellow"))
    path = printable(report.path)
    if report.ok:
        print(f"{path} is complete and unchanged: {report.rows:,} rows")
        print(f"head {report.head.seq}:{printable(report.head.hash)}")
    else:
        print(f"{path} is incomplete or was changed; the first {report.rows:,} rows are unchanged")


def _of_heads(number: int, kind: str) -> str:
    return f"{number or 'no'} {kind} head{'s' * (number != 1)}"
