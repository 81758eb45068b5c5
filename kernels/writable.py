"""Checks that an output file is writable before a long computation starts."""

from __future__ import annotations

from pathlib import Path


class UnwritableError(ValueError):
    """Raised if an output file cannot be written. The message contains the option, the path and the
    reason."""


def check_writable(option: str, path: Path | None) -> None:
    """Create an output file's parent folder and check that the file can be written. An existing file is not
    changed, and no new file is left behind. Does nothing if `path` is None. Raises UnwritableError if the
    file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            # If the path is a dangling symbolic link, remove only the new file it points to, not the link.
            path.resolve().unlink()
    except OSError as error:
        raise UnwritableError(
            f"{option} is {path}, which cannot be written ({error.strerror}); name a writable file"
        ) from None
