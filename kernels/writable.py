"""Checks that an output file can be written, before long work begins."""

from __future__ import annotations

from pathlib import Path


class UnwritableError(ValueError):
    """A file cannot be written: the message names the option, the path and the reason."""


def check_writable(option: str, path: Path | None) -> None:
    """Create the parent folder of an output file and check that the file can be written. An existing
    file keeps its content, and no new file is left behind. A path of None is ignored. Raises
    UnwritableError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            # A dangling symbolic link stays a link: only the file that it names is removed.
            path.resolve().unlink()
    except OSError as error:
        raise UnwritableError(
            f"{option} is {path}, which cannot be written ({error.strerror}); name a writable file"
        ) from None
