"""Finding out before long work, not after it, whether its result can be written."""

from __future__ import annotations

from pathlib import Path


class UnwritableError(ValueError):
    """A file cannot be written: the message names the option, the path and the reason."""


def check_writable(option: str, path: Path | None) -> None:
    """Make the folder of a file, and see that the file can be written there; what stands in it stays, and
    where there is none, none is left. None is passed over. Raises UnwritableError."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a"):
            pass
        if is_new:
            # A link to no file stays one: what was made is the file that it names.
            path.resolve().unlink()
    except OSError as error:
        raise UnwritableError(
            f"{option} is {path}, which cannot be written ({error.strerror}): name a file that can"
        ) from None
