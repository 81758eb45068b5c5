"""The command line. Each command imports its modules only when it runs, so `--help` loads only typer."""

from __future__ import annotations

import io
import os
import sys

from appliance.cli.failure import Failure


def main() -> int:
    """Run the `appliance` command. Return 0 for success, 1 for a failure, or 2 for an invalid command
    line."""
    # Replace characters that the terminal cannot show and bytes that are not valid text; printing them would
    # otherwise raise an error.
    for stream, substitute in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=substitute)
    try:
        code = _run()
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            print(f"appliance: {_shortened(error.filename)}: {error.strerror}", file=sys.stderr)
            return 1
        # Writing to standard output failed. Drop the buffered output; otherwise, the interpreter would try to
        # write it at exit and report a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # a reader such as `head` may close the pipe on purpose
            print(f"appliance: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
    return code


def _run() -> int:
    from appliance.cli.app import app
    from appliance.ownership import UntrustedError

    try:
        app()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except (Failure, UntrustedError) as failure:
        sys.stdout.flush()
        print(f"appliance: {failure}", file=sys.stderr)
        return failure.code if isinstance(failure, Failure) else 1
    except UnicodeEncodeError as error:
        # Command-line arguments may contain bytes that are not UTF-8, but everything the command sends or
        # prints must be valid UTF-8.
        print(
            f"appliance: {_shortened(error.object)!r} is not UTF-8 text: write it in UTF-8", file=sys.stderr
        )
        return 2
    return 0


def _shortened(value: object) -> str:
    text = os.fsdecode(value) if isinstance(value, bytes) else str(value)
    return text if len(text) <= 200 else f"{text[:100]}…{text[-99:]}"
