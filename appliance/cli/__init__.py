"""The command line. Commands load what they need when they run: `--help` costs an interpreter and typer."""

from __future__ import annotations

import io
import os
import sys

from appliance.cli.failure import Failure


def main() -> int:
    """The entry point `appliance`: 0 for success, 1 for a failure, 2 for a command line that is wrong."""
    # Characters that a terminal cannot show, or bytes that are no text, become substitutes, not tracebacks.
    for stream, substitute in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=substitute)
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        # Standard output. What is still buffered goes nowhere, without a word at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # there, whoever read us has seen enough
            print(f"appliance: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _run() -> int:
    from appliance.cli.app import app

    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Failure as failure:
        sys.stdout.flush()
        print(f"appliance: {failure}", file=sys.stderr)
        return 1
    return 0
